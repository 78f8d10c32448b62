"""`dora audit --deep`: recorded log-probs are those that the stored weights give, or it is said."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.runtime.tiny import MODEL, save_start
from torch import Tensor

from dora import settings
from dora.config import Config
from dora.core.records import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import Request, Sampling
from dora.engine.workspace import DTYPES
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import initial_weights
from dora.runtime import deep_audit
from dora.stream.samples import SampleStore, Trajectory
from dora.trainer.checkpoint import save_checkpoint
from dora.weights.store import WeightStore

NUM_GROUPS, GROUP_SIZE = 3, 2  # of each version
MIXTURE = replace(
    MODEL, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
)
Record = Callable[..., Path]


@pytest.fixture
def record(task: Path, tmp_path: Path) -> Record:
    """Makes what a run leaves behind: samples of versions 0 to 3, and the weights of all but the last."""

    def make(*changes: str, model: ModelConfig = MODEL) -> Path:
        run, start = tmp_path / "run", save_start(tmp_path / "start")
        flats = [initial_weights(model, seed, std=0.2) for seed in range(4)]
        save_folder(start, model, flats[0])
        config = settings.read(task, [f"model.path={start}", *changes])
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.toml").write_text(config.to_toml())
        save_version_2(run, model, flats, start, config.engine.dtype)
        samples = SampleStore(run / "samples.sqlite")
        for trajectory in answered(config, model, flats):
            samples.put(trajectory)
        samples.close()
        return run

    return make


def save_version_2(run: Path, model: ModelConfig, flats: list[Tensor], start: Path, dtype: str) -> None:
    """Version 1 was still needed then."""
    pinned = WeightStore(run, dtype)
    pinned.publish(1, flats[1])
    older = {f"versions/{pinned.name_of(1)}": run / pinned.name_of(1)}
    save_checkpoint(run / "checkpoints" / "step-2", model, flats[2], {}, 2, start, beside=older)
    pinned.drop(1)


def answered(config: Config, model: ModelConfig, flats: list[Tensor]) -> Iterator[Trajectory]:
    """The last group of each version is a held-out prompt, whose first answer is greedy."""
    engine = Engine(
        model,
        max_rows=8,
        max_context=config.context,
        version_slots=len(flats),
        kernels="eager",
        returns_routes=config.trainer.routing_replay,
        exact=config.engine.exact,
        dtype=config.engine.dtype,
    )
    for version, flat in enumerate(flats):
        engine.load(version, flat.to(DTYPES[config.engine.dtype]))
        for row in range(NUM_GROUPS):
            group = GroupId(-1 - version, row) if row == NUM_GROUPS - 1 else GroupId(version, row)
            engine.submit([request_of(config, group, k, version) for k in range(GROUP_SIZE)])
    while not engine.idle:
        for done in engine.step():
            prompt = prompt_of(done.id.group)
            digest, logprobs = done.chunks[0].digest, done.unfiltered_logprobs
            yield Trajectory(done.id, done.version, digest, prompt, done.token_ids, logprobs, done.routes)


def prompt_of(group: GroupId) -> tuple[int, ...]:
    return (1, 2, 3 + group.row)


def request_of(config: Config, group: GroupId, sibling: int, version: int) -> Request:
    is_greedy = group.is_held_out and sibling == 0
    temperature, top_k = config.sampling.temperature, config.sampling.top_k
    sampling = Sampling(0.0 if is_greedy else temperature, 8 + sibling, top_k=top_k)
    return Request(RequestId(*group, sibling), group, prompt_of(group), version, sibling, sampling)


def change(run: Path, column: str, dtype: str, edit: Callable[[np.ndarray], object]) -> str:
    """Edit a column of the second sample of version 1; its name."""
    with sqlite3.connect(run / "samples.sqlite") as db:
        (blob,) = db.execute(
            f"select {column} from samples where group_id = '1/0' and sibling = 1"
        ).fetchone()
        values = np.frombuffer(blob, dtype).copy()
        edit(values)
        where = "where group_id = '1/0' and sibling = 1"
        db.execute(f"update samples set {column} = ? {where}", (values.tobytes(),))
    return "sample 1/0/1 of version 1"


def next_float(logprobs: np.ndarray) -> None:
    logprobs[4] = np.nextafter(logprobs[4], np.float32(0))


def add_a_little(logprobs: np.ndarray) -> None:
    logprobs[4] -= 0.001


def add_much(logprobs: np.ndarray) -> None:
    logprobs[4] -= 2.5


def add_something_everywhere(logprobs: np.ndarray) -> None:
    logprobs -= 0.5
    logprobs[4] -= 0.5


SETTINGS = {
    "fp32": (),
    "filtered": ("sampling.temperature=0.5", "sampling.top_k=5"),
    "bf16": ("engine.dtype=bfloat16",),
    "exact": ("engine.exact=true", "sampling.temperature=0.5"),
    "exact bf16": ("engine.exact=true", "engine.dtype=bfloat16"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_of_every_version_that_is_stored_agree(
    record: Record, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(*SETTINGS[name])
    assert deep_audit.main(run, 100) == 0
    out = capsys.readouterr().out
    assert "log-probs ok  18 samples computed again, 153 tokens" in out
    assert [f"version {version}: 6 of 6 samples" in out for version in (0, 1, 2)] == [True] * 3
    assert "6 samples of version 3, whose weights are no longer stored" in out
    assert ("all bits must be equal" in out) == name.startswith("exact")
    audit = deep_audit.check(run, 100)
    largest = max(float(compared.gaps.max()) for compared in audit.compared)
    assert largest == 0 if name.startswith("exact") else 0 < largest < (1e-5 if name != "bf16" else 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_a_mixture_go_to_the_experts_they_went_to(record: Record, dtype: str) -> None:
    run = record("trainer.routing_replay=true", f"engine.dtype={dtype}", model=MIXTURE)
    audit = deep_audit.check(run, 100)
    assert [compared.num_samples for compared in audit.compared] == [6, 6, 6]
    assert audit.findings == []
    name = change(run, "routes", "<i2", lambda routes: routes.fill(4))
    assert deep_audit.check(run, 100).findings == [f"{name} was sent to experts that are not there"]


def test_of_a_mixture_without_recorded_routes_nothing_is_said(record: Record) -> None:
    audit = deep_audit.check(record(model=MIXTURE), 100)
    assert (audit.compared, audit.findings) == ((), [])
    assert "only with trainer.routing_replay = true" in audit.unchecked[0]


def test_samples_are_spread_over_versions_and_groups(record: Record) -> None:
    run = record()
    audit = deep_audit.check(run, 7)
    assert sorted(compared.num_samples for compared in audit.compared) == [2, 2, 3]
    assert [compared.num_samples for compared in deep_audit.check(run, 2).compared] == [1, 1]


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("fp32", add_a_little),
        ("bf16", add_much),
        ("bf16", add_something_everywhere),
        ("exact", next_float),
        ("exact bf16", next_float),
    ],
)
def test_a_changed_log_prob_is_found(
    record: Record, name: str, edit: Callable[[np.ndarray], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(*SETTINGS[name])
    sample = change(run, "logprobs", "<f4", edit)
    assert deep_audit.main(run, 100) == 1
    out = capsys.readouterr().out
    assert "log-probs VIOLATED  18 samples" in out
    assert f"{sample}: the log-prob of its token 4 is stored as -" in out


def test_of_what_was_read_between_turns_no_log_prob_is_asked(record: Record) -> None:
    run = record()
    sample = change(run, "logprobs", "<f4", lambda logprobs: logprobs[3:6].fill(0))
    where = "where group_id = '1/0' and sibling = 1"

    def say(mask: list[int]) -> list[str]:
        with sqlite3.connect(run / "samples.sqlite") as db:
            db.execute(f"update samples set loss_mask = ? {where}", (bytes(mask),))
        return deep_audit.check(run, 100).findings

    assert say([1] * 3 + [0] * 3 + [1] * 3) == []
    (finding,) = say([1] * 3 + [0] * 2 + [1] * 4)
    assert finding.startswith(f"{sample}: the log-prob of its token 5 is stored as 0, and computed as -")
    for wrong in ([1] * 8, [0] * 9, [2] * 9):
        assert say(wrong) == [f"{sample} does not say which of its tokens were drawn"]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_log_prob_that_is_no_number_is_found(record: Record, value: float) -> None:
    run = record()
    name = change(run, "logprobs", "<f4", lambda logprobs: logprobs.__setitem__(4, value))
    (finding,) = deep_audit.check(run, 100).findings
    assert finding.startswith(f"{name}: the log-prob of its token 4 is stored as {value}")


@pytest.mark.parametrize(
    ("column", "edit", "words"),
    [
        ("token_ids", lambda ids: ids.__setitem__(4, (ids[4] + 1) % 20), "the log-prob of its token"),
        ("token_ids", lambda ids: ids.__setitem__(4, 10**6), "names a token that is not in the vocabulary"),
        ("prompt_ids", lambda ids: ids.__setitem__(0, 7), "the log-prob of its token"),
        ("logprobs", lambda logprobs: logprobs.resize(3, refcheck=False), "was cut"),
        ("prompt_ids", lambda ids: ids.resize(0, refcheck=False), "has 0 + 9 tokens"),
        ("prompt_ids", lambda ids: ids.resize(99, refcheck=False), "has 99 + 9 tokens"),
    ],
)
def test_other_tokens_are_found(
    record: Record, column: str, edit: Callable[[np.ndarray], object], words: str
) -> None:
    run = record()
    name = change(run, column, "<f4" if column == "logprobs" else "<i4", edit)
    (finding,) = deep_audit.check(run, 100).findings
    assert finding.startswith(name)
    assert words in finding


def test_a_version_with_other_bytes_is_left_out_and_named(
    record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record()
    save_folder(run / "checkpoints" / "step-2", MODEL, initial_weights(MODEL, seed=9))
    assert deep_audit.main(run, 100) == 0
    out = capsys.readouterr().out
    assert "not checked: 6 samples of version 2: their weights have the digest" in out
    assert "log-probs ok  12 samples" in out


def test_without_any_stored_version_nothing_is_checked_and_it_says_what_keeps_more(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record()
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "start").rename(tmp_path / "away")
    assert deep_audit.main(run, 100) == 0
    out = capsys.readouterr().out
    assert "log-probs not checked  0 samples computed again, no token; no version is stored" in out
    assert "24 samples of 4 versions from 0 to 3, whose weights are no longer stored" in out
    assert "trainer.keep_last" in out
