"""`dora audit --deep`: recorded log-probs agree with the stored weights, or the difference is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.running import query
from tests.runtime.tiny import MODEL, save_start, write_task
from torch import Tensor

from dora.audit import logprob_recheck
from dora.config import load
from dora.config.schema import Config
from dora.config.toml import to_toml
from dora.core.events import DigestReported, Published
from dora.core.types import GroupId, Limits, RequestId
from dora.engine.engine import Engine
from dora.engine.kernels.workspace import DTYPES
from dora.engine.request import Request, SamplingParams
from dora.journal.writer import JournalWriter
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights, parameter_shapes, weight_digest
from dora.stream.sample_db import SampleStore, Trajectory
from dora.trainer.checkpoint import save_checkpoint
from dora.trainer.checkpoint_folders import write_manifest
from dora.weights.store import WeightStore

NUM_GROUPS, GROUP_SIZE = 3, 2  # of each version
SECOND = "where group_id = '1/0' and sibling = 1"
MIXTURE = replace(
    MODEL, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
)
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make the files of a run: samples of versions 0 to 3, and the weights of all but the last."""

    def make(*changes: str, model: ModelConfig = MODEL) -> Path:
        run, start = tmp_path / "run", save_start(tmp_path / "start")
        flats = [initial_weights(model, seed, std=0.2) for seed in range(4)]
        save_pretrained(start, model, flats[0])
        config = load.read_config(write_task(tmp_path / "task"), [f"model.path={start}", *changes])
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.toml").write_text(to_toml(config))
        save_checkpoint_2(run, model, flats, start, config.engine.dtype)
        samples = SampleStore(run / "samples.sqlite")
        for trajectory in generate(config, model, flats):
            samples.put(trajectory)
        samples.close()
        journal = JournalWriter(run / "journal.jsonl", Limits(1, 1, 1, 0), "", None)
        for version, flat in enumerate(flats):
            digest = weight_digest(flat.to(DTYPES[config.engine.dtype]))
            journal.record(0.0, Published(version, digest), ())
        journal.close()
        return run

    return make


def save_checkpoint_2(run: Path, model: ModelConfig, flats: list[Tensor], start: Path, dtype: str) -> None:
    """A checkpoint that also keeps version 1."""
    pinned = WeightStore(run, dtype, parameter_shapes(model))
    pinned.publish(1, flats[1])
    older = {f"versions/{pinned.file_name(1)}": pinned.path(1)}
    save_checkpoint(run / "checkpoints" / "step-2", model, flats[2], {}, 2, start, extra_files=older)
    pinned.drop(1)


def generate(config: Config, model: ModelConfig, flats: list[Tensor]) -> Iterator[Trajectory]:
    """The last group of each version is a held-out prompt; its first response is greedy."""
    engine = Engine(
        model,
        max_rows=8,
        max_context=config.max_sequence_length,
        version_slots=len(flats),
        kernels="eager",
        returns_routes=config.trainer.routing_replay,
        exact=config.engine.exact_logprobs,
        dtype=config.engine.dtype,
    )
    for version, flat in enumerate(flats):
        engine.load(version, flat.to(DTYPES[config.engine.dtype]))
        for row in range(NUM_GROUPS):
            group = GroupId(-1 - version, row) if row == NUM_GROUPS - 1 else GroupId(version, row)
            engine.submit([request_of(config, group, k, version) for k in range(GROUP_SIZE)])
    while not engine.is_idle:
        for done in engine.step():
            prompt = prompt_of(done.id.group)
            digest, logprobs = done.chunks[0].digest, done.unfiltered_logprobs
            yield Trajectory(done.id, done.version, digest, prompt, done.token_ids, logprobs, done.routes)


def prompt_of(group: GroupId) -> tuple[int, ...]:
    return (1, 2, 3 + group.row)


def request_of(config: Config, group: GroupId, sibling: int, version: int) -> Request:
    is_greedy = group.is_held_out and sibling == 0
    given = config.eval_sampling if group.is_held_out else config.sampling
    sampling = SamplingParams(0.0 if is_greedy else given.temperature, 8 + sibling, top_k=given.top_k)
    return Request(RequestId(*group, sibling), group, prompt_of(group), version, sibling, sampling)


def change(run: Path, column: str, dtype: str, edit: Callable[[np.ndarray], object]) -> str:
    """Edit a column of the second sample of version 1; its name."""
    ((blob,),) = query(run, f"select {column} from samples {SECOND}")
    values = np.frombuffer(blob, dtype).copy()
    edit(values)
    query(run, f"update samples set {column} = ? {SECOND}", values.tobytes())
    return "sample 1/0/1 of version 1"


def next_float(logprobs: np.ndarray) -> None:
    logprobs[4] = np.nextafter(logprobs[4], np.float32(0))


def shift_a_little(logprobs: np.ndarray) -> None:
    logprobs[4] -= 0.001


def shift_much(logprobs: np.ndarray) -> None:
    logprobs[4] -= 2.5


def shift_all(logprobs: np.ndarray) -> None:
    logprobs -= 0.5
    logprobs[4] -= 0.5


SETTINGS = {
    "fp32": (),
    "filtered": ("sampling.temperature=0.5", "sampling.top_k=5"),
    "evaluations": ("eval.path=gcd", "eval.num_prompts=1", "eval.temperature=0.5", "eval.top_k=5"),
    "bf16": ("engine.dtype=bfloat16",),
    "exact": ("engine.exact_logprobs=true", "sampling.temperature=0.5"),
    "exact bf16": ("engine.exact_logprobs=true", "engine.dtype=bfloat16"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_responses_of_every_stored_version_agree(
    make_run: MakeRun, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(*SETTINGS[name])
    assert logprob_recheck.main(run, 100) == 0
    out = capsys.readouterr().out
    assert "log-probs ok  18 samples recomputed, 153 tokens" in out
    assert [f"version {version}: 6 of 6 samples" in out for version in (0, 1, 2)] == [True] * 3
    assert "6 samples of version 3, whose weights are no longer stored" in out
    assert ("all bits must be equal" in out) == name.startswith("exact")
    result = logprob_recheck.check(run, 100)
    largest = max(float(version.abs_diffs.max()) for version in result.versions)
    assert largest == 0 if name.startswith("exact") else 0 < largest < (1e-5 if name != "bf16" else 0.1)


def test_log_probs_of_a_server_after_the_filters_of_evaluations_are_not_compared(make_run: MakeRun) -> None:
    run = make_run(*SETTINGS["evaluations"])
    lines = (run / "config.toml").read_text().splitlines()
    lines = [line for line in lines if not line.startswith(("kernels", "min_step_time"))]
    lines.insert(lines.index("[engine]") + 1, 'backend = "vllm"')
    (run / "config.toml").write_text("\n".join(lines))
    result = logprob_recheck.check(run, 100)
    assert "4 responses of evaluations, after filters" in result.unchecked
    assert [version.num_samples for version in result.versions] == [5, 5, 5]
    assert result.findings == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_routes_are_replayed(make_run: MakeRun, dtype: str) -> None:
    run = make_run("trainer.routing_replay=true", f"engine.dtype={dtype}", model=MIXTURE)
    result = logprob_recheck.check(run, 100)
    assert [version.num_samples for version in result.versions] == [6, 6, 6]
    assert result.findings == []
    name = change(run, "routes", "<i2", lambda routes: routes.fill(4))
    assert logprob_recheck.check(run, 100).findings == [f"{name} has routes to experts that do not exist"]


def test_a_mixture_without_recorded_routes_is_not_checked(make_run: MakeRun) -> None:
    result = logprob_recheck.check(make_run(model=MIXTURE), 100)
    assert (result.versions, result.findings) == ((), [])
    assert "only with trainer.routing_replay = true" in result.unchecked[0]


def test_samples_are_spread_over_versions_and_groups(make_run: MakeRun) -> None:
    run = make_run()
    result = logprob_recheck.check(run, 7)
    assert sorted(version.num_samples for version in result.versions) == [2, 2, 3]
    assert [version.num_samples for version in logprob_recheck.check(run, 2).versions] == [1, 1]


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("fp32", shift_a_little),
        ("bf16", shift_much),
        ("bf16", shift_all),
        ("exact", next_float),
        ("exact bf16", next_float),
    ],
)
def test_a_changed_log_prob_is_found(
    make_run: MakeRun, name: str, edit: Callable[[np.ndarray], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(*SETTINGS[name])
    sample = change(run, "logprobs", "<f4", edit)
    assert logprob_recheck.main(run, 100) == 1
    out = capsys.readouterr().out
    assert "log-probs VIOLATED  18 samples" in out
    assert f"{sample}: the log-prob of its token 4 is stored as -" in out


def test_tokens_of_the_environment_are_not_compared(make_run: MakeRun) -> None:
    run = make_run()
    sample = change(run, "logprobs", "<f4", lambda logprobs: logprobs[3:6].fill(0))

    def findings_with(mask: list[int]) -> list[str]:
        query(run, f"update samples set loss_mask = ? {SECOND}", bytes(mask))
        return logprob_recheck.check(run, 100).findings

    assert findings_with([1] * 3 + [0] * 3 + [1] * 3) == []
    (finding,) = findings_with([1] * 3 + [0] * 2 + [1] * 4)
    assert finding.startswith(f"{sample}: the log-prob of its token 5 is stored as 0, and recomputed as -")
    for wrong in ([1] * 8, [0] * 9, [2] * 9):
        assert findings_with(wrong) == [f"{sample} has no valid loss mask"]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_log_prob_that_is_not_finite_is_found(make_run: MakeRun, value: float) -> None:
    run = make_run()
    name = change(run, "logprobs", "<f4", lambda logprobs: logprobs.__setitem__(4, value))
    (finding,) = logprob_recheck.check(run, 100).findings
    assert finding.startswith(f"{name}: the log-prob of its token 4 is stored as {value}")


@pytest.mark.parametrize(
    ("column", "edit", "words"),
    [
        ("token_ids", lambda ids: ids.__setitem__(4, (ids[4] + 1) % 20), "the log-prob of its token"),
        ("token_ids", lambda ids: ids.__setitem__(4, 10**6), "has a token outside the vocabulary"),
        ("prompt_ids", lambda ids: ids.__setitem__(0, 7), "the log-prob of its token"),
        ("logprobs", lambda logprobs: logprobs.resize(3, refcheck=False), "is truncated"),
        ("prompt_ids", lambda ids: ids.resize(0, refcheck=False), "has 0 + 9 tokens"),
        ("prompt_ids", lambda ids: ids.resize(99, refcheck=False), "has 99 + 9 tokens"),
    ],
)
def test_edited_tokens_are_found(
    make_run: MakeRun, column: str, edit: Callable[[np.ndarray], object], words: str
) -> None:
    run = make_run()
    name = change(run, column, "<f4" if column == "logprobs" else "<i4", edit)
    (finding,) = logprob_recheck.check(run, 100).findings
    assert finding.startswith(name)
    assert words in finding


def replace_version_2(run: Path) -> str:
    """Put other weights into its checkpoint, with a manifest that fits; their digest."""
    flat = initial_weights(MODEL, seed=9)
    save_pretrained(run / "checkpoints" / "step-2", MODEL, flat)
    write_manifest(run / "checkpoints" / "step-2")
    return weight_digest(flat)


def test_stored_weights_with_another_digest_are_found(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    replace_version_2(run)
    assert logprob_recheck.main(run, 100) == 1
    out = capsys.readouterr().out
    assert "log-probs VIOLATED  12 samples" in out
    assert "6 samples of version 2: their weights have the digest" in out


def test_a_version_that_was_trained_again_is_not_checked(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    digest = replace_version_2(run)
    journal = JournalWriter(run / "journal.jsonl", Limits(1, 1, 1, 0), "", None, seq=4)
    journal.record(0.0, DigestReported(2, digest), ())
    journal.close()
    assert logprob_recheck.main(run, 100) == 0
    out = capsys.readouterr().out
    assert "not checked: 6 samples of version 2: their weights have the digest" in out
    assert "log-probs ok  12 samples" in out


def test_without_stored_versions_the_output_names_the_keys_that_keep_more(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "start").rename(tmp_path / "away")
    assert logprob_recheck.main(run, 100) == 0
    out = capsys.readouterr().out
    assert "log-probs not checked  0 samples recomputed, no token; no version is stored" in out
    assert "24 samples of 4 versions from 0 to 3, whose weights are no longer stored" in out
    assert "trainer.keep_last" in out
