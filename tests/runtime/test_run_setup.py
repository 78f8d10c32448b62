"""Bad input fails with its key before anything is started or written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.test_main import exit_code
from tests.runtime.running import settings
from tests.runtime.tiny import CHARACTERS, write_task

from dora.config.load import read_config
from dora.core.types import RequestId
from dora.runtime import run_dir
from dora.runtime.run_setup import RunSetup

BAD: dict[str, tuple[dict[str, object], str]] = {
    "a missing data file": ({"data.path": "nowhere.jsonl"}, "data.path = 'nowhere.jsonl'"),
    "a data file of another kind": (
        {"data.path": "task.py"},
        "must be a .jsonl, .json, .csv or .parquet file",
    ),
    "a missing column": ({"data.prompt_key": "question"}, "no column 'question'"),
    "a prompt longer than the limit": ({"data.max_prompt_length": 2}, "the prompt has 3 tokens"),
    "a missing model": ({"model.path": "nowhere"}, "model.path = 'nowhere'"),
    "a folder without a model": ({"model.path": "."}, "no config.json"),
    "an unknown key": ({"engine.colour": "red"}, "engine.colour: unknown key"),
    "a response longer than the model": ({"sampling.max_response_length": 60}, "8 + 60 = 68 tokens"),
    "more versions than memory": (
        {"orchestrator.max_staleness": 10**9, "engine.version_slots": 2},
        "lower what takes most: ",
    ),
    "an evaluation of nothing": ({"eval.num_prompts": 3}, "eval.num_prompts is set"),
    "a missing reward file": ({"reward.function": "nowhere.py:reward"}, "'nowhere.py'"),
}


@pytest.mark.parametrize(("changes", "expected"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("mode", ["for a run", "for a dry run"])
def test_bad_input_is_refused(
    mode: str,
    changes: dict[str, object],
    expected: str,
    task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(task.parent)
    dry = ["--dry-run"] if mode == "for a dry run" else []
    out = tmp_path / "run"
    assert exit_code("train", task, "--out", out, *dry, *settings(changes)) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "Traceback" not in err
    assert not out.exists()


def refusal_of(config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The message with which `dora train` refuses a configuration before it makes the run's folder."""
    out = config.parent / "run"
    assert exit_code("train", config, "--out", out) == 2
    assert not out.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "prompts.jsonl has no rows"),
        ('{"prompt": ""}\n', "line 1: the prompt has 0 tokens; it needs at least one"),
        ('{"prompt": "?"}\n', "cannot tokenize the text"),
        (
            '{"prompt": "1"}\n{"prompt": "1\\u00e9"}\n',
            "line 2: cannot tokenize the text: the character 'é' (U",
        ),
        ('{"prompt": "1"}\n{"prompt": "\\ud800"}\n', "line 2: the text has the lone surrogate U+D800"),
    ],
)
def test_a_dataset_without_usable_prompts_is_refused(
    content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_task(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(content)
    assert expected in refusal_of(config, capsys)


def test_a_missing_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing.toml does not exist" in refusal_of(tmp_path / "nothing.toml", capsys)


def test_a_tokenizer_larger_than_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_task(tmp_path)
    path = tmp_path / "start" / "config.json"
    path.write_text(path.read_text().replace(f'"vocab_size": {len(CHARACTERS) + 1}', '"vocab_size": 16'))
    assert "the model's vocab_size is 16" in refusal_of(config, capsys)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("generation_config.json", '{"eos_token_id": [1, 2, 3, 4, 5, 6, 7, 8, 9]}', "9 end tokens"),
        ("generation_config.json", '{"eos_token_id": [1, 99]}', "99 is an end token, and no token id"),
        ("config.json", "[]", "must contain a JSON object"),
    ],
)
def test_a_broken_model_folder_is_refused(
    name: str, content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path)
    (tmp_path / "start" / name).write_text(content)
    assert expected in refusal_of(task, capsys)


def test_a_model_without_all_its_tensors_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path)
    path = tmp_path / "start" / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    expected = f"{tmp_path}/start: the checkpoint does not fit config.json: missing"
    assert expected in refusal_of(task, capsys)


@pytest.mark.parametrize("change", ['"model_type": "superllm"', '"model_type": null'])
def test_a_model_that_nothing_can_compute_is_refused_by_its_folder(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may have several models: policy, critic, teachers."""
    task = write_task(tmp_path)
    path = tmp_path / "start" / "config.json"
    path.write_text(path.read_text().replace('"model_type": "qwen3"', change))
    err = refusal_of(task, capsys)
    assert err.startswith(f"dora: {path}: ")
    assert ("use another model" if "superllm" in change else "the key 'model_type' is missing") in err
    assert err.count("\n") == 1


ANSWER = "def reward(prompt, completion, answer, **row):\n    return float(answer in completion)\n"
COMPLETE = '{"prompt": "1:", "answer": "7"}\n'


@pytest.mark.parametrize(
    ("prompts", "held_out", "where"),
    [
        (COMPLETE + '{"prompt": "2:"}\n', COMPLETE, "prompts.jsonl, line 2"),
        ('{"prompt": "2:"}\n' + COMPLETE, COMPLETE, "prompts.jsonl, line 1"),
        (COMPLETE, COMPLETE + '{"prompt": "2:"}\n', "held_out.jsonl, line 2"),
        (COMPLETE, '{"prompt": "2:"}\n', "held_out.jsonl"),
    ],
)
def test_a_column_that_a_row_lacks_is_refused_before_a_reward_needs_it(
    prompts: str, held_out: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write_task(tmp_path, ANSWER)
    (tmp_path / "prompts.jsonl").write_text(prompts)
    (tmp_path / "held_out.jsonl").write_text(held_out)
    changes = settings({"eval.path": tmp_path / "held_out.jsonl", "eval.num_prompts": 2})
    assert exit_code("train", task, "--out", tmp_path / "run", *changes) == 2
    lacks = f"needs the column 'answer', which {tmp_path}/{where} lacks; add it there, or give the parameter"
    assert lacks in capsys.readouterr().err
    (tmp_path / "task.py").write_text(ANSWER.replace("answer,", "answer='7',"))
    assert exit_code("train", task, "--out", tmp_path / "run", "--dry-run", *changes) == 0


def test_a_folder_that_holds_a_run_is_not_changed(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal.jsonl").write_text("recorded")
    assert exit_code("train", task, "--out", tmp_path) == 2
    assert f"already holds a run: resume it with --resume {tmp_path}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    assert (tmp_path / "journal.jsonl").read_text() == "recorded"


def test_a_released_folder_has_only_files_that_are_not_the_run_s(task: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "run", read_config(task)
    run_dir.claim(out, config)
    (copy,) = run_dir.copy_code(out, config)
    assert (out / copy).read_text() == (task.parent / "task.py").read_text()
    run_dir.release(out)
    assert not out.exists()
    run_dir.claim(out, config)
    run_dir.copy_code(out, config)
    (out / "code" / "own.py").write_text("")
    run_dir.release(out)
    assert [path for path in out.rglob("*") if path.is_file()] == [out / "code" / "own.py"]


def test_a_new_run_removes_the_address_of_an_earlier_service(task: Path, tmp_path: Path) -> None:
    (tmp_path / "service.json").write_text("{}")
    run_dir.claim(tmp_path, read_config(task))
    assert not (tmp_path / "service.json").exists()


def test_a_dry_run_describes_the_run_and_writes_nothing(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", task, "--out", tmp_path / "run", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "(max_staleness + 1) x batch_size - slack = 6 groups" in printed
    assert "engines x max_num_seqs = 2 x 4 = 8\n" in printed
    assert "3 per engine" in printed
    assert "2 groups x 2 = 4 samples" in printed
    assert (
        "MB: 2 engines x (3 x 0.0106 MB of weights + 0.0123 MB of KV cache), 0.0422 MB for the trainer"
        in printed
    )
    assert "0 for an empty response" in printed
    assert not (tmp_path / "run").exists()


def test_the_default_run_folder_is_named_after_configuration_and_time(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    assert exit_code("train", task) == 2
    assert re.search(r"--out runs/task-\d{8}-\d{6} cannot be written", capsys.readouterr().err)


def test_a_reward_with_wrong_parameters_is_refused_before_anything_is_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_task(tmp_path, reward="def reward(answer):\n    return 1.0\n")
    printed = refusal_of(config, capsys)
    assert "reward(answer) cannot be called with prompt, completion" in printed
    assert "def reward(prompt, completion, **row):" in printed


def test_a_dry_run_calls_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_task(tmp_path, reward="def reward(prompt, completion):\n    return 'much'\n")
    assert exit_code("train", config, "--out", tmp_path / "run", "--dry-run") == 2
    assert "returned 'much' (str); it must return a finite float" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("batch_size", "is_noticed"), [(7, False), (8, True)])
def test_a_batch_larger_than_the_dataset_is_noticed(batch_size: int, is_noticed: bool, task: Path) -> None:
    setup = RunSetup.make(read_config(task, [f"trainer.batch_size={batch_size}"]), task.parent / "run")
    notice = (
        "trainer.batch_size = 8 groups, and the dataset has 7 prompts: a batch has some prompts more "
        "than once; lower trainer.batch_size, or add prompts"
    )
    assert setup.notices == ([notice] if is_noticed else [])


@pytest.mark.parametrize(("warmup_steps", "is_noticed"), [(4, False), (5, True)])
def test_a_warm_up_that_never_ends_is_noticed(warmup_steps: int, is_noticed: bool, task: Path) -> None:
    changes = ["run.steps=5", f"trainer.warmup_steps={warmup_steps}", "trainer.lr=0.001"]
    setup = RunSetup.make(read_config(task, changes), task.parent / "run")
    notice = (
        "trainer.warmup_steps = 5 and run.steps = 5: no step has the learning rate trainer.lr = 0.001; lower "
        "warmup_steps"
    )
    assert setup.notices == ([notice] if is_noticed else [])


def test_held_out_rows_that_are_trained_are_noticed(task: Path) -> None:
    first, second, third, *_ = (task.parent / "prompts.jsonl").read_text().splitlines()
    other = json.dumps({**json.loads(second), "number": 3})  # environments may have equal prompts in all rows
    held_out = task.parent / "held_out.jsonl"
    held_out.write_text("\n".join((first, other, third)) + "\n")
    changes = [f"eval.path={held_out}", "eval.num_prompts=2"]
    setup = RunSetup.make(read_config(task, changes), task.parent / "run")
    assert setup.notices == [
        "1 of 2 held-out rows is trained on, too, so the held-out reward may show what was "
        "memorized; remove them from one of the datasets"
    ]


def test_a_dry_run_shows_the_notices(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", task, "--dry-run", "--set", "trainer.batch_size=8") == 0
    assert re.search(r"^notice +trainer.batch_size = 8 groups, and", capsys.readouterr().out, re.MULTILINE)


def test_held_out_requests_are_sampled_by_the_settings_of_evaluations(task: Path) -> None:
    changes = ["eval.path=gcd", "eval.num_prompts=1", "eval.top_p=0.9", "sampling.top_k=5"]
    setup = RunSetup.make(read_config(task, [*changes, "eval.temperature=0.5"]), task.parent / "run")
    ids = RequestId(0, 0, 0), RequestId(-1, 0, 0), RequestId(-1, 0, 1)
    trained, greedy, sampled = map(setup.sampling_of, ids)
    assert (trained.temperature, trained.filters) == (1.0, {"top_k": 5})
    assert (greedy.temperature, greedy.filters) == (0.0, {})
    assert (sampled.temperature, sampled.filters) == (0.5, {"top_k": 5, "top_p": 0.9})
