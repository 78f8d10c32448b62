"""`dora audit RUN --deep N`: recompute the log-probs of N samples from the stored versions.

A digest identifies the bytes that an engine held; this check shows that those bytes give the recorded
log-probs. In exact mode the engine's own kernels recompute them bit for bit, otherwise the trainer's decoder
does in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dora.audit.audit import MAX_PRINTED
from dora.config.load import read_run_config
from dora.config.schema import Config
from dora.core.events import DigestReported, Published
from dora.core.types import FIRST_IMAGE_ID
from dora.engine.batch_invariant import LogprobScorer
from dora.engine.kernels.workspace import DTYPES
from dora.engine.request import EngineError
from dora.errors import ModelError
from dora.journal.reader import SampleRow, StoredResponse, read_journal, read_responses, read_samples
from dora.model.config import ModelConfig
from dora.model.images import IMAGES_FOLDER, ImageFolder
from dora.model.pretrained import load_config, load_pretrained
from dora.model.weights import weight_digest
from dora.runtime.run_setup import GREEDY
from dora.stream.sample_db import split_branches
from dora.text import plural
from dora.trainer.checkpoint import VERSIONS_FOLDER
from dora.trainer.checkpoint_folders import complete_checkpoints
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings
from dora.weights.store import WeightStore

VersionDigest = tuple[int, str]  # a version and its digest: a redone step may give the version other weights


@dataclass(frozen=True)
class VersionRecheck:
    """The samples of one version that were recomputed."""

    source: WeightSource
    num_samples: int
    num_recorded: int  # samples of this version and digest in the run
    abs_diffs: Tensor  # [tokens], between stored and recomputed log-probs
    findings: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"version {self.source.version}: {self.num_samples:,} of {plural(self.num_recorded, 'sample')}, "
            f"{_describe(self.abs_diffs)} ({self.source.path})"
        )


@dataclass(frozen=True)
class RecheckResult:
    """The verdict; `unchecked` are sentences about samples that could not be recomputed."""

    rule: str  # the tolerance in words
    versions: tuple[VersionRecheck, ...]
    unchecked: tuple[str, ...]
    other_weights: tuple[str, ...] = ()  # sentences about checkpoints without the published weights

    @property
    def findings(self) -> list[str]:
        """Sentences, each about one checkpoint or sample that disagrees."""
        return [*self.other_weights, *(finding for version in self.versions for finding in version.findings)]


def main(run: Path, num: int) -> int:
    """Print verdict, versions and the first findings; exit code 1 if a sample disagrees."""
    result = check(run, num)
    findings, diffs = result.findings, [version.abs_diffs for version in result.versions]
    verdict = "VIOLATED" if findings else "ok" if diffs else "not checked"
    samples = plural(sum(version.num_samples for version in result.versions), "sample")
    description = _describe(torch.cat([torch.zeros(0), *diffs]))
    print(f"log-probs {verdict}  {samples} recomputed, {description}; {result.rule}")
    for line in (*result.versions, *findings[:MAX_PRINTED]):
        print(f"   {line}")
    if len(findings) > MAX_PRINTED:
        print(f"   and {len(findings) - MAX_PRINTED:,} more")
    for sentence in result.unchecked:
        print(f"   not checked: {sentence}")
    return 1 if findings else 0


def check(run: Path, num: int) -> RecheckResult:
    """Recompute up to `num` samples, spread over the stored versions. Raises InputError."""
    config = read_run_config(run)
    sources = find_weight_sources(run, config)
    recorded: dict[VersionDigest, list[SampleRow]] = {}
    num_segmented = num_filtered = 0
    for row in read_samples(run).values():
        if row.segments:
            num_segmented += 1
        elif _is_filtered(config, row):
            num_filtered += 1
        else:
            recorded.setdefault((row.version, row.weight_digest), []).append(row)
    missing = {key: rows for key, rows in recorded.items() if key[0] not in sources}
    if not sources:
        return RecheckResult("no version is stored", (), tuple(_describe_missing(missing)))
    folder = next(source.path for found in sources.values() for source in found if source.path.is_dir())
    recomputer = LogprobRecomputer(config, load_config(folder), run / IMAGES_FOLDER)
    if why := recomputer.why_impossible:
        return RecheckResult("this run cannot be checked", (), (why,))
    available = {key: rows for key, rows in recorded.items() if key[0] in sources}
    published = read_published(run)
    redone = {version for version, digests in published.items() if len(digests) > 1}
    versions, unchecked = _recheck_versions(run, num, recomputer, available, sources, redone)
    if num_filtered:
        unchecked = [f"{plural(num_filtered, 'response')} of evaluations, after filters", *unchecked]
    segmented = [f"{plural(num_segmented, 'sample')} of several versions"] if num_segmented else []
    unchecked = [*segmented, *_describe_missing(missing), *unchecked]
    other_weights = tuple(_check_checkpoints(published, sources, config.engine.dtype))
    return RecheckResult(str(recomputer), tuple(versions), tuple(unchecked), other_weights)


def _is_greedy(config: Config, row: SampleRow) -> bool:
    return row.group.startswith("-") and config.eval.greedy and row.sibling == GREEDY


def _is_filtered(config: Config, row: SampleRow) -> bool:
    """Whether a server may have reported log-probs after top_k, top_p and min_p, as in evaluations."""
    has_servers = any(kind.backend is not None for kind in config.engine_kinds)
    is_sampled = row.group.startswith("-") and not _is_greedy(config, row)
    return is_sampled and has_servers and config.eval_sampling.has_filters


def _recheck_versions(
    run: Path,
    num: int,
    recomputer: LogprobRecomputer,
    recorded: Mapping[VersionDigest, Sequence[SampleRow]],
    sources: Mapping[int, Sequence[WeightSource]],
    redone: set[int],
) -> tuple[list[VersionRecheck], list[str]]:
    """Recheck one version at a time; also sentences about samples whose weights are not stored.

    Only the `redone` versions may be stored with other weights than sampled.
    """
    checked: list[VersionRecheck] = []
    unchecked: list[str] = []
    # Versions with few samples come first: the others fill up to `num`.
    order = sorted(recorded, key=lambda key: (len(recorded[key]), key))
    for at, (version, digest) in enumerate(order):
        rows = recorded[version, digest]
        picked = spread(rows, -(-num // (len(order) - at)))
        if not picked:
            continue
        found = read_version(sources[version], digest, recomputer.config.engine.dtype)
        if found is None:
            sentence = (
                f"{plural(len(rows), 'sample')} of version {version}: their weights have the digest "
                f"{digest}, the stored ones have another"
            )
            if version in redone:
                unchecked.append(f"{sentence}, as the step was trained again")
            else:
                checked.append(VersionRecheck(sources[version][0], 0, len(rows), torch.zeros(0), (sentence,)))
            continue
        source, flat = found
        diffs, findings = _compare(recomputer, flat, picked, read_responses(run, picked))
        checked.append(VersionRecheck(source, len(picked), len(rows), diffs, tuple(findings)))
        num -= len(picked)
    return sorted(checked, key=lambda version: version.source.version), unchecked


def read_published(run: Path) -> dict[int, set[str]]:
    """Version -> digests; more than one if a resume, or a new trainer, trained the version again."""
    published: dict[int, set[str]] = {}
    for line in read_journal(run).lines:
        if isinstance(line.record, Published | DigestReported):
            published.setdefault(line.record.version, set()).add(line.record.digest)
    return published


def _check_checkpoints(
    published: Mapping[int, set[str]], sources: Mapping[int, Sequence[WeightSource]], dtype: str
) -> Iterator[str]:
    """A sentence about each checkpoint whose weights are not those that were published."""
    for version, digests in published.items():
        for source in sources.get(version, ()):
            flat = source.read(dtype)
            found = "no readable weights" if flat is None else weight_digest(flat)
            if found not in digests:
                yield f"{source.path} has {found}, version {version} was published as {', '.join(digests)}"


def spread(rows: Sequence[SampleRow], num: int) -> list[SampleRow]:
    """Up to `num` rows at equal distances."""
    num = min(num, len(rows))
    return [rows[i * len(rows) // num] for i in range(num)]


def _compare(
    recomputer: LogprobRecomputer,
    flat: Tensor,
    rows: Sequence[SampleRow],
    responses: Sequence[StoredResponse | None],
) -> tuple[Tensor, list[str]]:
    """Absolute differences of all sampled tokens of samples with the weights `flat`, and the findings."""
    by_temperature: dict[float, list[tuple[str, StoredResponse]]] = {}
    diffs, findings = [torch.zeros(0)], []
    for row, response in zip(rows, responses, strict=True):
        name = f"sample {row.group}/{row.sibling} of version {row.version}"
        if defect := recomputer.find_defect(response):
            findings.append(f"{name} {defect}")
        elif response is not None:
            by_temperature.setdefault(recomputer.temperature_of(row), []).append((name, response))
    for temperature, named in by_temperature.items():
        sequences = [sequence for _, response in named for sequence in _split(response)]
        recomputed = iter(recomputer.logprobs(flat, temperature, sequences))
        for name, response in named:
            logprobs = torch.cat([next(recomputed) for _ in range(1 + len(response.branches))])
            sampled = torch.tensor([*response.loss_mask]).nonzero()[:, 0]
            diff = (logprobs - torch.tensor(response.logprobs)).abs()[sampled]
            diffs.append(diff)
            largest, mean = recomputer.tolerance(temperature)
            if not (diff.max() <= largest and diff.mean() <= mean):  # true also for NaN
                at = int(sampled[diff.argmax()])
                findings.append(
                    f"{name}: the log-prob of its token {at} is stored as {response.logprobs[at]:.9g}, "
                    f"and recomputed as {logprobs[at]:.9g}; the mean difference is {diff.mean():.2g}"
                )
    return torch.cat(diffs), findings


def _split(response: StoredResponse) -> list[StoredResponse]:
    """A response for each sequence of one with branches."""
    if not response.branches:
        return [response]
    tree = split_branches(response.prompt_ids, response.token_ids, response.branches)
    return [
        response._replace(prompt_ids=context, token_ids=response.token_ids[start:stop], branches=())
        for context, start, stop in tree
    ]


def _describe(diffs: Tensor) -> str:
    if not len(diffs):
        return "no token"
    return f"{plural(len(diffs), 'token')}, difference at most {diffs.max():.2g}, mean {diffs.mean():.2g}"


def _describe_missing(recorded: Mapping[VersionDigest, Sequence[SampleRow]]) -> Iterator[str]:
    """A sentence about samples of versions that are not stored."""
    if not recorded:
        return
    num, versions = sum(map(len, recorded.values())), sorted({version for version, _ in recorded})
    first, last = versions[0], versions[-1]
    which = f"{len(versions)} versions from {first} to {last}" if last > first else f"version {first}"
    yield (
        f"{plural(num, 'sample')} of {which}, whose weights are no longer stored; "
        "a higher trainer.keep_last and a lower trainer.save_freq keep more"
    )


# --- stored weights


@dataclass(frozen=True)
class WeightSource:
    """A model folder, or a file of a weight store, that may hold a version: a resume may have replaced it."""

    version: int
    path: Path

    def read(self, dtype: str) -> Tensor | None:
        """The weights [numel] in the engines' dtype; None if they cannot be read."""
        try:
            if self.path.is_dir():
                return load_pretrained(self.path)[1].to(DTYPES[dtype])
            return WeightStore(self.path.parent, dtype).fetch(self.version)
        except (ModelError, OSError):
            return None


def find_weight_sources(run: Path, config: Config) -> dict[int, list[WeightSource]]:
    """Where each version may be stored.

    Version 0 is what the run started with, version N the checkpoint of N steps. A checkpoint also keeps the
    older versions that unfinished requests needed.
    """
    start = Path(config.start[1])
    found: dict[int, list[WeightSource]] = {}
    for step, folder in complete_checkpoints(run / "checkpoints").items():
        found.setdefault(step, []).append(WeightSource(step, folder))
        older = WeightStore(folder / VERSIONS_FOLDER, config.engine.dtype)
        for version in older.versions():
            found.setdefault(version, []).append(WeightSource(version, older.path(version)))
    if start.is_dir():
        found.setdefault(0, []).append(WeightSource(0, start))
    return found


def read_version(
    sources: Sequence[WeightSource], digest: str, dtype: str
) -> tuple[WeightSource, Tensor] | None:
    """The first source whose weights [numel] have this digest, and the weights."""
    for source in sources:
        flat = source.read(dtype)
        if flat is not None and weight_digest(flat) == digest:
            return source, flat
    return None


# --- recomputing log-probs


# The largest and the mean absolute difference of log-probs in one sample that rounding explains.
Tolerance = tuple[float, float]
EXACT: Tolerance = (0.0, 0.0)
# At temperature 1; a lower temperature scales differences up. Measured on random models of up to 28 layers:
# at most 4e-5, mean 6e-6 in fp32, and 0.6, mean 0.08 in bf16, where engines round activations as well.
ROUNDED: dict[str, Tolerance] = {"float32": (5e-4, 1e-4), "bfloat16": (2.0, 0.3)}


class LogprobRecomputer:
    """Recomputes log-probs as the engines of a run computed them; its `str` is the tolerance in words."""

    def __init__(self, config: Config, model: ModelConfig, images: Path) -> None:
        """`images` is the run's `ImageFolder`."""
        self.config, self._model, self._images = config, model, images
        self._scorers: dict[float, LogprobScorer] = {}
        self._is_exact, self._why_inexact = config.engine.exact_logprobs, ""
        if self._is_exact:
            torch.set_num_threads(1)  # as in the engines
            try:
                self._scorer(config.sampling.temperature)
            except EngineError as error:
                self._is_exact, self._why_inexact = False, f"; exact mode is not available here: {error}"

    def __str__(self) -> str:
        if self._is_exact:
            return "all bits must be equal, which needs the run's kind of machine and version of torch"
        temperature = self.config.sampling.temperature
        largest, mean = self.tolerance(temperature)
        explained = f"rounding in {self.config.engine.dtype} explains up to {largest:.2g}, mean {mean:.2g}"
        if self.config.eval_sampling.temperature != temperature:
            explained += f" at temperature {temperature:g}, and more at a lower one"
        return f"{explained}{self._why_inexact}"

    @property
    def why_impossible(self) -> str:
        """Why the samples of this run cannot be recomputed; empty if they can."""
        if self._model.num_experts and not (self._is_exact or self.config.trainer.routing_replay):
            return (
                "a router may choose otherwise where two experts are nearly equal, and routes are recorded "
                "only with trainer.routing_replay = true"
            )
        return ""

    def tolerance(self, temperature: float) -> Tolerance:
        """How far the log-probs of a sample may be from the recomputed ones."""
        if self._is_exact:
            return EXACT
        largest, mean = ROUNDED[self.config.engine.dtype]
        return largest / min(1.0, temperature), mean / min(1.0, temperature)

    def temperature_of(self, row: SampleRow) -> float:
        """The temperature of a sample's log-probs: 1 for greedy responses to held-out prompts."""
        if not row.group.startswith("-"):
            return self.config.sampling.temperature
        return 1.0 if _is_greedy(self.config, row) else self.config.eval_sampling.temperature

    def find_defect(self, response: StoredResponse | None) -> str:
        """Why a sample's log-probs cannot be recomputed, as a sentence's predicate; empty if they can."""
        if response is None or len(response.token_ids) != len(response.logprobs):
            return "is truncated"
        ids, vocab = (*response.prompt_ids, *response.token_ids), self._model.vocab_size
        images = {id for id in response.prompt_ids if id >= FIRST_IMAGE_ID}
        if missing := [f"{id:08x}" for id in images if id not in ImageFolder(self._images)]:
            return f"has the image {missing[0]}, which the run does not have"
        if not (response.prompt_ids and response.token_ids) or len(ids) > self.config.max_sequence_length:
            return f"has {len(response.prompt_ids)} + {len(response.token_ids)} tokens"
        if not all(0 <= id < vocab for id in {*ids} - images):
            return f"has a token outside the vocabulary of {vocab}"
        if len(response.loss_mask) != len(response.token_ids) or not {1} <= {*response.loss_mask} <= {0, 1}:
            return "has no valid loss mask"
        if self.config.trainer.routing_replay:
            num_chosen = len(self._model.moe_layers) * self._model.num_experts_per_tok
            chosen, experts = np.asarray(response.routes), range(self._model.num_experts)
            if len(chosen) != (len(ids) - 1) * num_chosen or not np.isin(chosen, experts).all():
                return "has routes to experts that do not exist"
        return ""

    def logprobs(self, flat: Tensor, temperature: float, responses: Sequence[StoredResponse]) -> list[Tensor]:
        """The log-probs [tokens] of each response under the weights `flat` [numel] in the engines' dtype."""
        settings = TrainerSettings(0.0, 1, temperature=temperature, images=self._images)
        scorer = self._scorer(temperature) if self._is_exact else None
        compute = GroupLogprobs(self._model, settings, "cpu", scorer)
        compute.load_weights(flat)
        return compute([self._to_sample(response) for response in responses])

    def _to_sample(self, response: StoredResponse) -> Sample:
        prompt_ids, token_ids, routes = response.prompt_ids, response.token_ids, None
        if self._model.moe_layers and not self._is_exact:
            num_routed = len(prompt_ids) + len(token_ids) - 1
            routes = np.array(response.routes, np.int16).reshape(num_routed, -1)
        return Sample(prompt_ids, token_ids, response.logprobs, 0.0, routes=routes)

    def _scorer(self, temperature: float) -> LogprobScorer:
        if temperature not in self._scorers:
            engine, context = self.config.engine, self.config.max_sequence_length
            made = LogprobScorer(self._model, context, temperature, engine.kernels, engine.dtype)
            self._scorers[temperature] = made
        return self._scorers[temperature]
