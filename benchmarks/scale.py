"""How long a forecast takes: 10,000 accelerators, 8,192 x 16 answers a step, 64k tokens, on one core.

The production orchestrator decides for 1,000 engines under `dora`, S = 2, while 6,000 devices train. Timed is
the whole simulation, in CPU seconds; an event's cost is to be flat, over the run and over sizes.

    python benchmarks/scale.py [--quick] [--json FILE]
"""

from __future__ import annotations

import resource
import time

from report import Row, parse_options, publish

from dora.runtime.garbage import no_pauses
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.hardware import DEVICES
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.shapes import SHAPES

TENSOR, BATCH, GROUP, LIMIT = 4, 8192, 16, 65_536
SHARES = (1 / 16, 1.0)  # of the whole: of its devices and of its batch


def setup_of(share: float, num_steps: int) -> Setup:
    lengths = Lengths(LIMIT, 3000.0, tail=1.3, prompt=500, alike=0.3)
    num_engines = round(1000 * share)
    device = DEVICES["H800"]
    layout = Layout(
        "dora", 2, (device, round(6000 * share)), ((device, TENSOR * num_engines),), TENSOR, interval_s=60.0
    )
    return Setup(Job(SHAPES["qwen2.5-32b"], lengths, round(BATCH * share), GROUP), layout, num_steps)


def measure(share: float, num_steps: int) -> Row:
    setup = setup_of(share, num_steps)
    player, marks = setup.player(), list[tuple[float, int]]()
    began_s = time.process_time()
    for _ in player.steps():
        marks.append((time.process_time(), player.outcome.num_events))
    took_s, outcome = time.process_time() - began_s, player.outcome
    found = outcome.figures(len(setup.engines), setup.num_rows, 2)
    window = len(marks) // 4
    return {
        "devices": setup.layout.num_devices,
        "engines": len(setup.engines),
        "answers_per_step": setup.job.num_answers,
        "steps": num_steps,
        "events": outcome.num_events,
        "cpu_s": took_s,
        "event_us": 1e6 * took_s / outcome.num_events,
        "event_us_early": cost_us(marks[3], marks[3 + window]),
        "event_us_late": cost_us(marks[-4 - window], marks[-4]),
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "simulated_hours": outcome.steps[-1].ended_s / 3600,
        "step_s": found["step_s"],
        "staleness_max": found["staleness_max"],
        "moves_per_step": found["moves"],
    }


def cost_us(first: tuple[float, int], last: tuple[float, int]) -> float:
    """CPU time of an event between two training steps."""
    return 1e6 * (last[0] - first[0]) / (last[1] - first[1])


def main() -> None:
    options = parse_options(str(__doc__))
    with no_pauses():
        rows = [
            measure(share, 12 if options.quick else 50) for share in (SHARES[:1] if options.quick else SHARES)
        ]
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
