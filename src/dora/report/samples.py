"""The samples that a report shows in full: which groups, and their texts.

A page cannot show all samples of a run, so whole groups are picked: first notable groups, then groups at
equal distances over the run.
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

from dora.core.types import GroupId, RequestId
from dora.journal.reader import open_sample_store, sample_columns

MAX_CHARACTERS = 4_000  # of one text; a longer one is cut
NUM_NOTABLE = 4  # groups for each tag

Decode = Callable[[Sequence[int]], str]


class StoredGroup(NamedTuple):
    """A group in the sample store, without its tokens."""

    id: GroupId
    version: int
    state: str
    step: int | None
    num_tokens: int  # of its longest response
    rewards: tuple[float | None, ...]
    is_segmented: bool = False  # a response is of several versions


def read_groups(run: Path) -> list[StoredGroup]:
    """Every group that has a response. Raises InputError."""
    with open_sample_store(run) as store:
        segments = "segments" if "segments" in sample_columns(store) else "null"
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
        is_segmented = any(row[6] for row in siblings)
        found.append(StoredGroup(_group_id(name), version, state, step, longest, rewards, is_segmented))
    return found


def pick_groups(
    groups: Sequence[StoredGroup], num: int, migrated: Iterable[GroupId], waited_for: Iterable[GroupId]
) -> dict[GroupId, list[str]]:
    """At most `num` groups with their tags; groups that are picked as representatives have no tag."""
    known = {group.id: group for group in groups}
    by_tag: dict[str, Iterable[GroupId]] = {
        "trainer waited": waited_for,
        "migrated": migrated,
        "longest": (g.id for g in heapq.nlargest(NUM_NOTABLE, groups, key=lambda g: g.num_tokens)),
        "low reward, late": _late_with_low_rewards(groups),
        "filtered": (g.id for g in groups if g.state.startswith("filtered")),
        "failed": (g.id for g in groups if g.state.startswith("failed")),
        "several versions": (g.id for g in groups if g.is_segmented),
    }
    picked: dict[GroupId, list[str]] = {}
    for tag, ids in by_tag.items():
        for group in [*dict.fromkeys(group for group in ids if group in known)][:NUM_NOTABLE]:
            if group in picked or len(picked) < num // 2 or num == 1:
                picked.setdefault(group, []).append(tag)
    rest = sorted((g for g in groups if g.id not in picked), key=_order)
    left = min(len(rest), max(0, num - len(picked)))
    return picked | {rest[i * (len(rest) - 1) // max(1, left - 1)].id: [] for i in range(left)}


def _late_with_low_rewards(groups: Sequence[StoredGroup]) -> list[GroupId]:
    """The lowest rewards in the last tenth of the run."""
    late = sorted((g for g in groups if g.step is not None), key=_order)[-(len(groups) // 10) :]
    scored = [(sum(r for r in g.rewards if r is not None), g.id) for g in late]
    return [group for _, group in heapq.nsmallest(NUM_NOTABLE, scored)]


def _order(group: StoredGroup) -> tuple[int, GroupId]:
    return (group.version if group.step is None else group.step, group.id)


def read_texts(
    run: Path, picked: Mapping[GroupId, Sequence[str]], decode: Decode | None
) -> list[dict[str, Any]]:
    """The picked groups with prompts and responses, in the order of their training. Raises InputError."""
    with open_sample_store(run) as store:
        shown = [_read_group(store, group, tags, decode) for group, tags in picked.items()]
    return sorted(shown, key=lambda group: (group["step"] is None, group["step"] or 0, group["version"]))


def _read_group(
    store: sqlite3.Connection, group: GroupId, tags: Sequence[str], decode: Decode | None
) -> dict[str, Any]:
    known = sample_columns(store)
    optional = [name if name in known else f"null as {name}" for name in ("loss_mask", "segments")]
    rows = store.execute(
        f"select sibling, version, state, trained_step, reward, advantage, prompt_ids, token_ids, "
        f"{', '.join(optional)} from samples where group_id = ? order by sibling",
        (str(group),),
    ).fetchall()
    _, version, state, step, *_, prompt, _, _, _ = rows[0]
    return {
        "group": str(group),
        "version": version,
        "state": state,
        "step": step,
        "tags": [*tags],
        "prompt": _text(prompt, decode),
        "responses": [_response(row, decode) for row in rows],
    }


def _response(row: Sequence[Any], decode: Decode | None) -> dict[str, Any]:
    sibling, version, _, _, reward, advantage, _, tokens, mask, segments = row
    parts = [
        [_text(tokens[4 * at : 4 * end], decode), is_sampled]
        for at, end, is_sampled in _runs(mask, len(tokens) // 4)
    ]
    return {
        "sibling": sibling,
        "version": version,
        "reward": reward,
        "advantage": advantage,
        "tokens": len(tokens) // 4,
        "parts": parts,
        "segments": json.loads(segments) if segments else None,
    }


def _runs(mask: bytes | None, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Runs of equal mask values: (from, to, 1 if the model sampled them)."""
    if mask is None:
        yield (0, num_tokens, 1)
        return
    at = 0
    for is_sampled, own in groupby(mask):
        end = at + len([*own])
        yield (at, end, is_sampled)
        at = end


def _text(blob: bytes, decode: Decode | None) -> str:
    """The text of stored tokens, or their ids without a tokenizer."""
    ids = array("i", blob[: len(blob) // 4 * 4])
    text = " ".join(map(str, ids)) if decode is None else decode(ids)
    rest = len(text) - MAX_CHARACTERS
    return f"{text[:MAX_CHARACTERS]} ... and {rest:,} characters more" if rest > 0 else text


def find_decoder(folders: Iterable[Path]) -> Decode | None:
    """The decoder of the first folder with a tokenizer; it keeps special tokens."""
    for folder in folders:
        path = folder / "tokenizer.json"
        try:
            if path.is_file():
                tokenizer = tokenizers.Tokenizer.from_file(str(path))
                return lambda ids: str(tokenizer.decode([*ids], skip_special_tokens=False))
        except Exception:  # the library raises it for an invalid file
            continue
    return None


def requests_of(groups: Iterable[Mapping[str, Any]]) -> list[RequestId]:
    """The requests of all responses in groups of `read_texts`."""
    return [
        RequestId(*_group_id(group["group"]), response["sibling"])
        for group in groups
        for response in group["responses"]
    ]


def _group_id(name: str) -> GroupId:
    epoch, row = name.split("/")
    return GroupId(int(epoch), int(row))
