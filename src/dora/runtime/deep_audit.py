"""`dora audit RUN --deep N`: log-probs of N samples, computed again from the stored versions.

A digest says which bytes an engine held. That these bytes give the log-probs that were recorded is
another thing, and found out here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dora.config import Config
from dora.core.wording import counted
from dora.errors import InputError
from dora.model.folder import load_config
from dora.observe.audit import MAX_PRINTED
from dora.observe.samples import Answer, SampleRow, read_answers, read_samples
from dora.runtime.recomputation import Recomputation
from dora.runtime.stored import Place, places, read_version

Bytes = tuple[int, str]  # a version and the digest of its bytes: a step that is redone may give others


@dataclass(frozen=True)
class Compared:
    """Some samples of one version; `gaps` [tokens] are between stored and computed log-probs."""

    place: Place
    num_samples: int
    num_recorded: int  # samples of these bytes, in all
    gaps: Tensor
    findings: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"version {self.place.version}: {self.num_samples:,} of {counted(self.num_recorded, 'sample')}, "
            f"{_describe(self.gaps)} ({self.place.path})"
        )


@dataclass(frozen=True)
class DeepAudit:
    """The verdict; `unchecked` are sentences about what nothing can be said of."""

    rule: str  # that samples are judged by
    compared: tuple[Compared, ...]  # by version
    unchecked: tuple[str, ...]

    @property
    def findings(self) -> list[str]:
        """Sentences, each about one sample that disagrees."""
        return [finding for compared in self.compared for finding in compared.findings]


def check(run: Path, num: int) -> DeepAudit:
    """Compare up to `num` samples, spread over the versions that are stored. Raises InputError."""
    config = _config(run)
    stored = places(run, config)
    recorded: dict[Bytes, list[SampleRow]] = {}
    mixed = 0
    for row in read_samples(run).values():
        if row.segments:
            mixed += 1
        else:
            recorded.setdefault((row.version, row.weight_digest), []).append(row)
    gone = {key: rows for key, rows in recorded.items() if key[0] not in stored}
    if not stored:
        return DeepAudit("no version is stored", (), tuple(_gone(gone)))
    folder = next(place.path for found in stored.values() for place in found if place.path.is_dir())
    recomputation = Recomputation(config, load_config(folder))
    if why := recomputation.why_impossible:
        return DeepAudit("this run cannot be checked so", (), (why,))
    there = {key: rows for key, rows in recorded.items() if key[0] in stored}
    compared, other = _compare_versions(run, num, recomputation, there, stored)
    unchecked = [f"{counted(mixed, 'sample')} that several versions have drawn"] if mixed else []
    return DeepAudit(str(recomputation), tuple(compared), (*unchecked, *_gone(gone), *other))


def main(run: Path, num: int) -> int:
    """Print verdict, versions and the first findings; exit code 1 if a sample disagrees."""
    audit = check(run, num)
    findings, gaps = audit.findings, [compared.gaps for compared in audit.compared]
    verdict = "VIOLATED" if findings else "ok" if gaps else "not checked"
    samples = counted(sum(compared.num_samples for compared in audit.compared), "sample")
    described = _describe(torch.cat([torch.zeros(0), *gaps]))
    print(f"log-probs {verdict}  {samples} computed again, {described}; {audit.rule}")
    for line in (*audit.compared, *findings[:MAX_PRINTED]):
        print(f"   {line}")
    if len(findings) > MAX_PRINTED:
        print(f"   and {len(findings) - MAX_PRINTED:,} more")
    for sentence in audit.unchecked:
        print(f"   not checked: {sentence}")
    return 1 if findings else 0


def _describe(gaps: Tensor) -> str:
    if not len(gaps):
        return "no token"
    return f"{counted(len(gaps), 'token')}, gap at most {gaps.max():.2g}, mean {gaps.mean():.2g}"


def _config(run: Path) -> Config:
    """Paths that it names need not exist any more. Raises InputError."""
    path = run / "config.toml"
    try:
        return Config.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; put back what the run began with") from error


def _compare_versions(
    run: Path,
    num: int,
    recomputation: Recomputation,
    recorded: Mapping[Bytes, Sequence[SampleRow]],
    stored: Mapping[int, Sequence[Place]],
) -> tuple[list[Compared], list[str]]:
    """What was compared, and of which samples the bytes are not stored. One version is read at a time."""
    compared: list[Compared] = []
    other: list[str] = []
    # Those with few samples first: others make up for what they lack.
    order = sorted(recorded, key=lambda key: (len(recorded[key]), key))
    for at, (version, digest) in enumerate(order):
        rows = recorded[version, digest]
        picked = _spread(rows, -(-num // (len(order) - at)))
        if not picked:
            continue
        found = read_version(stored[version], digest, recomputation.config.engine.dtype)
        if found is None:
            other.append(
                f"{counted(len(rows), 'sample')} of version {version}: their weights have the digest "
                f"{digest}, what is stored has not; the step was redone by a resume, or files were changed"
            )
            continue
        place, flat = found
        gaps, findings = _compare(recomputation, flat, picked, read_answers(run, picked))
        compared.append(Compared(place, len(picked), len(rows), gaps, tuple(findings)))
        num -= len(picked)
    return sorted(compared, key=lambda c: c.place.version), other


def _spread(rows: Sequence[SampleRow], num: int) -> list[SampleRow]:
    """Up to `num` of them, at equal distances."""
    num = min(num, len(rows))
    return [rows[i * len(rows) // num] for i in range(num)]


def _compare(
    recomputation: Recomputation, flat: Tensor, rows: Sequence[SampleRow], answers: Sequence[Answer | None]
) -> tuple[Tensor, list[str]]:
    """Gaps of all tokens of some samples with the same weights, and what is wrong with the samples."""
    by_temperature: dict[float, list[tuple[str, Answer]]] = {}
    gaps, findings = [torch.zeros(0)], []
    for row, answer in zip(rows, answers, strict=True):
        name = f"sample {row.group}/{row.sibling} of version {row.version}"
        if misfit := recomputation.misfit(answer):
            findings.append(f"{name} {misfit}")
        elif answer is not None:
            by_temperature.setdefault(recomputation.temperature_of(row), []).append((name, answer))
    for temperature, named in by_temperature.items():
        found = recomputation.logprobs(flat, temperature, [answer for _, answer in named])
        for (name, answer), computed in zip(named, found, strict=True):
            drawn = torch.tensor([*answer.loss_mask]).nonzero()[:, 0]
            gap = (computed - torch.tensor(answer.logprobs)).abs()[drawn]
            gaps.append(gap)
            largest, mean = recomputation.allowed(temperature)
            if not (gap.max() <= largest and gap.mean() <= mean):  # also where a gap is no number
                at = int(drawn[gap.argmax()])
                findings.append(
                    f"{name}: the log-prob of its token {at} is stored as {answer.logprobs[at]:.9g}, "
                    f"and computed as {computed[at]:.9g}; the mean gap is {gap.mean():.2g}"
                )
    return torch.cat(gaps), findings


def _gone(recorded: Mapping[Bytes, Sequence[SampleRow]]) -> Iterator[str]:
    """A sentence about samples of versions that nothing is stored of."""
    if not recorded:
        return
    num, versions = sum(map(len, recorded.values())), sorted({version for version, _ in recorded})
    first, last = versions[0], versions[-1]
    which = f"{len(versions)} versions from {first} to {last}" if last > first else f"version {first}"
    yield (
        f"{counted(num, 'sample')} of {which}, whose weights are no longer stored; a run keeps more with a "
        "higher trainer.keep_last and a lower trainer.save_freq"
    )
