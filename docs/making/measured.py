"""The tables of docs/benchmarks.md: one line for each result, with the conditions under which it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from docs.making import markdown

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Line(NamedTuple):
    """A result: what was measured, the value, the conditions and caveats, and the files in RESULTS."""

    measured: str
    result: str
    conditions: str
    source: str  # names, separated by spaces


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function that writes it."""
    made = (
        measured_demo,
        measured_orchestration,
        measured_engine,
        measured_trainer,
        measured_stream,
        measured_faults,
        measured_gpu,
    )
    return {function.__name__: function for function in made}


def measured_demo() -> str:
    """The demo under two policies: one line for each run."""
    columns = (
        *("policy", "seed", "sampled reward", "greedy reward", "CPU s", "wall s", "live versions"),
        *("rollout utilisation", "stall s"),
    )
    lines = [
        (
            f"`{r['policy']}`",
            str(r["seed"]),
            f"{r['sampled_before']:.3f} to {r['sampled_after']:.3f}",
            f"{r['greedy_before']:.3f} to {r['greedy_after']:.3f}",
            *(f"{r['cpu_s']:.0f}", f"{r['wall_s']:.0f}", f"{r['live_versions']:.2f}"),
            *(f"{r['busy']:.2f}", f"{r['stall_s']:.1f}"),
        )
        for r in _read("demo")["rows"]
    ]
    return markdown.table(columns, lines)


def measured_orchestration() -> str:
    """Placement, migration, and the speed and tests of the orchestrator."""
    return _table([*_placement_lines(), *_orchestrator_lines()])


def _placement_lines() -> list[Line]:
    place, move = _ratios("placement"), _ratios("migration")
    elastic, slow = _ratios("elastic"), _ratios("slow_fleet")
    prefill = [move[f"reprefill_over_migrate_{model}"] for model in ("demo", "30m")]
    fleet = "4 paced engines with one version slot, 8 ms a step, lengths with maximum over mean 10, S = 4"
    return [
        Line(
            "rollout utilisation, dynamic and static placement",
            f"{place['occupancy_orchestrated']:.2f}, {place['occupancy_static']:.2f}",
            fleet,
            "placement",
        ),
        Line(
            "wall time, static over dynamic placement",
            f"{place['static_over_orchestrated_wall_s']:.2f} times",
            fleet,
            "placement",
        ),
        Line(
            "CPU time, prefill of 1,000 tokens over their KV transfer",
            f"{prefill[0]:.0f} and {prefill[1]:.0f} times",
            "0.56 M and 29 M parameters, engines on one machine",
            "migration",
        ),
        Line(
            "median pause of a migrated request",
            f"{move['stop_steps']:.1f} decode steps",
            "engines on one machine",
            "migration",
        ),
        Line(
            "wall time without over with `trainer.elastic`",
            f"{elastic['apart_over_elastic_wall_s_demo']:.2f} and "
            f"{elastic['apart_over_elastic_wall_s_paced']:.2f} times",
            "the demo with one engine: as it is (slower with it), and paced to 8 ms a step",
            "elastic",
        ),
        Line(
            "time of a training step with one engine ten times slower, over equal engines",
            f"{slow['one_slow_over_all_alike_S1']:.2f} times; without the rules for slow engines "
            f"{slow['one_slow_over_all_alike_S1'] * slow['without_over_with_S1']:.1f} times",
            "4 simulated engines, S = 1",
            "slow_fleet",
        ),
    ]


def _orchestrator_lines() -> list[Line]:
    core, kills, swarm = _ratios("orchestrator"), _ratios("kill_during_migration"), _ratios("swarm")
    (largest,) = [row for row in _read("orchestrator")["rows"] if row["engines"] == 10_000]
    (worlds,) = _read("swarm")["rows"]
    return [
        Line(
            "time of the orchestrator for one event, p99",
            f"{core['handle_p99_ms']:.2f} ms",
            f"{largest['engines']:,} simulated engines, {largest['requests']:,} requests",
            "orchestrator",
        ),
        Line(
            "time of one rebalance decision; of a whole rebalance",
            f"{core['rebalance_ms']:.0f} ms; {core['whole_rebalance_ms'] / 1e3:.1f} s",
            "the same",
            "orchestrator",
        ),
        Line(
            "findings of audit and replay after engines were killed during migrations",
            f"{kills['findings']:.0f} in {kills['kills']:.0f} kills",
            "real processes on one machine",
            "kill_during_migration",
        ),
        Line(
            "violations and deadlocks in random simulated runs with faults",
            f"{swarm['violations']:.0f} and {swarm['deadlocks']:.0f} in {worlds['seeds']:,} runs",
            f"{worlds['events']:,} events, virtual time",
            "swarm",
        ),
    ]


def measured_engine() -> str:
    """Decode steps of the engine beside other decoders."""
    e, v, x = _ratios("engine"), _ratios("versions"), _ratios("exact")
    decoding = x["exact_over_normal_decode_0.5M_float32_batch_32"]
    training = x["exact_over_normal_trainer_forward_and_backward_0.5M_float32_batch_8"]
    return _table(
        [
            Line(
                "CPU time of a bare torch loop with a static cache",
                f"{e['vs_bare']:.1f} and {e['vs_bare_10M']:.1f} times",
                "0.56 M and 9.5 M parameters; with equal contexts in all rows only "
                f"{e['vs_bare_equal_lengths']:.1f} times",
                "engine",
            ),
            Line(
                "CPU time of `generate` of transformers, of its continuous batching, of vLLM for CPU",
                f"{e['vs_generate']:.1f}, {e['vs_continuous_batching']:.1f}, {e['vs_vllm_cpu']:.1f} times",
                "0.56 M parameters; these libraries are built for larger models",
                "engine",
            ),
            Line(
                "share of the machine's memory and arithmetic limits that the engine reaches",
                f"{e['roofline_share_10M']:.2f}",
                f"9.5 M parameters; {e['roofline_share']:.2f} with 0.56 M",
                "engine",
            ),
            Line(
                "time of a step with one version, over two versions of 24 and 8 rows",
                f"{v['one_over_24_8_rows_0.5M']:.2f} and {v['one_over_24_8_rows_10M']:.2f} times",
                "0.56 M and 9.5 M parameters",
                "versions",
            ),
            Line(
                "time of exact over normal mode, decode step; forward and backward pass of the trainer",
                f"{decoding:.2f} and {training:.2f} times",
                "0.56 M parameters in float32; more in bfloat16",
                "exact",
            ),
        ]
    )


def measured_trainer() -> str:
    """Training steps beside other trainers."""
    ratios, kills, stops = _ratios("trainer"), _ratios("resume"), _ratios("checkpoint")
    padded, trl, memory = (
        [ratios[name + size] for size in ("", "_10M", "_60M")]
        for name in ("vs_padded_loop", "vs_trl", "peak_memory_over_padded")
    )
    sizes = "0.56 M, 9.5 M and 60 M parameters"
    return _table(
        [
            Line(
                "CPU time of a padded loop of transformers and AdamW",
                f"{', '.join(f'{ratio:.1f}' for ratio in padded)} times",
                f"{sizes}; lengths with a heavy tail, which padding wastes",
                "trainer",
            ),
            Line(
                "CPU time of TRL's `GRPOTrainer`",
                f"{', '.join(f'{ratio:.1f}' for ratio in trl)} times",
                f"{sizes}; the same lengths",
                "trainer",
            ),
            Line(
                "peak memory as a share of the padded loop's",
                ", ".join(f"{ratio:.2f}" for ratio in memory),
                sizes,
                "trainer",
            ),
            Line(
                "stop of the trainer for a checkpoint, written before it goes on over copied",
                f"{stops['stop_before_over_now_60M']:.1f} times",
                "60 M parameters, 0.7 GB of weights and moments",
                "checkpoint",
            ),
            Line(
                "violations found after all processes of a run were killed and the run resumed",
                f"{kills['violations']:.0f} in {kills['kills']:.0f} kills",
                "random instants, one machine",
                "resume",
            ),
        ]
    )


def measured_stream() -> str:
    """The sample stream beside TransferQueue, and what it makes possible."""
    ratios: dict[str, float] = {}
    for name in ("stream", "workflow", "weights", "datapath"):
        ratios |= _ratios(name)
    return _table(
        [
            Line(
                "latency of a row of 512 tokens from put to get, TransferQueue 0.1.11 over the stream",
                f"{ratios['latency_vs_transferqueue']:.1f} times",
                "producer, storage and consumer are three processes of one machine",
                "stream",
            ),
            Line(
                "rows per second in batches of 256, over TransferQueue's",
                f"{ratios['throughput_vs_transferqueue']:.0f} times",
                "the same",
                "stream",
            ),
            Line(
                "bandwidth with batches of 100 MB, as a share of memcpy",
                f"{ratios['memcpy_share']:.2f}",
                "the same",
                "stream",
            ),
            Line(
                "time of a training step, task by task over pipelined",
                f"{ratios['task_by_task_over_pipelined_step_s_demo']:.1f} times",
                "the demo with two reward tasks and a reference policy",
                "workflow",
            ),
            Line(
                "pause of rows for a new version, eager over deferred load",
                f"{ratios['eager_over_deferred_stop_60M']:.1f} times",
                "60 M parameters",
                "weights",
            ),
            *_transfer_lines(ratios),
            Line(
                "CPU time of the driver per trained response",
                f"{ratios['driver_cpu_ms']:.2f} ms",
                f"the demo; {ratios['messages_per_group']:.0f} messages and "
                f"{ratios['transactions_per_group']:.1f} transactions for a group of 8",
                "datapath",
            ),
            Line(
                "time from the last reward of a batch to the training step that waits for it",
                f"{ratios['reward_to_train_ms']:.1f} ms",
                "the same; scoring is a message, a transaction and an event",
                "datapath",
            ),
        ]
    )


def _transfer_lines(ratios: Mapping[str, float]) -> list[Line]:
    """The time of publish and load; none while the file has no measurement of them."""
    prefix = "publish_and_load_s_per_gb_"
    sizes = [name.removeprefix(prefix) for name in ratios if name.startswith(prefix)]
    return [
        Line(
            f"seconds per GB to publish a version and load it, a version of {size.replace('_', ', ')}",
            f"{ratios[prefix + size]:.2f} s",
            "digests of both sides included, on an otherwise idle CPU engine",
            "weights",
        )
        for size in sizes
    ]


def measured_faults() -> str:
    """Faults in real runs, and other runtimes and engines."""
    found, rows, cluster = _ratios("faults"), _read("faults")["rows"], _ratios("cluster")
    kept, cost = _read("kept_tokens")["rows"], _ratios("kept_tokens")
    recovery = {row["kind"]: row["recovery_s_p50"] for row in rows}
    vllm, sglang = _ratios("vllm_fleet"), _ratios("sglang_fleet")
    return _table(
        [
            Line(
                "generation time that a response lost at most if its engine was killed; if everything was",
                f"{kept[0]['max_lost_s']:.2f} s; {kept[1]['max_lost_s']:.2f} s",
                f"{kept[0]['kills']} and {kept[1]['kills']} kills, medians {kept[0]['median_lost_s']:.2f} "
                f"and {kept[1]['median_lost_s']:.2f} s; `dora audit` found nothing",
                "kept_tokens",
            ),
            Line(
                "cost of a report of unfinished responses, of the time between two: engine; driver",
                f"{100 * cost['a report / its interval, engine']:.2f} %; "
                f"{100 * cost['a report / its interval, driver']:.2f} %",
                f"{kept[2]['engine_ms']:.1f} and {kept[2]['driver_ms']:.1f} ms: {kept[2]['new_tokens']:,} "
                f"tokens of {kept[2]['responses']} responses of {kept[2]['length']}",
                "kept_tokens",
            ),
            Line(
                "samples lost, trained twice, of mixed versions, too stale",
                ", ".join(f"{found[name]:.0f}" for name in ("lost", "doubled", "mixed", "too_stale")),
                f"{found['injected']:.0f} faults of {len(rows)} kinds, one every "
                f"{found['seconds_per_fault']:.1f} s, on one machine",
                "faults",
            ),
            Line(
                "trained tokens per second with these faults, over without",
                f"{found['throughput_with_over_without']:.2f}",
                "4 paced engines, 40 ms a step",
                "faults",
            ),
            Line(
                "median recovery of a killed engine; of a killed trainer, with its steps redone",
                f"{recovery['engine killed']:.1f} s; {recovery['trainer killed']:.1f} s",
                "a small model; at least 1 s of it is backoff",
                "faults",
            ),
            Line(
                "tokens per second on Ray, over local processes",
                f"{cluster['ray_over_local_tokens_per_s']:.2f}",
                "the demo on one machine; several machines were not available",
                "cluster",
            ),
            Line(
                "passed tests of the engine contract on real servers of vLLM; of SGLang",
                "; ".join(
                    f"{r['contract_passed']:.0f} of {r['contract_passed'] + r['contract_failed']:.0f}"
                    for r in (vllm, sglang)
                ),
                "on CPUs",
                "vllm_fleet sglang_fleet",
            ),
        ]
    )


def measured_gpu() -> str:
    """The first hour on a GPU."""
    figures = {(row["stage"], row["what"]): row["value"] for row in _read("gpu")["rows"]}

    def of(stage: str, *names: str) -> list[float]:
        return [float(figures[stage, name]) for name in names]

    return _table(
        [*_gpu_decode_lines(of), *_gpu_prefill_lines(of), *_gpu_trainer_lines(of), *_gpu_run_lines(of)]
    )


def _gpu_decode_lines(of: Callable[..., list[float]]) -> list[Line]:
    def both(what: str) -> list[float]:
        """A figure of Qwen3-0.6B and of Qwen3-8B."""
        return [*of("engine-0.6B", f"0.6B {what}"), *of("engine-8B", f"8B {what}")]

    step_ms, copy = both("decode 64 1024: step_ms"), both("decode 64 1024: of_roofline")
    one, two = both("versions 64 8192: step_ms"), both("versions 32 + 32 8192: step_ms")
    tokens, long = both("decode 256 1024: tokens_per_s"), both("unequal 1x32768 + 127x1024: long_row")
    return [
        Line(
            "decode step of 64 rows with 1,024 tokens each",
            f"{step_ms[0]:.1f} and {step_ms[1]:.1f} ms",
            f"Qwen3-0.6B and Qwen3-8B; {copy[0]:.2f} and {copy[1]:.2f} of the speed of a copy in device "
            "memory, which also writes (so more than 1 is possible)",
            "gpu",
        ),
        Line(
            "tokens per second with 256 rows of 1,024 tokens",
            f"{tokens[0]:,.0f} and {tokens[1]:,.0f}",
            "the same",
            "gpu",
        ),
        Line(
            "step with two versions over a step with one",
            f"{two[0] / one[0]:.2f} and {two[1] / one[1]:.2f} times",
            "the same, 64 rows with 8,192 tokens each",
            "gpu",
        ),
        Line(
            "step of 127 rows of 1,024 and one of 32,768 tokens, over 128 rows of 1,024",
            f"{long[0]:.2f} and {long[1]:.2f} times",
            "the same",
            "gpu",
        ),
    ]


def _gpu_prefill_lines(of: Callable[..., list[float]]) -> list[Line]:
    stages = (("arrivals", "0.6B"), ("engine-8B", "8B"))
    replayed, launched = (
        [of(stage, f"{model} prefill 100: {how}_ms")[0] for stage, model in stages]
        for how in ("replayed", "launched")
    )
    (arrivals,) = of("arrivals", "0.6B arrivals: tokens_per_s")
    (nano,) = of("engine-0.6B", "0.6B nano: tokens_per_s")
    return [
        Line(
            "prefill of 100 tokens, kernels launched one by one over replayed rows of a step",
            f"{launched[0] / replayed[0]:.0f} and {launched[1] / replayed[1]:.0f} times",
            f"Qwen3-0.6B and Qwen3-8B; replayed {replayed[0]:.1f} and {replayed[1]:.1f} ms",
            "gpu",
        ),
        Line(
            "tokens per second while a request arrives in each step",
            f"{arrivals:,.0f}",
            "Qwen3-0.6B, 64 rows, prompts of 100 tokens; no decode step is computed in vain",
            "gpu",
        ),
        Line(
            "tokens per second, 256 requests",
            f"{nano:,.0f}",
            "Qwen3-0.6B, prompts and outputs of 100 to 1,024 tokens",
            "gpu",
        ),
    ]


def _gpu_trainer_lines(of: Callable[..., list[float]]) -> list[Line]:
    compiled = ("", ", micro-batches of 32k tokens", ", no checkpointing")
    mfu = of("gradient", "step: MFU", *(f"compiled step{how}: MFU" for how in compiled))
    grouped, first_s = of("gradient", "compiled step, groups of 4: MFU", "compiled step: the first one")
    (with_cudnn, without) = of("doctor", *(f"SDPA with cuDNN {how}: a new shape" for how in ("on", "off")))
    (gap,) = of("gradient", "gradient in float32: distance from the CPU's in float32")
    return [
        Line(
            "MFU of a training step: not compiled, compiled, with micro-batches of 32k instead of 16k "
            "tokens, without activation checkpointing",
            f"{mfu[0]:.3f}, {mfu[1]:.3f}, {mfu[2]:.3f}, {mfu[3]:.3f}",
            "Qwen3-0.6B, 32 samples with prompts of 256 and responses of 512 to 1,024 tokens; compiled, with "
            f"four responses per prompt: {grouped:.3f}; compilation takes {first_s:.0f} s",
            "gpu",
        ),
        Line(
            "distance of a gradient in float32 from the CPU's",
            f"{gap:.1e}",
            "norm of the difference over the norm; a small model",
            "gpu",
        ),
        Line(
            "attention of a new length, with cuDNN and without",
            f"{with_cudnn:.0f} and {without:.2f} ms",
            "so DORA-RL switches cuDNN's attention off",
            "gpu",
        ),
    ]


def _gpu_run_lines(of: Callable[..., list[float]]) -> list[Line]:
    ways = [f"{way}: {what}" for way in ("staged", "ipc") for what in ("copy", "stop time")]
    copied = of("migrations", *ways)
    names = ("publish version 1", "load while 8 rows decode, digest included", "decoding paused")
    synced = of("publish", *(f"8B: {name}" for name in names))
    (kl,) = of("runs", "mismatch/kl, largest of the steps")
    (gain,) = of("demo", "demo: gain of the held-out reward")
    return [
        Line(
            "publish a version; load it while 8 rows decode; of it decoding pauses",
            f"{synced[0]:.2f}, {synced[1]:.2f}, {synced[2]:.3f} s/GB",
            "Qwen3-8B in bfloat16, 16.4 GB, through shared memory; three other stages ran as well",
            "gpu",
        ),
        Line(
            "copy of the KV of a running request, and its pause",
            f"staged {copied[0]:.0f} and {copied[1]:.1f} ms, CUDA IPC {copied[2]:.1f} and {copied[3]:.1f} ms",
            "116 MB (Qwen3-0.6B, 1,000 tokens), between two engine processes on one GPU",
            "gpu",
        ),
        Line(
            "largest KL divergence of trainer and engine",
            f"{kl:.1e} nats per token",
            "five steps at the shapes of Qwen3-0.6B in bfloat16, random weights, two other stages at once",
            "gpu",
        ),
        Line(
            "gain of the demo's held-out reward in 150 steps",
            f"{gain:.2f}",
            "engine and trainer in turn on one GPU; `dora audit --deep` found nothing",
            "gpu",
        ),
    ]


def _table(lines: Iterable[Line]) -> str:
    return markdown.table(
        ("measured", "result", "conditions", "file"),
        [(line.measured, line.result, line.conditions, _links(line.source)) for line in lines],
    )


def _links(names: str) -> str:
    return ", ".join(f"[`{name}`](../benchmarks/results/{name}.json)" for name in names.split())


def _ratios(name: str) -> dict[str, float]:
    ratios: dict[str, float] = _read(name)["ratios"]
    return ratios


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content
