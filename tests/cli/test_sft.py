"""`dora sft` fine-tunes a model folder on prompts and responses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_main import call
from tests.runtime.tiny import save_start

from dora.cli.sft import shuffled_batches
from dora.data.tokenizer import Tokenizer
from dora.model.pretrained import load_pretrained

ROWS = [{"prompt": f"{number}:", "response": str(number % 10) * 3} for number in range(10, 50)]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return save_start(tmp_path / "start")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_loss_of_held_out_rows_falls_and_the_folder_is_a_model(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write(tmp_path / "data.jsonl", ROWS), tmp_path / "out"
    given = ["--model", str(start), "--out", str(out), "--epochs", "20", "--lr", "0.02", "--batch-size", "8"]
    code, printed, err = call(capsys, "sft", str(data), *given, "--held-out", "8")
    assert (code, err) == (0, "")
    found = re.search(r"80 steps on 32 rows; .* 8 held-out rows: (\d\.\d+) before, (\d\.\d+) after", printed)
    assert found
    assert float(found[2]) < float(found[1]) / 2
    assert printed.splitlines()[0].startswith("step 1 of 80: loss 3.")
    config, flat = load_pretrained(out)
    assert config == load_pretrained(start)[0]
    assert not torch.equal(flat, load_pretrained(start)[1])
    assert Tokenizer(out).vocabulary == Tokenizer(start).vocabulary
    code, printed, _ = call(capsys, "generate", str(out), "27:", "--temperature", "0", "--max-tokens", "8")
    assert (code, printed.splitlines()[0]) == (0, "777")


def test_responses_may_be_in_the_column_completion(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in TRL's prompt-completion format. For rewards this name is reserved."""
    rows = [{"prompt": row["prompt"], "completion": row["response"]} for row in ROWS]
    data, given = (
        write(tmp_path / "data.jsonl", rows),
        ["--model", str(start), "--response-key", "completion"],
    )
    code, printed, err = call(capsys, "sft", str(data), *given, "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert "on 40 rows; written to" in printed


def test_each_epoch_has_every_row_once() -> None:
    examples = [([number], [number]) for number in range(10)]
    batches = shuffled_batches(examples, 4, seed=0)
    order = [prompt[0] for _ in range(5) for prompt, *_ in next(batches)]
    assert sorted(order[:10]) == sorted(order[10:]) == [*range(10)]
    assert order[:10] != order[10:]


@pytest.mark.parametrize(
    ("row", "options", "why"),
    [
        (
            {"prompt": "1:", "answer": "2"},
            (),
            r"line 2: .* no text in the column 'response'; .*: answer",
        ),
        ({"prompt": "1:", "response": ""}, (), "line 2: the column 'response' is empty; remove the row"),
        (
            {"question": "1:"},
            (),
            r"line 2: has no column 'prompt'; .* \(dora sft: --prompt-key\); .*: question",
        ),
        (
            {"prompt": [{"role": "user", "content": "1:"}], "response": "2"},
            (),
            "line 2: the prompt is a conversation; add --chat",
        ),
        (
            ROWS[0],
            ("--model", "nope"),
            "model folder nope does not exist; name a folder in Hugging Face format",
        ),
        ({"prompt": "1:", "response": "é"}, (), r"line 2: .*U\+00E9\) is not in the tokenizer's vocabulary"),
        ({"prompt": "1:", "response": "1" * 99}, (), r"line 2: .* 2 \+ 100 tokens; .* context is 64; remove"),
        (ROWS[0], ("--held-out", "2"), "2 rows, and --held-out 2 leaves none to train on; lower it"),
        (ROWS[0], ("--out", "."), "exists and is not an empty folder"),
    ],
)
def test_bad_input_is_named_before_anything_is_trained(
    row: dict[str, Any], options: tuple[str, ...], why: str, start: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = write(tmp_path / "data.jsonl", [ROWS[1], row])
    given = ["sft", str(data), "--model", str(start), "--out", str(tmp_path / "out"), *options]
    code, _, err = call(capsys, *given)
    assert code == 2
    assert re.search(why, err), err
    assert not (tmp_path / "out").exists()
