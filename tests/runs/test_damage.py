"""`dora audit` finds damage to the files of a real run, most of it even if all digests are computed again."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.journal.recorded_runs import Record, edited, write_chained
from tests.runtime.running import Run, dora, query

from dora.audit import audit, logprob_recheck, reward_recheck
from dora.errors import InputError
from dora.journal import replay
from dora.journal.writer import seal
from dora.stream.sample_db import PAYLOAD, payload_digest
from dora.trainer.checkpoint_folders import write_manifest

Damage = Callable[[Path], object]
GROUP = "(select group_id from samples where trained_step = 2 order by group_id limit 1)"
ONE = f"where group_id = {GROUP} and sibling = 0"
OTHER = f"where group_id = {GROUP} and sibling = 1"
JOURNAL, SUMMARY, METRICS = "journal.jsonl", "summary.json", "metrics.jsonl"


@pytest.fixture(scope="module")
def finished(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with three checkpoints, evaluations and filtered groups."""
    folder = tmp_path_factory.mktemp("finished")
    run = Run(
        task,
        folder / "run",
        run__steps=6,
        trainer__save_freq=2,
        trainer__keep_last=3,
        eval__path=str(task.parent / "prompts.jsonl"),
        eval__num_prompts=2,
        eval__every=3,
    )
    try:
        ended = run.end()
    finally:
        run.kill_all()
    assert (ended.code, ended.err) == (0, ""), ended
    return run.out


def findings(run: Path) -> list[str]:
    """What the audit, the replay and the recomputations find, or the error of a file that cannot be read."""
    try:
        found = [*audit.check(run).findings]
        if replay.main(run):
            found.append("the replay differs")
        return [
            *found,
            *logprob_recheck.check(run, 1000).findings,
            *reward_recheck.check(run, 1000).findings,
        ]
    except InputError as error:
        return [str(error)]


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


# --- damage to text files


def text(name: str, old: str, new: str, count: int = 1) -> Damage:
    """Replace a pattern in a file; it must change."""

    def damage(run: Path) -> None:
        before = (run / name).read_text()
        after = re.sub(old, new, before, count=count)
        assert after != before
        (run / name).write_text(after)

    return damage


def lines(name: str, edit: Callable[[list[str]], object]) -> Damage:
    """Edit the lines of a file."""

    def damage(run: Path) -> None:
        found = (run / name).read_text().splitlines(keepends=True)
        edit(found)
        (run / name).write_text("".join(found))

    return damage


def nth_of(found: list[str], kind: str, nth: int = 0) -> int:
    return [number for number, line in enumerate(found) if f'"kind": "{kind}"' in line][nth]


def removed(kind: str, nth: int = 0) -> Damage:
    return lines(JOURNAL, lambda found: found.pop(nth_of(found, kind, nth)))


def swap(found: list[str], first: int, second: int) -> None:
    found[first], found[second] = found[second], found[first]


def in_line(kind: str, old: str, new: str, nth: int = 0) -> Damage:
    """Replace a pattern in the nth line of a kind in the journal."""

    def edit(found: list[str]) -> None:
        number = nth_of(found, kind, nth)
        after = re.sub(old, new, found[number], count=1)
        assert after != found[number]
        found[number] = after

    return lines(JOURNAL, edit)


# --- damage to binary files


def flip(pattern: str, at: float = 0.5, num: int = 1) -> Damage:
    """Change bytes of the first file that a pattern finds, at a fraction of its length."""

    def damage(run: Path) -> None:
        path = sorted(run.glob(pattern))[0]
        content = bytearray(path.read_bytes())
        start = min(int(at * len(content)), len(content) - num)
        content[start : start + num] = bytes(byte ^ 0x11 for byte in content[start : start + num])
        path.write_bytes(content)

    return damage


def cut(pattern: str, num_bytes: int) -> Damage:
    def damage(run: Path) -> None:
        path = sorted(run.glob(pattern))[0]
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return damage


def without(pattern: str) -> Damage:
    return lambda run: sorted(run.glob(pattern))[0].unlink()


def exchanged(first: str, second: str) -> Damage:
    """Two files or folders change places."""

    def damage(run: Path) -> None:
        (run / first).rename(run / "moved")
        (run / second).rename(run / first)
        (run / "moved").rename(run / second)

    return damage


def written(name: str, content: str) -> Damage:
    return lambda run: (run / name).write_text(content)


# --- damage to the sample store


def sql(*statements: str) -> Damage:
    def damage(run: Path) -> None:
        with contextlib.closing(sqlite3.connect(run / "samples.sqlite")) as db, db:
            assert all(db.execute(statement).rowcount > 0 for statement in statements)

    return damage


def column(name: str, dtype: str, edit: Callable[[Any], Any], where: str = ONE) -> Damage:
    """Edit an array of one sample: `edit` changes it, or returns another one."""

    def damage(run: Path) -> None:
        ((blob,),) = query(run, f"select {name} from samples {where}")
        values = np.frombuffer(blob, dtype).copy()
        changed = edit(values)
        values = values if changed is None else changed
        query(run, f"update samples set {name} = ? {where}", values.astype(dtype).tobytes())

    return damage


def put(at: int, value: float) -> Callable[[Any], None]:
    return lambda values: values.__setitem__(at, value)


def swapped(*names: str) -> Damage:
    """Two siblings exchange some columns."""
    first = ", ".join(f"{name} = (select {name} from samples {OTHER})" for name in names)

    def damage(run: Path) -> None:
        (before,) = query(run, f"select {', '.join(names)} from samples {ONE}")
        assert [before] != query(run, f"select {', '.join(names)} from samples {OTHER}")
        query(run, f"update samples set {first} {ONE}")
        query(run, f"update samples set {', '.join(f'{n} = ?' for n in names)} {OTHER}", *before)

    return damage


def everywhere(old: Callable[[Path], str], new: str) -> Damage:
    """Replace a text in journal and store alike."""

    def damage(run: Path) -> None:
        found = old(run)
        journal = (run / JOURNAL).read_text()
        assert found in journal
        (run / JOURNAL).write_text(journal.replace(found, new))
        query(run, "update samples set weight_digest = replace(weight_digest, ?, ?)", found, new)

    return damage


def records(run: Path, kind: str) -> list[Record]:
    found = map(json.loads, (run / JOURNAL).read_text().splitlines()[1:])
    return [line for line in found if line["kind"] == kind]


def digest_of_version_2(run: Path) -> str:
    return next(str(line["digest"]) for line in records(run, "published") if line["version"] == 2)


def rename_a_group(run: Path) -> None:
    """A trained group is renamed in journal and store alike."""
    ((name,),) = query(run, f"select group_id from samples {ONE}")
    query(run, "update samples set group_id = '9/9' where group_id = ?", name)
    epoch, row = name.split("/")
    journal = (run / JOURNAL).read_text()
    (run / JOURNAL).write_text(re.sub(rf"\[{epoch}, {row}(?=[\],])", "[9, 9", journal))


def change_rewards_everywhere(run: Path) -> None:
    ((name,),) = query(run, f"select group_id from samples {ONE}")
    query(run, "update samples set reward = 0.5, advantage = 0.0 where group_id = ?", name)
    group = json.dumps([*map(int, name.split("/"))])
    pattern = re.escape(f'"kind": "group_scored", "group": {group}, "rewards": ') + r"\[[^\]]*\]"
    journal = (run / JOURNAL).read_text()
    after = re.sub(pattern, f'"kind": "group_scored", "group": {group}, "rewards": [0.5, 0.5]', journal)
    assert after != journal
    (run / JOURNAL).write_text(after)


def add_an_untrained_row(run: Path) -> None:
    names = [name for _, name, *_ in query(run, "pragma table_info(samples)")]
    (values,) = query(run, f"select * from samples {ONE}")
    row = dict(zip(names, values, strict=True)) | {"group_id": "7/3", "state": "finished"}
    row |= dict.fromkeys(("trained_step", "reward", "advantage"))
    marks = ", ".join("?" * len(names))
    query(run, f"insert into samples ({', '.join(names)}) values ({marks})", *row.values())


def copy_a_checkpoint(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-4", run / "checkpoints" / "step-5")


def change_a_file_and_its_manifest(run: Path) -> None:
    flip("checkpoints/step-4/optimizer.pt", num=2000)(run)
    write_manifest(run / "checkpoints" / "step-4")


def repeat_a_key(run: Path) -> None:
    in_line("trained", r'"step": (\d)', r'"step": \1, "step": \1')(run)


C4, C6 = "checkpoints/step-4", "checkpoints/step-6"
# Found even if all digests are computed again.
OF_CONTENT: dict[str, Damage] = {
    # the journal: values
    "a version": in_line("admit", r'"version": 0', '"version": 1'),
    "a deadline": in_line("admit", r'"deadline": (\d)', r'"deadline": 1\1'),
    "an index": in_line("admit", r'"index": 1', '"index": 11', nth=1),
    "an engine": in_line("request_finished", r'"engine": \d', '"engine": 7'),
    "a number of tokens": in_line("request_finished", r'"num_tokens": \d+', '"num_tokens": 1'),
    "no tokens": in_line("request_finished", r'"num_tokens": \d+', '"num_tokens": 0'),
    "100,000 tokens": in_line("request_finished", r'"num_tokens": \d+', '"num_tokens": 100000'),
    "a finish reason": in_line("request_finished", r'"finish_reason": "\w+"', '"finish_reason": "stopped"'),
    "a chunk's digest": in_line("request_finished", r'"chunks": \[\[0, "\w{4}', '"chunks": [[0, "0000'),
    "a reward": in_line("group_scored", r'"rewards": \[', '"rewards": [1'),
    "a missing reward": in_line("group_scored", r'"rewards": \[[^,]*, ', '"rewards": ['),
    "a trained step": in_line("trained", r'"step": 1', '"step": 2', nth=1),
    "a batch": in_line("train", r'"groups": \[\[\d+, \d+\]', '"groups": [[0, 99]', nth=2),
    "a published digest": in_line("published", r'"digest": "\w{4}', '"digest": "0000', nth=2),
    "a loaded digest": in_line("loaded", r'"digest": "\w{4}', '"digest": "0000'),
    "a digest replaced everywhere": everywhere(digest_of_version_2, "0123456789abcdef"),
    "a group renamed everywhere": rename_a_group,
    "rewards changed everywhere": change_rewards_everywhere,
    # times
    "a time that steps back": in_line("trained", r'"t_s": [\d.]+', '"t_s": 0.001', nth=3),
    "a negative time": in_line("trained", r'"t_s": [\d.]+', '"t_s": -1.0', nth=3),
    "a time that is no number": in_line("trained", r'"t_s": [\d.]+', '"t_s": NaN', nth=3),
    # the header
    "header: num_prompts": text(JOURNAL, r'"num_prompts": 7', '"num_prompts": 8'),
    "header: config_digest": text(JOURNAL, r'"config_digest": "\w{4}', '"config_digest": "0000'),
    # samples: tokens
    "a token": column("token_ids", "<i4", lambda ids: ids.__setitem__(3, (ids[3] + 1) % 20)),
    "a token beyond the vocabulary": column("token_ids", "<i4", put(3, 10**6)),
    "a negative token": column("token_ids", "<i4", put(3, -1)),
    "no token": column("token_ids", "<i4", lambda ids: ids[:0]),
    "answers swapped": swapped("token_ids", "logprobs"),
    # samples: log-probs
    "a log-prob that is no number": column("logprobs", "<f4", put(2, np.nan)),
    "an infinite log-prob": column("logprobs", "<f4", put(2, -np.inf)),
    "a log-prob above 0": column("logprobs", "<f4", put(2, 0.5)),
    # samples: prompts and other columns
    "an empty prompt": column("prompt_ids", "<i4", lambda ids: ids[:0]),
    "another prompt": column("prompt_ids", "<i4", put(0, 3)),
    "a stored version": sql(f"update samples set version = version + 1 {ONE}"),
    # samples: rewards, states, rows
    "a stored reward": sql(f"update samples set reward = reward + 1 {ONE}"),
    "an advantage of 17": sql(f"update samples set advantage = 17.0 {ONE}"),
    "an advantage's sign": sql(f"update samples set advantage = -1 - advantage where group_id = {GROUP}"),
    "a state": sql(f"update samples set state = 'scored' {ONE}"),
    "a removed sample": sql(f"delete from samples {ONE}"),
    "an extra row": add_an_untrained_row,
    # the configuration
    "a changed setting": text("config.toml", r"lr = 0.01", "lr = 0.02"),
    # checkpoints
    "weights": flip(f"{C4}/model.safetensors", at=0.9),
    "checkpoints swapped": exchanged(C4, C6),
}
# Found, perhaps only, by a digest, a chain or a seal that does not fit.
OF_DIGESTS: dict[str, Damage] = {
    # the journal: values
    "another finish reason": text(JOURNAL, '"finish_reason": "length"', '"finish_reason": "stop"'),
    "a payload digest": in_line("request_finished", r'"payload": "\w{4}', '"payload": "0000'),
    "no payload digest": in_line("request_finished", r'"payload": "\w+"', '"payload": ""'),
    "a measured KL": in_line("trained", r'"step": 1, ', '"step": 1, "kl": 0.5, ', nth=1),
    "a fetched row": in_line("prompts_fetched", r'"groups": \[\[0, 0\]', '"groups": [[0, 5]'),
    "a dataset position": in_line("prompts_fetched", r'"first_index": 0', '"first_index": 1'),
    "an engine's rows": in_line("engine_joined", r'"max_num_seqs": \d+', '"max_num_seqs": 99'),
    "an engine's slots": in_line("engine_joined", r'"version_slots": \d+', '"version_slots": 99'),
    "a version to load": in_line("load", r'"version": 0', '"version": 1'),
    "a step to commit to": in_line("commit", r'"step": (\d)', r'"step": 1\1'),
    "a digest of a file": in_line("files", r'": "\w{4}', '": "0000'),
    "a digest in the seal": in_line("seal", r'": "\w{4}', '": "0000', nth=-1),
    # times
    "a later time": in_line("trained", r'"t_s": ([\d.]+)', r'"t_s": 1\1', nth=3),
    "a time of stop": in_line("loaded", r'"stop_s": [\d.e-]+', '"stop_s": 99.0'),
    # lines
    "a removed admission": removed("admit", 3),
    "a removed event": removed("request_finished", 5),
    "a removed request for scores": removed("score", 1),
    "a removed commit": removed("commit", 1),
    "a removed scoring": removed("group_scored", 2),
    "a removed step": removed("trained", -1),
    "a removed publication": removed("published", 2),
    "a removed load": removed("loaded", 1),
    "a removed progress report": removed("progress_reported"),
    "a removed stop": removed("stop"),
    "a removed seal": removed("seal", -1),
    "a removed checkpoint line": removed("files"),
    "the last 30 lines removed": lines(JOURNAL, lambda found: found.__delitem__(slice(-30, None))),
    "the last half line": cut(JOURNAL, 40),
    "half the journal": lines(JOURNAL, lambda found: found.__delitem__(slice(len(found) // 2, None))),
    "an empty journal": written(JOURNAL, ""),
    "only the header": lines(JOURNAL, lambda found: found.__delitem__(slice(1, None))),
    "two lines swapped": lines(JOURNAL, lambda found: swap(found, 20, 21)),
    "two events swapped": lines(JOURNAL, lambda found: swap(found, 30, 60)),
    "a line twice": lines(JOURNAL, lambda found: found.insert(20, found[20])),
    "a line added": lines(JOURNAL, lambda found: found.insert(20, found[40])),
    "a line of another kind": in_line("trained", '"kind": "trained"', '"kind": "tried"'),
    "no JSON": in_line("trained", "{", "[", nth=1),
    "a blank line": lines(JOURNAL, lambda found: found.insert(9, "\n")),
    "an unknown key": in_line("trained", r'"step": (\d)', r'"step": \1, "note": "x"'),
    "a repeated key": repeat_a_key,
    "a space": in_line("trained", r'"step": (\d)', r'"step":  \1'),
    "a chain": in_line("trained", r'"chain": "\w{4}', '"chain": "0000'),
    "no chain": in_line("trained", r', "chain": "\w+"', ""),
    # the header
    "header: num_steps": text(JOURNAL, r'"num_steps": 6', '"num_steps": 7'),
    "header: batch_size": text(JOURNAL, r'"batch_size": 2', '"batch_size": 1'),
    "header: group_size": text(JOURNAL, r'"group_size": 2', '"group_size": 1'),
    "header: max_staleness": text(JOURNAL, r'"max_staleness": (\d)', '"max_staleness": 9'),
    "header: filter_groups": text(JOURNAL, r'"filter_groups": \w+', '"filter_groups": null'),
    "header: no num_prompts": text(JOURNAL, r'"num_prompts": 7', '"num_prompts": null'),
    "header: dora_version": text(JOURNAL, r'"dora_version": "', '"dora_version": "9'),
    "header: schema": text(JOURNAL, r'"schema": \d', '"schema": 3'),
    "header: slack": text(JOURNAL, r'"slack": (\d)', r'"slack": 1\1'),
    "header: a key of its own": text(JOURNAL, r'"schema"', '"other": 1, "schema"'),
    # samples: tokens
    "a token less": column("token_ids", "<i4", lambda ids: ids[:-1]),
    "a token more": column("token_ids", "<i4", lambda ids: np.append(ids, 1)),
    "a byte less": sql(f"update samples set token_ids = substr(token_ids, 2) {ONE}"),
    "answers and rewards swapped": swapped("token_ids", "logprobs", "reward", "advantage"),
    # samples: log-probs
    "a slightly changed log-prob": column(
        "logprobs", "<f4", lambda x: x.__setitem__(2, np.nextafter(x[2], np.float32(-9)))
    ),
    "a log-prob less": column("logprobs", "<f4", lambda logprobs: logprobs[:-1]),
    "log-probs swapped": swapped("logprobs"),
    # samples: prompts and other columns
    "other prompts of a group": sql(
        f"update samples set prompt_ids = x'05000000' where group_id = {GROUP}",
    ),
    "a loss mask": sql(f"update samples set loss_mask = x'00' {ONE}"),
    "a segment": sql(f"update samples set segments = '[[1, 24]]' {ONE}"),
    "routes": sql(f"update samples set routes = x'0000' {ONE}"),
    "a stored digest": sql(
        f"update samples set weight_digest = 'f' || substr(weight_digest, 2) || 'g' {ONE}"
    ),
    # samples: rewards, states, rows
    "no stored reward": sql(f"update samples set reward = null {ONE}"),
    "no advantage": sql(f"update samples set advantage = null {ONE}"),
    "a held-out reward": sql("update samples set reward = 9.0 where group_id like '-%'"),
    "a trained step of a sample": sql(f"update samples set trained_step = 1 {ONE}"),
    "a removed group": sql(f"delete from samples where group_id = {GROUP}"),
    "a renamed sample": sql(f"update samples set sibling = 2 {OTHER}"),
    "no sample at all": sql("delete from samples"),
    "no store": without("samples.sqlite"),
    "a store that is no database": written("samples.sqlite", "no database, but long enough " * 99),
    # the configuration
    "a changed path": text("config.toml", r'path = "', 'path = "/'),
    "a comment": text("config.toml", r"\[run\]", "# edited\n[run]"),
    "no configuration": without("config.toml"),
    "half a configuration": cut("config.toml", 200),
    # checkpoints
    "the header of weights": flip(f"{C4}/model.safetensors", at=0.0),
    "weights cut off": cut(f"{C4}/model.safetensors", 64),
    "empty weights": written(f"{C4}/model.safetensors", ""),
    "half a state": cut(f"{C4}/core.json", 300),
    "no weights": without(f"{C4}/model.safetensors"),
    "the optimizer": flip(f"{C4}/optimizer.pt", num=2000),
    "the optimizer cut off": cut(f"{C4}/optimizer.pt", 100),
    "the orchestrator's state": text(f"{C4}/core.json", r'"seq": (\d)', r'"seq": 1\1'),
    "no state": without(f"{C4}/core.json"),
    "a model's configuration": text(f"{C4}/config.json", r'"vocab_size": (\d)', r'"vocab_size": 1\1'),
    "a tokenizer": flip(f"{C4}/tokenizer.json"),
    "a manifest": text(f"{C4}/checkpoint.json", r'": "\w{4}', '": "0000'),
    "no manifest": without(f"{C4}/checkpoint.json"),
    "a file and its manifest": change_a_file_and_its_manifest,
    "a new file": written(f"{C4}/notes.txt", "mine"),
    "weights swapped": exchanged(f"{C4}/model.safetensors", f"{C6}/model.safetensors"),
    "weights of the last checkpoint": flip(f"{C6}/model.safetensors", at=0.9),
    "a copied checkpoint": copy_a_checkpoint,
    "no checkpoint": lambda run: shutil.rmtree(run / C4),
    # other files
    "summary: a number": text(SUMMARY, r'"steps": 6', '"steps": 7'),
    "summary: a verdict": text(SUMMARY, r'"c1": true', '"c1": false'),
    "no summary": without(SUMMARY),
    "half a summary": cut(SUMMARY, 20),
    "metrics: a number": text(METRICS, r'"reward/mean": ', '"reward/mean": 1'),
    "metrics: a line less": lines(METRICS, lambda found: found.pop()),
    "metrics: a line more": lines(METRICS, lambda found: found.append(found[-1])),
    "no metrics": without(METRICS),
}
DAMAGES = OF_CONTENT | OF_DIGESTS


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(finished: Path, tmp_path: Path, name: str) -> None:
    run = copy_of(finished, tmp_path)
    DAMAGES[name](run)
    assert findings(run)


def test_a_run_without_damage_has_no_findings(finished: Path) -> None:
    assert findings(finished) == []
    result = audit.check(finished)
    assert result.notes == ()
    assert (result.stored.num_samples > 24, result.files.num_files) == (True, 7)
    printed = dora("audit", finished, "--deep", "32")
    assert (printed.code, printed.err) == (0, "")
    for words in ("C1 ok", "C2 ok", "C3 ok", "files ok", "replay agrees", "log-probs ok", "rewards ok"):
        assert words in printed.out


@pytest.mark.parametrize(
    "name", ["two lines swapped", "an empty journal", "no JSON", "a store that is no database", "no store"]
)
def test_a_run_that_cannot_be_read_is_a_violation_and_no_wrong_input(
    finished: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(finished, tmp_path)
    DAMAGES[name](run)
    assert audit.main(run) == 1
    assert capsys.readouterr().out.startswith("files VIOLATED")
    assert dora("audit", run).code == 1


# --- by somebody who computes chain, digests and manifests again


def recomputed(damage: Damage) -> Damage:
    """Damage, and then the digests of all responses and files as if it had always been so."""

    def damage_and_recompute(run: Path) -> None:
        damage(run)
        rows = query(run, f"select group_id, sibling, {', '.join(PAYLOAD)} from samples")
        digests = {(group, sibling): payload_digest(values) for group, sibling, *values in rows}
        header, *found = [json.loads(line) for line in (run / JOURNAL).read_text().splitlines()]
        found = [line for line in found if line["kind"] not in ("files", "seal")]
        for line in found:
            if line["kind"] == "request_finished":
                epoch, row, sibling = line["request"]
                line["payload"] = digests.get((f"{epoch}/{row}", sibling), line["payload"])
        write_chained(run / JOURNAL, [header, *found])
        for manifest in run.glob("checkpoints/*/checkpoint.json"):
            write_manifest(manifest.parent)
        seal(run / JOURNAL)

    return damage_and_recompute


@pytest.mark.parametrize("name", OF_CONTENT)
def test_damage_is_found_even_where_all_digests_fit(finished: Path, tmp_path: Path, name: str) -> None:
    run = copy_of(finished, tmp_path)
    recomputed(lambda run: None)(run)
    assert findings(run) == []
    recomputed(OF_CONTENT[name])(run)
    assert findings(run)


def test_a_run_that_was_killed_is_not_sealed_and_has_no_findings(finished: Path, tmp_path: Path) -> None:
    def cut_off(records: list[Record]) -> None:
        del records[next(n for n, r in enumerate(records) if r["kind"] == "files") + 1 :]

    (tmp_path / "killed").mkdir()
    run = edited(finished, tmp_path / "killed" / "run", cut_off)
    (run / SUMMARY).unlink()
    result = audit.check(run)
    assert any("no seal" in note for note in result.notes)
