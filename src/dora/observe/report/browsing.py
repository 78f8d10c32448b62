"""The answers that a report shows in full: which ones, their texts, and the life of each.

A run has far more than a page should carry, so whole groups are picked: the notable ones first, then others
spread evenly over the run.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from dora.core.records import GroupId, RequestId
from dora.observe.samples import columns, opened

MAX_CHARACTERS = 4_000  # of one answer; what is longer is cut, and says so
NUM_NOTABLE = 4  # groups of each kind

Decode = Callable[[Sequence[int]], str]


class Group(NamedTuple):
    """What the store has of a group, without its tokens."""

    id: GroupId
    version: int
    state: str
    step: int | None
    num_tokens: int  # of its longest answer
    rewards: tuple[float | None, ...]
    is_mixed: bool = False  # an answer is of several versions


def stored_groups(run: Path) -> list[Group]:
    """Every group that has an answer. Raises InputError."""
    with opened(run) as store:
        segments = "segments" if "segments" in columns(store) else "null"
        rows = store.execute(
            f"select group_id, version, state, trained_step, length(token_ids) / 4, reward, {segments} "
            "from samples order by group_id, sibling"
        ).fetchall()
    found = []
    for name, own in groupby(rows, key=lambda row: row[0]):
        siblings = [*own]
        longest = max(row[4] for row in siblings)
        version, state, step = siblings[0][1:4]
        rewards = tuple(row[5] for row in siblings)
        is_mixed = any(row[6] for row in siblings)
        found.append(Group(_group(name), version, state, step, longest, rewards, is_mixed))
    return found


def pick(
    groups: Sequence[Group], num: int, moved: Iterable[GroupId], waited_for: Iterable[GroupId]
) -> dict[GroupId, list[str]]:
    """At most `num` groups, each with what it was picked for; nothing stands for being one of many."""
    known = {group.id: group for group in groups}
    kinds: dict[str, Iterable[GroupId]] = {
        "the trainer waited for it": waited_for,
        "moved between engines": moved,
        "longest answers": (g.id for g in heapq.nlargest(NUM_NOTABLE, groups, key=lambda g: g.num_tokens)),
        "low reward, late": _late_and_low(groups),
        "filtered": (g.id for g in groups if g.state.startswith("filtered")),
        "failed": (g.id for g in groups if g.state.startswith("failed")),
        "several versions": (g.id for g in groups if g.is_mixed),
    }
    picked: dict[GroupId, list[str]] = {}
    for kind, ids in kinds.items():
        for group in [*dict.fromkeys(group for group in ids if group in known)][:NUM_NOTABLE]:
            if group in picked or len(picked) < num // 2 or num == 1:
                picked.setdefault(group, []).append(kind)
    rest = sorted((g for g in groups if g.id not in picked), key=_when)
    left = min(len(rest), max(0, num - len(picked)))
    return picked | {rest[i * (len(rest) - 1) // max(1, left - 1)].id: [] for i in range(left)}


def _late_and_low(groups: Sequence[Group]) -> list[GroupId]:
    """What the policy still gets wrong: of the last tenth of the run, the lowest rewards."""
    late = sorted((g for g in groups if g.step is not None), key=_when)[-(len(groups) // 10) :]
    judged = [(sum(r for r in g.rewards if r is not None), g.id) for g in late]
    return [group for _, group in heapq.nsmallest(NUM_NOTABLE, judged)]


def _when(group: Group) -> tuple[int, GroupId]:
    return (group.version if group.step is None else group.step, group.id)


def texts(run: Path, picked: Mapping[GroupId, Sequence[str]], decode: Decode | None) -> list[dict[str, Any]]:
    """The picked groups with prompt and answers, in the order they were trained. Raises InputError."""
    with opened(run) as store:
        shown = [_shown(store, group, kinds, decode) for group, kinds in picked.items()]
    return sorted(shown, key=lambda group: (group["step"] is None, group["step"] or 0, group["version"]))


def _shown(
    store: sqlite3.Connection, group: GroupId, kinds: Sequence[str], decode: Decode | None
) -> dict[str, Any]:
    known = columns(store)
    optional = [name if name in known else f"null as {name}" for name in ("loss_mask", "segments")]
    rows = store.execute(
        f"select sibling, version, state, trained_step, reward, advantage, prompt_ids, token_ids, "
        f"{', '.join(optional)} from samples where group_id = ? order by sibling",
        (str(group),),
    ).fetchall()
    _, version, state, step, *_, prompt, _, _, _ = rows[0]
    return {
        "group": str(group), "version": version, "state": state, "step": step, "kinds": [*kinds],
        "prompt": _text(prompt, decode),
        "answers": [_answer(row, decode) for row in rows],
    }  # fmt: skip


def _answer(row: Sequence[Any], decode: Decode | None) -> dict[str, Any]:
    sibling, version, _, _, reward, advantage, _, answer, mask, segments = row
    parts = [
        [_text(answer[4 * at : 4 * end], decode), is_drawn]
        for at, end, is_drawn in _runs(mask, len(answer) // 4)
    ]
    return {
        "sibling": sibling, "version": version, "reward": reward, "advantage": advantage,
        "tokens": len(answer) // 4, "parts": parts,
        "segments": json.loads(segments) if segments else None,
    }  # fmt: skip


def _runs(mask: bytes | None, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(from, to, 1 if the model drew them) of tokens in a row that are alike."""
    if mask is None:
        yield (0, num_tokens, 1)
        return
    at = 0
    for is_drawn, own in groupby(mask):
        end = at + len([*own])
        yield (at, end, is_drawn)
        at = end


def _text(blob: bytes, decode: Decode | None) -> str:
    """The text of stored tokens, or their ids where nobody can read them."""
    ids = array("i", blob[: len(blob) // 4 * 4])
    text = " ".join(map(str, ids)) if decode is None else decode(ids)
    rest = len(text) - MAX_CHARACTERS
    return f"{text[:MAX_CHARACTERS]} ... and {rest:,} characters more" if rest > 0 else text


def decoder(folders: Iterable[Path]) -> Decode | None:
    """Of the first folder that has a tokenizer; special tokens are shown."""
    for folder in folders:
        path = folder / "tokenizer.json"
        try:
            if path.is_file():
                tokenizer = tokenizers.Tokenizer.from_file(str(path))
                return lambda ids: str(tokenizer.decode([*ids], skip_special_tokens=False))
        except Exception:  # what the library raises for a file that is none
            continue
    return None


def requests_of(groups: Iterable[Mapping[str, Any]]) -> list[RequestId]:
    """Every answer that is shown."""
    return [RequestId(*_group(g["group"]), answer["sibling"]) for g in groups for answer in g["answers"]]


def _group(name: str) -> GroupId:
    epoch, row = name.split("/")
    return GroupId(int(epoch), int(row))
