"""A vLLM executor whose only worker is in the process of vLLM's engine.

    --distributed-executor-backend dora_vllm_executor.InProcessExecutor

On a CPU, vLLM puts the worker into a process of its own, because it sets the threads of OpenMP there. Both
processes spin while they wait for each other, which costs more CPU time than a small model. vLLM replaces its
own executor of this kind only by name, so a subclass is kept. It needs VLLM_CPU_OMP_THREADS_BIND=nobind, with
which vLLM leaves the threads alone.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dora_vllm import PACE_VARIABLE  # type: ignore[import-not-found]
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # type: ignore[import-not-found]


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor "uni".

    With DORA_VLLM_MIN_STEP_S in its environment, a step lasts at least so many seconds, to imitate an
    accelerator on a CPU, as `engine.min_step_time` does for DORA-RL's own engine.
    """

    _min_step_s = float(os.environ.get(PACE_VARIABLE, "0"))
    _ended_s = 0.0  # when the last step ended

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        began_s = time.monotonic()
        output = super().execute_model(scheduler_output, non_block)
        if self._min_step_s and scheduler_output.total_num_scheduled_tokens:
            was_idle = began_s - self._ended_s > self._min_step_s
            due_s = (began_s if was_idle else self._ended_s) + self._min_step_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._ended_s = max(due_s, time.monotonic())
        return output
