"""How long the trainer stops for a checkpoint, and how long the next step takes while the rest is written.

`whole_s` is the baseline, a checkpoint that the trainer writes before it goes on: weights, optimizer moments
and the folder that transformers loads. `stop_s` is the copy into host memory after which the trainer goes on,
while a thread writes. `step_s` is a training step alone, `beside_s` one that begins as the thread does, and
`write_s` the time from then to the reply. The baseline and the thread take turns. The first checkpoint of
each is left out. Files go to the folder of temporary files, and are not synced. --quick runs the smallest
model.

    python benchmarks/checkpoint.py [--quick] [--json FILE]
"""

from __future__ import annotations

import queue
import random
import statistics
import tempfile
import time
from pathlib import Path

from models import DEMO, SIXTY_MILLION, TEN_MILLION

from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, initial_weights
from dora.runtime.process.messages import CheckpointSaved, SaveCheckpoint
from dora.runtime.training.checkpoints import CheckpointWriter, Reply, TrainerState, write_checkpoint
from dora.trainer.checkpoint_folders import KeptCheckpoints
from dora.trainer.trainer import Sample, Trainer, TrainerSettings
from report import Row, parse_options, publish

MODELS = {"0.5M": DEMO, "10M": TEN_MILLION, "60M": SIXTY_MILLION}
NUM_REPEATS, NUM_QUICK = 4, 2
NUM_SAMPLES, PROMPT, RESPONSE = 4, 16, 120  # of a step


class Checkpoints:
    """A trainer with moments, and both ways to write its checkpoints."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        flat = initial_weights(config, seed=0, std=0.02)
        self._folder, self._model = folder, folder / "model"
        save_pretrained(self._model, config, flat)
        settings = TrainerSettings(lr=1e-6, num_steps=1000, warmup_steps=0)
        self._trainer, self._batch = Trainer(config, flat, settings), make_batch(config)
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._writer = CheckpointWriter(self._model, self._replies.put)
        self.step()

    def step(self) -> float:
        """Train; returns the time (s)."""
        began_s = time.perf_counter()
        self._trainer.step(self._batch)
        return time.perf_counter() - began_s

    def write_before_going_on(self) -> float:
        """Returns the time for which the trainer stops (s)."""
        request, began_s = self._request("baseline"), time.perf_counter()
        state = TrainerState(self._trainer.num_steps_done, self._trainer.flat, self._trainer.state_dict())
        check(write_checkpoint(request, self._model, state))
        return time.perf_counter() - began_s

    def write_beside_a_step(self) -> tuple[float, float, float]:
        """Returns the times of the copy, of the step after it, and until all is written (s)."""
        request, began_s = self._request("thread"), time.perf_counter()
        self._writer.start(request, self._trainer.num_steps_done, self._copy_state)
        copied_s = time.perf_counter()
        beside_s = self.step()
        check(self._replies.get())
        return copied_s - began_s, beside_s, time.perf_counter() - copied_s

    def _copy_state(self, shards: Path) -> TrainerState:
        flat = self._trainer.flat.detach().to("cpu", copy=True)
        return TrainerState(self._trainer.num_steps_done, flat, *self._trainer.save_state(shards))

    def _request(self, name: str) -> SaveCheckpoint:
        versions = self._folder / "versions"
        versions.mkdir()
        return SaveCheckpoint(self._folder / name, "{}", versions, KeptCheckpoints(1), fsync=False)


def check(reply: Reply) -> None:
    """Raise RuntimeError if a checkpoint was not written."""
    if not isinstance(reply, CheckpointSaved):
        raise RuntimeError(reply.reason)


def make_batch(config: ModelConfig) -> list[Sample]:
    """Random responses."""
    source = random.Random(0)
    return [
        Sample(
            [source.randrange(config.vocab_size) for _ in range(PROMPT)],
            [source.randrange(config.vocab_size) for _ in range(RESPONSE)],
            [-source.random() for _ in range(RESPONSE)],
            (-1.0, 1.0)[number % 2],
        )
        for number in range(NUM_SAMPLES)
    ]


def measure(name: str, repeats: int) -> Row:
    config = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(config, Path(folder))
        rounds = [
            (checkpoints.step(), checkpoints.write_before_going_on(), *checkpoints.write_beside_a_step())
            for _ in range(1 + repeats)
        ][1:]
    step_s, whole_s, stop_s, beside_s, write_s = (
        statistics.median(times) for times in zip(*rounds, strict=True)
    )
    return {
        "model": name,
        "state_gb": 12 * WeightLayout(config).numel / 1e9,  # fp32 weights and two moments
        "whole_s": whole_s,
        "stop_s": stop_s,
        "write_s": write_s,
        "step_s": step_s,
        "beside_s": beside_s,
        "checkpoints": repeats,
    }


def main() -> None:
    options = parse_options(__doc__)
    names = [*MODELS][:1] if options.quick else [*MODELS]
    rows = [measure(name, NUM_QUICK if options.quick else NUM_REPEATS) for name in names]
    ratios = {
        f"stop_before_over_now_{row['model']}": float(row["whole_s"]) / float(row["stop_s"]) for row in rows
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
