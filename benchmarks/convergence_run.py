"""One run of a verifiable task under one update policy, and its learning curve.

The run writes a checkpoint after each fifth of its steps. The checkpoints are evaluated after the run, so
that evaluation costs no training time.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dropping import MAX_STALENESS
from finished_run import metrics_of, summary_of
from rich.console import Console

from dora.audit import audit
from dora.config import load
from dora.core.types import GroupId, RequestId
from dora.data.tokenizer import Tokenizer
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.journal.reader import SampleRow, read_samples
from dora.loading import load_attribute
from dora.model.pretrained import load_config, load_pretrained
from dora.runtime.run import train
from report import git

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples" / "verifiable"
TASKS = ("chains", "countdown", "stories", "sorting")  # from the heaviest tail to none
MIXED = ("partial", "inflight")  # policies whose answers may have tokens of several versions
NUM_POINTS = 5  # of a curve, without its start
NUM_SAMPLED = 2  # sampled answers per held-out prompt
_ROWS = 64
_LOOSE = 6  # bound of `dropping` (versions): the trainer drops samples before it has an effect

CORRECTIONS = {"none": (), "tis": ("correction.proximal=recomputed", "correction.token=tis")}


@dataclass(frozen=True)
class Setting:
    """An update policy, its staleness bound and its off-policy correction."""

    policy: str  # as orchestrator.update_policy, or "dropping"
    max_staleness: int
    correction: str = "none"

    def changes(self, batch_size: int) -> Iterable[str]:
        """Overrides of the example's configuration."""
        yield from CORRECTIONS[self.correction]
        if self.policy == "dropping":
            # The slack admits as many groups as max_staleness does; the loose bound has no effect.
            yield f"orchestrator.max_staleness={_LOOSE}"
            yield f"orchestrator.slack={(_LOOSE - self.max_staleness) * batch_size}"
            yield f"trainer.backend={HERE / 'dropping.py'}:Dropping"
            return
        yield f"orchestrator.update_policy={self.policy}"
        if self.policy != "sync":
            yield f"orchestrator.max_staleness={self.max_staleness}"
        if self.policy == "drain":
            yield f"orchestrator.batches_per_version={self.max_staleness}"


def run(task: str, setting: Setting, seed: int, num_steps: int, num_prompts: int) -> dict[str, Any]:
    """Train and evaluate; returns a row."""
    example = EXAMPLES / f"{task}.toml"
    batch_size = load.read_config(example, []).trainer.batch_size
    every = num_steps // NUM_POINTS
    changes = [
        *setting.changes(batch_size),
        f"run.seed={seed}",
        f"run.steps={num_steps}",
        "eval.num_prompts=0",
        f"trainer.save_freq={every}",
        f"trainer.keep_last={NUM_POINTS + 1}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train(load.read_config(example, changes), out, Console(quiet=True))
        saved = [out / "checkpoints" / f"step-{every * point}" for point in range(1, NUM_POINTS + 1)]
        curve = accuracies(task, [EXAMPLES / task / "start", *saved], num_prompts)
        summary, lines = summary_of(out), metrics_of(out)
        samples = [*read_samples(out).values()]
        verdict = audit.check(out)
    assert verdict.c1 or setting.policy in MIXED
    assert verdict.c2
    assert verdict.c3
    named = {"task": task, "policy": setting.policy, "S": setting.max_staleness}
    named |= {"correction": setting.correction, "seed": seed, "steps": num_steps}
    figures = _figures(summary, lines) | _mixture(samples) | _lengths(setting, samples, num_steps)
    return named | {"git": git()} | figures | _curve(curve, lines, every)


def _figures(summary: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results in the summary and the metrics of the run."""
    ess = [line["off_policy/ess"] for line in lines if "off_policy/ess" in line]
    return {
        "wall_s": summary["wall_s"],
        "cpu_s": summary["cpu_s"],
        "staleness_mean": summary["staleness_mean"],
        "staleness_max": summary["staleness_max"],
        "ess": round(statistics.fmean(ess), 4),
        "kl": round(statistics.fmean(x["off_policy/kl_k3"] for x in lines if "off_policy/kl_k3" in x), 6),
    }


def _mixture(samples: Sequence[SampleRow]) -> dict[str, float]:
    """Fraction of answers with tokens of several versions, and mean number of versions of an answer."""
    counts = [max(1, len(sample.segments)) for sample in samples]
    return {
        "mixed_share": round(sum(count > 1 for count in counts) / len(counts), 4),
        "segments": round(statistics.fmean(counts), 4),
    }


def _curve(curve: Sequence[Accuracy], lines: Sequence[dict[str, Any]], every: int) -> dict[str, Any]:
    """Accuracy at each point, sampled and greedy, and the time until then (s)."""
    began_s = lines[0]["t_s"] - lines[0]["timing_s/step"]
    points = {f"at_{100 * i // NUM_POINTS}": round(own.sampled, 4) for i, own in enumerate(curve)}
    ends = {0: curve[0], 100: curve[-1]}
    points |= {f"greedy_at_{point}": round(own.greedy, 4) for point, own in ends.items()}
    points |= {
        f"untaught_at_{point}": round(own.untaught, 4)
        for point, own in ends.items()
        if own.untaught is not None
    }
    times = {
        f"s_at_{100 * point // NUM_POINTS}": round(lines[every * point - 1]["t_s"] - began_s, 3)
        for point in range(1, NUM_POINTS + 1)
    }
    return points | times


def _lengths(setting: Setting, samples: Sequence[SampleRow], num_steps: int) -> dict[str, Any]:
    """Lengths (tokens) of generated and of trained answers, and the dropped fraction.

    The lengths of trained answers by fifth of the run show a policy that trains short answers first.
    """
    max_staleness = MAX_STALENESS if setting.policy == "dropping" else setting.max_staleness
    trained: dict[int, list[SampleRow]] = {s.trained_step: [] for s in samples if s.trained_step is not None}
    for sample in samples:
        if sample.trained_step is not None and sample.trained_step - sample.version <= max_staleness:
            trained[sample.trained_step].append(sample)
    all_trained = [sample for own in trained.values() for sample in own]
    long = sorted(s.num_token_ids for s in samples)[int(0.9 * len(samples))]
    fifths = {
        f"trained_mean_fifth_{fifth + 1}": round(
            statistics.fmean(
                s.num_token_ids
                for step, own in trained.items()
                if 5 * step // num_steps == fifth
                for s in own
            ),
            2,
        )
        for fifth in range(5)
    }
    return {
        "dropped_share": _share_lost(samples, all_trained),
        "dropped_share_of_longest": _share_lost(
            [s for s in samples if s.num_token_ids >= long],
            [s for s in all_trained if s.num_token_ids >= long],
        ),
        **_shape("generated", [s.num_token_ids for s in samples]),
        **_shape("trained", [s.num_token_ids for s in all_trained]),
        **fifths,
    }


def _share_lost(generated: Sequence[SampleRow], trained: Sequence[SampleRow]) -> float:
    return round(1 - len(trained) / len(generated), 4)


def _shape(name: str, lengths: Sequence[float]) -> dict[str, float]:
    ordered = sorted(lengths)

    def quantile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    mean = round(statistics.fmean(ordered), 2)
    return {f"{name}_mean": mean, **{f"{name}_p{p}": quantile(p / 100) for p in (50, 90, 99)}}


@dataclass(frozen=True)
class Accuracy:
    """Fractions of correct answers to held-out prompts."""

    sampled: float
    greedy: float  # 0 if it was not measured
    untaught: float | None  # sampled, on prompts unlike all demonstrations; None: there are none


def accuracies(task: str, folders: Sequence[Path], num_prompts: int) -> list[Accuracy]:
    """The accuracy of each model; greedy answers of the first and the last one only.

    All models of all runs sample with the same random numbers.
    """
    example = load.read_config(EXAMPLES / f"{task}.toml", [])
    text = (EXAMPLES / task / "held_out.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()][:num_prompts]
    demonstration = load_attribute(f"{EXAMPLES / task}.py:demonstration", "task")
    untaught = {number for number, row in enumerate(rows) if demonstration(row, Random(0)) is None}
    context = example.data.max_prompt_length + example.sampling.max_response_length
    engine = Engine(load_config(folders[0]), max_rows=_ROWS, max_context=context, version_slots=1)
    found = []
    for version, folder in enumerate(folders):
        engine.load(version, load_pretrained(folder)[1])
        siblings = range(version not in (0, len(folders) - 1), 1 + NUM_SAMPLED)
        correct = _correct(engine, task, rows, siblings, version, example.sampling.max_response_length)
        engine.drop(version)
        sampled = [own.row for own in correct if own.sibling]
        of_untaught = sum(number in untaught for number in sampled) / NUM_SAMPLED
        found.append(
            Accuracy(
                len(sampled) / NUM_SAMPLED / len(rows),
                (len(correct) - len(sampled)) / len(rows),
                of_untaught / len(untaught) if untaught else None,
            )
        )
    return found


def _correct(
    engine: Engine, task: str, rows: Sequence[dict[str, Any]], siblings: range, version: int, max_tokens: int
) -> list[RequestId]:
    """The requests with correct answers."""
    tokenizer = Tokenizer(EXAMPLES / task / "start")
    reward = load_attribute(f"{EXAMPLES / task}.py:reward", "task")
    engine.submit(_requests(rows, siblings, tokenizer, version, max_tokens))
    correct = []
    while not engine.is_idle:
        for answer in engine.step():
            row = rows[answer.id.row]
            own = {key: value for key, value in row.items() if key != "prompt"}
            if reward(row["prompt"], tokenizer.decode(answer.token_ids), **own) == 1:
                correct.append(answer.id)
    return correct


def _requests(
    rows: Sequence[dict[str, Any]], siblings: range, tokenizer: Tokenizer, version: int, max_tokens: int
) -> list[Request]:
    """The greedy answer is sibling 0, the others are sampled."""
    return [
        Request(
            RequestId(0, number, sibling),
            GroupId(0, number),
            tuple(tokenizer.encode(row["prompt"])),
            version,
            number * (1 + NUM_SAMPLED) + sibling,
            SamplingParams(float(sibling > 0), max_tokens, tokenizer.stop_ids),
        )
        for number, row in enumerate(rows)
        for sibling in siblings
    ]
