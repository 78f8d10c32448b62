"""CPU time of a forecast of 10,000 accelerators: 8,192 x 16 answers a step of up to 64k tokens, on one core.

The production orchestrator schedules 1,000 engines under `dora`, S = 2, while 6,000 devices train. The whole
simulation is timed in CPU seconds; the cost of an event should be constant over the run and over sizes.

    python benchmarks/scale.py [--quick] [--json FILE]
"""

from __future__ import annotations

import resource
import time

from dora.planner.cluster import Deployment, Layout, Workload
from dora.planner.hardware import DEVICES, MODELS
from dora.planner.lengths import LengthDistribution
from dora.runtime.run import low_latency
from report import Row, parse_options, publish

TP_SIZE, BATCH_SIZE, GROUP_SIZE, LIMIT = 4, 8192, 16, 65_536
FRACTIONS = (1 / 16, 1.0)  # of the devices and of the batch


def make_deployment(fraction: float, num_steps: int) -> Deployment:
    lengths = LengthDistribution(LIMIT, 3000.0, tail=1.3, prompt=500, correlation=0.3)
    num_engines = round(1000 * fraction)
    device = DEVICES["H800"]
    trainer, rollout = (device, round(6000 * fraction)), (device, TP_SIZE * num_engines)
    layout = Layout("dora", 2, trainer, (rollout,), TP_SIZE, rebalance_interval_s=60.0)
    workload = Workload(MODELS["qwen2.5-32b"], lengths, round(BATCH_SIZE * fraction), GROUP_SIZE)
    return Deployment(workload, layout, num_steps)


def measure(fraction: float, num_steps: int) -> Row:
    deployment = make_deployment(fraction, num_steps)
    simulator = deployment.simulator()
    after_steps: list[tuple[float, int]] = []  # CPU seconds and events so far
    started_s = time.process_time()
    for _ in simulator.run_steps():
        after_steps.append((time.process_time(), simulator.result.num_events))
    cpu_s, result = time.process_time() - started_s, simulator.result
    metrics = result.metrics(len(deployment.engines), deployment.num_rows, 2)
    window = len(after_steps) // 4
    return {
        "devices": deployment.layout.num_devices,
        "engines": len(deployment.engines),
        "answers_per_step": deployment.workload.num_answers,
        "steps": num_steps,
        "events": result.num_events,
        "cpu_s": cpu_s,
        "event_us": 1e6 * cpu_s / result.num_events,
        "event_us_early": cost_us(after_steps[3], after_steps[3 + window]),
        "event_us_late": cost_us(after_steps[-4 - window], after_steps[-4]),
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "simulated_hours": result.steps[-1].ended_s / 3600,
        "step_s": metrics["step_s"],
        "staleness_max": metrics["staleness_max"],
        "moves_per_step": metrics["migrations"],
    }


def cost_us(first: tuple[float, int], last: tuple[float, int]) -> float:
    """CPU time per event between two training steps."""
    return 1e6 * (last[0] - first[0]) / (last[1] - first[1])


def main() -> None:
    options = parse_options(str(__doc__))
    with low_latency():
        fractions, num_steps = (FRACTIONS[:1], 12) if options.quick else (FRACTIONS, 50)
        rows = [measure(fraction, num_steps) for fraction in fractions]
    whole = rows[-1]
    ratios = {
        "cpu_s": float(whole["cpu_s"]),
        "memory_gb": float(whole["memory_gb"]),
        "late_over_early": float(whole["event_us_late"]) / float(whole["event_us_early"]),
        "largest_over_smallest": float(whole["event_us"]) / float(rows[0]["event_us"]),
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
