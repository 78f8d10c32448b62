"""`dora samples` and `dora why` print responses as text, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.journal.recorded_runs import edited_samples, record_run, world_config

from dora.cli.main import app
from dora.core.types import Branch, GroupId, RequestId
from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.tokenizer import Tokenizer, save_bpe_tokenizer
from dora.errors import InputError
from dora.report.data import run_data
from dora.report.samples import split_turns
from dora.stream.sample_db import SampleStore, Trajectory

Captured = pytest.CaptureFixture[str]
MASK = [1, 0, 1]  # the token between is of an observation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first two groups are finished; the first one is scored and trained."""
    run = record_run(tmp_path / "run", world_config(), seed=1, max_events=60)
    for file in run.glob("samples.sqlite*"):
        file.unlink()
    store = SampleStore(run / "samples.sqlite")
    for request in (RequestId(0, row, k) for row in range(2) for k in range(2)):
        tokens = [10 * request.row + request.sibling, 5, 6]
        found = Trajectory(request, 0, "d", [1, 2], tokens, [-0.5] * 3, loss_mask=MASK)
        if request.sibling:
            found = found._replace(
                segments=[(0, 1), (1, 2)], finish_reason="length", turn_rewards=[0.25, 0.75]
            )
        store.put(found)
    store.score(GroupId(0, 0), [0.0, 1.0], [-1.0, 1.0], {"right": [0.0, 1.0], "short": [0.5, 0.0]})
    store.set_state([GroupId(0, 0)], "trained", 4)
    store.close()
    return run


def printed(capsys: Captured, *words: object) -> str:
    app([*map(str, words)], standalone_mode=False)
    return capsys.readouterr().out


def test_jsonl_has_a_line_for_each_response(run: Path, capsys: Captured) -> None:
    lines = [json.loads(line) for line in printed(capsys, "samples", run, "--jsonl").splitlines()]
    names = [f"{line['group']}/{line['sibling']}" for line in lines]
    assert names == ["0/1/0", "0/1/1", "0/0/0", "0/0/1"]
    roles = ("model", "environment", "model")
    assert lines[-1] == {
        "group": "0/0",
        "sibling": 1,
        "version": 0,
        "state": "trained",
        "step": 5,
        "reward": 1.0,
        "advantage": 1.0,
        "task_rewards": {"right": 1.0, "short": 0.0},
        "turn_rewards": [0.25, 0.75],
        "tokens": 3,
        "finish_reason": "length",
        "segments": [[0, 1], [1, 2]],
        "branches": None,
        "prompt": "1 2",
        "prompt_turns": [{"role": None, "text": "1 2"}],
        "response": "156",
        "turns": [{"role": role, "text": text} for role, text in zip(roles, "156", strict=True)],
    }


def test_the_last_groups_are_printed_as_text(run: Path, capsys: Captured) -> None:
    text = printed(capsys, "samples", run, "--last", 1)
    assert text.startswith("group 0/0: version 0, trained in step 5\n\n    1 2\n")
    assert "response 0/0/0: reward 0 (right 0, short 0.5), advantage -1, 3 tokens\n" in text
    tokens = "3 tokens (1 of version 0, 2 of version 1), cut (length)"
    assert f"response 0/0/1: reward 1 (right 1, short 0), advantage 1, {tokens}\n" in text
    assert "    [environment]\n    5\n" in text
    assert "group 0/1: version 0, finished\n" in printed(capsys, "samples", run)


@pytest.fixture
def branched(run: Path) -> Path:
    """A run with one response: 3 4 5, of which 4 is observed; 6 follows 1 2 3 4, and 7 8 follow nothing."""
    for file in run.glob("samples.sqlite*"):
        file.unlink()
    store = SampleStore(run / "samples.sqlite")
    found = Trajectory(RequestId(0, 0, 0), 0, "d", [1, 2], [3, 4, 5, 6, 7, 8], [-0.5] * 6)
    store.put(found._replace(loss_mask=[1, 0, 1, 1, 0, 1], branches=[Branch(5, 4), Branch(6, 0)]))
    store.close()
    return run


def test_text_says_where_a_branch_begins_and_what_it_follows(branched: Path, capsys: Captured) -> None:
    shown = printed(capsys, "samples", branched).partition("response 0/0/0: 6 tokens\n")[2]
    assert [line for line in shown.splitlines() if line] == [
        *("    [model]", "    3", "    [environment]", "    4", "    [model]", "    5"),
        "  branch: the turns below follow 4 tokens of prompt and response, which end with '1 2 3 4'",
        *("    [model]", "    6"),
        "  branch: the turns below follow nothing, the agent has changed the whole history",
        *("    [environment]", "    7", "    [model]", "    8"),
    ]


def test_jsonl_and_the_report_have_the_branches(branched: Path, capsys: Captured) -> None:
    line = json.loads(printed(capsys, "samples", branched, "--jsonl"))
    assert [turn["text"] for turn in line["turns"]] == ["3", "4", "5", "6", "7", "8"]
    assert line["branches"] == [
        {"turn": 3, "num_tokens": 4, "follows": "1 2 3 4"},
        {"turn": 4, "num_tokens": 0, "follows": ""},
    ]
    (response,) = run_data(branched)["samples"]["groups"][0]["responses"]
    assert response["branches"] == line["branches"]
    assert response["parts"] == [["3", 1], ["4", 0], ["5", 1], ["6", 1], ["7", 0], ["8", 1]]


@pytest.mark.parametrize("column", ["[[5", "[[99, 4]]", "[[5]]", "7"])
def test_damaged_branches_are_left_out(branched: Path, tmp_path: Path, capsys: Captured, column: str) -> None:
    damaged = edited_samples(branched, tmp_path / "damaged", f"update samples set branches = '{column}'")
    assert "branch:" not in printed(capsys, "samples", damaged)


def test_one_response_is_printed_also_by_why(run: Path, capsys: Captured) -> None:
    text = printed(capsys, "samples", run, "0/1/1")
    assert "response 0/1/1" in text
    assert "response 0/1/0" not in text
    assert printed(capsys, "why", run, "0/1/1").endswith(f"\n\n{text}")
    assert "response" not in printed(capsys, "why", run, "0/1")


def test_a_later_response_of_an_unfinished_group_is_printed(
    run: Path, tmp_path: Path, capsys: Captured
) -> None:
    delete = "delete from samples where group_id = '0/1' and sibling = 0"
    unfinished = edited_samples(run, tmp_path / "unfinished", delete)
    assert "response 0/1/1" in printed(capsys, "samples", unfinished, "0/1/1")
    with pytest.raises(InputError, match="the run has no finished response 0/1/0"):
        app(["samples", str(unfinished), "0/1/0"], standalone_mode=False)


def save_chat_tokenizer(folder: Path) -> None:
    """A tokenizer with a chat template, in a folder that transformers accepts as a model's."""
    save_bpe_tokenizer(folder, ["What is 6 x 7? Be brief."], 300)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


def test_a_rendered_conversation_is_split_into_its_turns(tmp_path: Path) -> None:
    own = [
        {"role": "user", "content": "How many are 6 x 7?\n\nMind the unit."},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Why?"},
    ]
    save_chat_tokenizer(tmp_path)
    rendered = ChatTemplate(tmp_path, "Be brief.").render(own)
    assert split_turns(rendered) == [
        ("system", "Be brief."),
        ("user", "How many are 6 x 7?\n\nMind the unit."),
        ("assistant", "42"),
        ("user", "Why?"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n",
        "<|user|>\n2 + 2?<|end|>\n<|assistant|>\n",
        "<s>[INST] 2 + 2? [/INST]",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>2 + 2?<\uff5cAssistant\uff5c>",
    ],
)
def test_the_markers_of_other_templates_are_known(text: str) -> None:
    assert split_turns(text) == [("user", "2 + 2?")]


@pytest.mark.parametrize("text", ["", "2 + 2?", "Explain <|im_start|>user\nas a marker", "17 4 9"])
def test_text_that_is_no_conversation_stays_whole(text: str) -> None:
    assert split_turns(text) == [(None, text)]


def test_damaged_tokens_are_printed_as_their_ids(run: Path, tmp_path: Path, capsys: Captured) -> None:
    damaged = edited_samples(run, tmp_path / "damaged", "update samples set token_ids = x'feffffff05000000'")
    save_chat_tokenizer(damaged / "checkpoints" / "step-1")
    assert "[model]\n    -2\n" in printed(capsys, "samples", damaged, "--last", 1)


def test_an_answer_that_is_begun_for_the_model_is_a_turn() -> None:
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert split_turns(text) == [("user", "2 + 2?"), ("assistant", "<think>\n\n</think>")]


def test_the_turns_of_a_chat_prompt_are_printed_and_shown_with_their_roles(
    run: Path, capsys: Captured
) -> None:
    model = run / "checkpoints" / "step-1"
    save_chat_tokenizer(model)
    tokenizer = Tokenizer(model)
    prompt = PromptEncoder(tokenizer, ChatTemplate(model, "Be brief.")).encode("What is 6 x 7?\nIn base 10.")
    (run / "samples.sqlite").unlink()
    store = SampleStore(run / "samples.sqlite")
    answer = tokenizer.encode("42")
    store.put(Trajectory(RequestId(0, 0, 0), 0, "d", prompt, answer, [-0.5] * len(answer)))
    store.close()
    turns = [["system", "Be brief."], ["user", "What is 6 x 7?\nIn base 10."]]
    shown = (
        "    [system]\n    Be brief.\n\n    [user]\n    What is 6 x 7?\n    In base 10.\n\n  response 0/0/0"
    )
    assert shown in printed(capsys, "samples", run)
    assert shown in printed(capsys, "why", run, "0/0/0")
    line = json.loads(printed(capsys, "samples", run, "--jsonl"))
    assert line["prompt_turns"] == [{"role": role, "text": text} for role, text in turns]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in line["prompt"]
    assert [[*turn] for turn in run_data(run)["samples"]["groups"][0]["prompt"]] == turns


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0/7", "the run has no finished response 0/7; `dora why`"),
        ("0/1/2", "the run has no finished response 0/1/2"),
        ("seven", "'seven' must be epoch/row/sibling, such as 0/3/7, or epoch/row"),
    ],
)
def test_an_unknown_request_is_refused(run: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        app(["samples", str(run), name], standalone_mode=False)
