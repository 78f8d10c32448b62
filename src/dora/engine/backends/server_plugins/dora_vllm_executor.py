"""A vLLM executor whose only worker is in the process of vLLM's engine.

    --distributed-executor-backend dora_vllm_executor.InProcessExecutor

On a CPU, vLLM puts the worker into a process of its own, because it sets the threads of OpenMP there. Both
processes spin while they wait for each other, which costs more CPU time than a small model. vLLM replaces its
own executor of this kind only by name, so a subclass is kept. It needs VLLM_CPU_OMP_THREADS_BIND=nobind, with
which vLLM leaves the threads alone.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor  # type: ignore[import-not-found]


class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor "uni"."""
