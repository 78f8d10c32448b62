"""What a trainer outside gets: groups of the sample stream as lines of JSON, and versions as safetensors.

For threads of the service: the run is touched through its stream and its weight store alone.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from dora.core.records import GroupId
from dora.errors import ServiceError
from dora.stream.feed import GroupReader
from dora.stream.samples import StoredSample

if TYPE_CHECKING:
    from dora.runtime.plan import Plan

FIELDS = tuple(name for name in StoredSample._fields if name != "stream_index")  # which is the run's own


def check_fields(names: Sequence[str]) -> None:
    """Raises ServiceError for a field that samples do not have."""
    for place, name in enumerate(names, start=1):
        if name not in FIELDS:
            raise ServiceError(422, f"fields: name {place} is none of a sample's: {', '.join(FIELDS)}")


def lines_of(stream: Path, groups: Sequence[GroupId], fields: Sequence[str]) -> list[bytes]:
    """A line for each committed group: its fields as lists, sibling by sibling; null: there is none.

    They are leased while they are read, and ended with their step. Raises RunError if one does not come.
    """
    with contextlib.closing(GroupReader(stream)) as reader:
        return [_line(group, reader.group(group), fields) for group in groups]


def _line(group: GroupId, samples: Sequence[StoredSample], fields: Sequence[str]) -> bytes:
    columns = {name: [_field(sample, name) for sample in samples] for name in fields}
    return json.dumps({"group": str(group), "fields": columns}, separators=(",", ":")).encode() + b"\n"


def _field(sample: StoredSample, name: str) -> object:
    """Arrays as lists. Log-probs, which are those of drawn tokens, have a 0 for each token that was read."""
    value = getattr(sample, name)
    if name == "logprobs" and sample.loss_mask is not None:
        drawn = iter(value)
        return [next(drawn) if is_drawn else 0.0 for is_drawn in sample.loss_mask]
    return value.tolist() if hasattr(value, "tolist") else value


def open_version(plan: Plan, store: Path, version: int) -> BinaryIO:
    """A stored version as a safetensors file that ends when it is closed.

    Raises ServiceError if the version is not stored, or there is no room to write it.
    """
    from safetensors.torch import save_file

    from dora.model.weights import Layout
    from dora.weights.store import WeightStore

    kept = WeightStore(store, plan.config.engine.dtype)
    try:
        flat = kept.fetch(version)
    except FileNotFoundError as error:
        there = ", ".join(map(str, kept.versions())) or "none"
        raise ServiceError(404, f"version {version} is not stored (any more); stored are: {there}") from error
    try:
        with tempfile.TemporaryDirectory(dir=plan.out) as folder:
            file = Path(folder) / "tensors"
            save_file(Layout(plan.model).views(flat), file, metadata={"format": "pt"})
            return file.open("rb")
    except OSError as error:
        raise ServiceError(
            503, f"version {version} cannot be written: {error.strerror}; make room"
        ) from error
