"""How Triton's kernels run, and that no example of a property has a time limit."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("dora", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dora")
