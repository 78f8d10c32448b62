"""The samples of a run as text: for `dora samples`, and for a report.

A page cannot show all samples of a run, so whole groups are picked: first notable groups, then groups at
equal distances over the run.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import re
import sqlite3
import tomllib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import tokenizers

from dora.core.types import Branch, GroupId, RequestId
from dora.errors import InputError
from dora.journal.reader import CONFIG_FILE, open_sample_store, read_samples
from dora.stream.sample_db import read_branches, tokens_before
from dora.text import plural, step_number

MAX_CHARACTERS = 4_000  # of one text; a longer one is cut
CUT = ("length", "max_turns", "observation_length")  # finish reasons
MAX_FOLLOWED = 60  # characters that a branch follows; earlier ones are left out
NUM_NOTABLE = 4  # groups for each tag

# Markers of chat templates: where a turn starts, with its role, and where it ends
TURN_START = re.compile(
    r"<\|im_start\|>(\w+)\n"  # ChatML: Qwen
    r"|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n"  # Llama 3
    r"|<start_of_turn>(\w+)\n"  # Gemma
    r"|<[|\uff5c](system|user|assistant|tool)[|\uff5c]>\n?"  # Phi, Zephyr, DeepSeek
    r"|\[(/?INST)\] ?",  # Mistral, Llama 2
    re.IGNORECASE,
)
TURN_END = re.compile(
    r"(<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\uff5cend\u2581of\u2581sentence\uff5c>|</s>)$"
)
SEQUENCE_START = re.compile(r"\s*(<[^<>\s]+>\s*)?")  # a special token at most, such as <|begin_of_text|>
ROLES = {"inst": "user", "/inst": "assistant", "model": "assistant"}  # that are not named

Decode = Callable[[Sequence[int]], str]


class StoredGroup(NamedTuple):
    """A group in the sample store, without its tokens."""

    id: GroupId
    version: int
    state: str
    step: int | None
    num_tokens: int  # of its longest response
    rewards: tuple[float | None, ...]
    siblings: tuple[int, ...] = ()  # that have finished
    is_segmented: bool = False  # a response is of several versions


def read_groups(run: Path) -> list[StoredGroup]:
    """Every group that has a response. Raises InputError."""
    found = []
    for name, own in groupby(read_samples(run).values(), key=lambda row: row.group):
        siblings = [*own]
        first, longest = siblings[0], int(max(row.num_token_ids for row in siblings))
        rewards, is_segmented = tuple(row.reward for row in siblings), any(row.segments for row in siblings)
        numbers = tuple(row.sibling for row in siblings)
        about = GroupId.parse(name), first.version, first.state, first.trained_step
        found.append(StoredGroup(*about, longest, rewards, numbers, is_segmented))
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
    run: Path, picked: Mapping[GroupId, Sequence[str]], decode: Decode | None, *, is_cut: bool = True
) -> list[dict[str, Any]]:
    """The picked groups with prompts and responses, in the order of their training. Raises InputError.

    With `is_cut`, texts of more than MAX_CHARACTERS are cut.
    """
    text = partial(_text, decode=decode, max_characters=MAX_CHARACTERS if is_cut else None)
    with open_sample_store(run) as store:
        shown = [_read_group(store, group, tags, text) for group, tags in picked.items()]
    return sorted(shown, key=lambda group: (group["step"] is None, group["step"] or 0, group["version"]))


def _read_group(
    store: sqlite3.Connection, group: GroupId, tags: Sequence[str], text: Callable[[bytes], str]
) -> dict[str, Any]:
    present = {row[1] for row in store.execute("pragma table_info(samples)")}
    later = [name if name in present else "null" for name in ("branches", "finish_reason", "turn_rewards")]
    rows = store.execute(
        "select version, state, trained_step, prompt_ids, sibling, token_ids, loss_mask, reward, advantage, "
        f"segments, task_rewards, {', '.join(later)} from samples where group_id = ? order by sibling",
        (str(group),),
    ).fetchall()
    version, state, step, prompt, *_ = rows[0]
    return {
        "group": str(group),
        "version": version,
        "state": state,
        "step": step,
        "tags": [*tags],
        "prompt": text(prompt),
        "responses": [_response(row, text) for row in rows],
    }


def _response(row: Sequence[Any], text: Callable[[bytes], str]) -> dict[str, Any]:
    version, _, _, prompt, sibling, tokens, mask, reward, advantage, *in_json = row
    segments, task_rewards, branches, finish_reason, turn_rewards = in_json
    segments, task_rewards = (json.loads(column) if column else None for column in (segments, task_rewards))
    known, num_prompt = _stored_branches(branches), len(prompt) // 4
    runs = [*_runs(mask, len(tokens) // 4, [branch.start - num_prompt for branch in known])]
    return {
        "sibling": sibling,
        "version": version,
        "reward": reward,
        "advantage": advantage,
        "task_rewards": task_rewards,
        "turn_rewards": json.loads(turn_rewards) if turn_rewards else None,
        "tokens": len(tokens) // 4,
        "finish_reason": finish_reason,
        "parts": [[text(tokens[4 * at : 4 * end]), is_sampled] for at, end, is_sampled in runs],
        "segments": segments,
        "branches": _branches(known, _ids(prompt) + _ids(tokens), [num_prompt + at for at, *_ in runs], text)
        or None,
    }


def _stored_branches(column: str | None) -> list[Branch]:
    """The branches of a row; none if the column is damaged, which `dora audit` reports."""
    with contextlib.suppress(ValueError, TypeError):
        return read_branches(column) or []
    return []


def _branches(
    branches: Sequence[Branch],
    tokens: Sequence[int],
    part_starts: Sequence[int],
    text: Callable[[bytes], str],
) -> list[dict[str, Any]]:
    """For each branch, the part with which it begins, the number of tokens that it follows, and the end of
    their text. `tokens` are those of prompt and response, `part_starts` positions in them.
    """
    found = []
    for branch in (branch for branch in branches if branch.start in part_starts):
        before = tokens_before(tokens, branches, branch.parent)
        end = text(array("i", before[-MAX_FOLLOWED:]).tobytes())
        about = {"num_tokens": len(before), "follows": end[-MAX_FOLLOWED:]}
        found.append({"turn": part_starts.index(branch.start), **about})
    return found


def _runs(mask: bytes | None, num_tokens: int, starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal mask values, divided at `starts`: (from, to, 1 if the model sampled them)."""
    if mask is None:
        yield (0, num_tokens, 1)
        return
    edges = sorted({0, *(start for start in starts if 0 < start < len(mask)), len(mask)})
    for begin, stop in pairwise(edges):
        at = begin
        for is_sampled, own in groupby(mask[begin:stop]):
            end = at + len([*own])
            yield (at, end, is_sampled)
            at = end


def _text(blob: bytes, decode: Decode | None, max_characters: int | None) -> str:
    """The text of stored tokens, or their ids without a tokenizer."""
    ids = _ids(blob)
    is_damaged = min(ids, default=0) < 0  # which no tokenizer decodes
    text = " ".join(map(str, ids)) if decode is None or is_damaged else decode(ids)
    rest = 0 if max_characters is None else len(text) - max_characters
    return f"{text[:max_characters]} ... and {rest:,} characters more" if rest > 0 else text


def _ids(blob: bytes) -> array[int]:
    return array("i", blob[: len(blob) // 4 * 4])


def split_turns(text: str) -> list[tuple[str | None, str]]:
    """The turns of a rendered conversation: role and content, without the markers of its chat template.

    `text` is decoded with its special tokens. Text without known markers is one turn whose role is None. The
    empty turn at the end, where the answer begins, is left out.
    """
    head, *parts = TURN_START.split(text)
    if not parts or not SEQUENCE_START.fullmatch(head):
        return [(None, text)]
    width = TURN_START.groups + 1  # the roles of all templates, of which one is set, and the content
    turns: list[tuple[str | None, str]] = []
    for at in range(0, len(parts), width):
        *roles, content = parts[at : at + width]
        role = next(role for role in roles if role is not None).lower()
        turns.append((ROLES.get(role, role), TURN_END.sub("", content.rstrip())))
    return turns if turns[-1][1] else turns[:-1]


def read_config(run: Path) -> dict[str, Any]:
    """The configuration of a run; empty without a readable file."""
    with contextlib.suppress(OSError, ValueError):
        return tomllib.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    return {}


def find_decoder(run: Path, config: Mapping[str, Any]) -> Decode | None:
    """The decoder of the newest checkpoint with a tokenizer, or of the initial model; it keeps special
    tokens.
    """
    saved = sorted(run.glob("checkpoints/step-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    initial = config.get("model", {}).get("path")
    for folder in [*saved, *([Path(initial)] if initial else [])]:
        path = folder / "tokenizer.json"
        try:
            if path.is_file():
                tokenizer = tokenizers.Tokenizer.from_file(str(path))
                return lambda ids: str(tokenizer.decode([*ids], skip_special_tokens=False))
        except Exception:  # the library raises it for an invalid file
            continue
    return None


def print_samples(run: Path, name: str | None, last: int | None, *, as_jsonl: bool) -> None:
    """Print a group or a request by its `name`, or the `last` groups; None: all of them.

    JSONL has one response a line. Raises InputError.
    """
    groups = read_groups(run)
    request = None if name is None else _parse_name(name, groups)
    if request is not None:
        wanted = [GroupId(*request[:2])]
    else:
        wanted = [group.id for group in sorted(groups, key=_order)][-last if last else 0 :]
    decode = find_decoder(run, read_config(run))
    for group_id in wanted:
        (group,) = read_texts(run, {group_id: ()}, decode, is_cut=False)
        if request is not None and len(request) == 3:
            group["responses"] = [r for r in group["responses"] if r["sibling"] == request[2]]
        objects = (json.dumps(response, ensure_ascii=False) for response in _responses(group))
        print("\n".join(objects if as_jsonl else _paragraphs(group)))


def read_responses(run: Path, last: int | None) -> list[dict[str, Any]]:
    """The objects that `dora samples --jsonl` prints, of the `last` groups; None: all. Raises InputError."""
    groups = sorted(read_groups(run), key=_order)[-last if last else 0 :]
    texts = read_texts(
        run, {group.id: () for group in groups}, find_decoder(run, read_config(run)), is_cut=False
    )
    return [response for group in texts for response in _responses(group)]


def print_response(run: Path, name: str) -> None:
    """Print the text of one request, if it has finished; nothing for the name of a group."""
    with contextlib.suppress(InputError):
        if len(_parse_name(name, read_groups(run))) == 3:
            print()
            print_samples(run, name, None, as_jsonl=False)


def _parse_name(name: str, groups: Sequence[StoredGroup]) -> tuple[int, ...]:
    """Epoch, row and perhaps sibling. Raises InputError if the run has no such group."""
    parts = name.split("/")
    if len(parts) not in (2, 3) or not all(part.removeprefix("-").isdecimal() for part in parts):
        raise InputError(f"{name!r} must be epoch/row/sibling, such as 0/3/7, or epoch/row for a whole group")
    numbers = tuple(map(int, parts))
    known = next((group for group in groups if group.id == numbers[:2]), None)
    if known is None or (len(numbers) == 3 and numbers[2] not in known.siblings):
        raise InputError(f"the run has no finished response {name}; `dora why` prints where a request is")
    return numbers


def _responses(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    shared = {key: group[key] for key in ("group", "step", "state", "prompt")}
    if group["step"] is not None:
        shared["step"] = step_number(group["step"])
    prompt_turns = [{"role": role, "text": text} for role, text in split_turns(group["prompt"])]
    for response in group["responses"]:
        text = "".join(part for part, _ in response["parts"])
        turns = [{"role": _role(is_model), "text": part} for part, is_model in response["parts"]]
        own = {key: value for key, value in response.items() if key != "parts"}
        own |= {"prompt_turns": prompt_turns, "response": text, "turns": turns}
        yield {**shared, **own}


def _paragraphs(group: Mapping[str, Any]) -> Iterator[str]:
    trained = "" if group["step"] is None else f" in step {step_number(group['step'])}"
    yield f"group {group['group']}: version {group['version']}, {group['state']}{trained}\n"
    for role, text in split_turns(group["prompt"]):
        yield _turn(role, text)
    for response in group["responses"]:
        yield f"  response {group['group']}/{response['sibling']}: {_describe(response)}\n"
        branches = {branch["turn"]: branch for branch in response["branches"] or ()}
        for at, (part, is_model) in enumerate(response["parts"]):
            if at in branches:
                yield f"  {_describe_branch(branches[at])}\n"
            yield _turn(None if len(response["parts"]) == 1 else _role(is_model), part)


def _turn(role: str | None, text: str) -> str:
    label = "" if role is None else f"[{role}]\n"
    return f"{indent(label + text, '    ', bool)}\n"


def _describe(response: Mapping[str, Any]) -> str:
    """The reward with its parts, advantage, length, the versions of a response that has several, and the end
    of one that was cut.
    """
    numbers = ((name, response[name]) for name in ("reward", "advantage"))
    known = [f"{name} {value:.4g}" for name, value in numbers if value is not None]
    by_task = ", ".join(f"{name} {value:.4g}" for name, value in (response["task_rewards"] or {}).items())
    by_turn = ", ".join(f"{value:.4g}" for value in response["turn_rewards"] or ())
    if known and (by_task or by_turn):
        known[0] += f" ({by_task or f'of the turns: {by_turn}'})"
    segments = ", ".join(f"{num} of version {version}" for version, num in response["segments"] or ())
    known.append(f"{response['tokens']} tokens{f' ({segments})' if segments else ''}")
    return ", ".join(
        [*known, f"cut ({response['finish_reason']})"] if response["finish_reason"] in CUT else known
    )


def _describe_branch(branch: Mapping[str, Any]) -> str:
    """What the turns below this line follow, in place of those above it."""
    if not branch["num_tokens"]:
        return "branch: the turns below follow nothing, the agent has changed the whole history"
    end = " ".join(branch["follows"].split())
    tokens = plural(branch["num_tokens"], "token")
    return f"branch: the turns below follow {tokens} of prompt and response, which end with {end!r}"


def _role(is_model: int) -> str:
    return "model" if is_model else "environment"


def request_of(group: Mapping[str, Any], response: Mapping[str, Any]) -> RequestId:
    """The request of a response in a group of `read_texts`."""
    return RequestId(*GroupId.parse(group["group"]), response["sibling"])
