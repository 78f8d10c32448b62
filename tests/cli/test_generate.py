"""`dora generate`, `dora doctor` and examples/generate.py: an engine without a run."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from tests.cli.test_main import call, refusal

from dora.cli.main import main
from dora.data.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "gcd-start"
PROMPT = "12,30:"


def generate(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, object]]:
    """The responses that the command prints as JSON."""
    code, out, err = call(capsys, "generate", str(MODEL), PROMPT, "--json", *options)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_a_response_is_printed_with_its_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "generate", str(MODEL), PROMPT, "--temperature", "0")
    assert (code, err) == (0, "")
    text, about = out.splitlines()
    assert text == "12,18;12,06;06,06=06"
    logprobs = re.fullmatch(
        r"  \[stop after 21 tokens, log-prob (-\d\.\d{3}) as sampled, (-\d\.\d{3}) by the model\]", about
    )
    assert logprobs
    assert logprobs[1] == logprobs[2]


def test_responses_differ_and_are_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    three = generate(capsys, "--num", "3", "--temperature", "3", "--max-tokens", "30", "--seed", "7")
    assert len({str(response["text"]) for response in three}) == 3
    (second,) = generate(capsys, "--temperature", "3", "--max-tokens", "30", "--seed", "8")
    assert second["token_ids"] == three[1]["token_ids"]
    tokenizer = Tokenizer(MODEL)
    for response in three:
        ids, logprobs, raw = response["token_ids"], response["logprobs"], response["raw_logprobs"]
        assert isinstance(ids, list)
        assert isinstance(logprobs, list)
        assert isinstance(raw, list)
        assert response["text"] == tokenizer.decode(ids)
        assert len(ids) == len(logprobs) == len(raw)
        assert logprobs != raw


def test_filters_and_stop_strings_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    (response,) = generate(capsys, "--temperature", "0", "--stop", "6;06", "--stop", "06=")
    assert (response["text"], response["finish_reason"]) == ("12,18;12,06;06", "stop")
    for option in ("--top-k=1", "--top-p=1e-9", "--min-p=1"):
        (response,) = generate(capsys, "--temperature", "5", option, "--max-tokens", "10")
        assert (response["text"], response["finish_reason"]) == ("12,18;12,0", "length")
        assert response["logprobs"] == [0.0] * 10


def test_a_stop_string_that_never_occurs_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    never = ("--stop", "never", "--stop-token-id", "1000")
    (response,) = generate(capsys, "--temperature", "0", "--max-tokens", "9", *never)
    assert (response["text"], response["finish_reason"]) == ("12,18;12,", "length")


def test_a_stop_token_ends_a_response_with_any_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    semicolon = str(Tokenizer(MODEL).encode(";")[0])
    for kernels in ("eager", "numba"):
        how = ("--kernels", kernels, "--stop-token-id", semicolon)
        (response,) = generate(capsys, "--temperature", "0", *how)
        assert (response["text"], response["finish_reason"]) == ("12,18;", "stop")


def test_a_message_is_formatted_with_the_chat_template_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    code, _, err = call(capsys, "generate", str(folder), "12,30", "--chat")
    assert code == 2
    assert "has no chat template" in err
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    code, out, _ = call(capsys, "generate", str(folder), "12,30", "--chat", "--temperature", "0")
    assert (code, out.splitlines()[0]) == (0, "12,18;12,06;06,06=06")


def test_variables_of_the_chat_template_are_a_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ start }}")
    given = ("generate", str(folder), "12,30", "--temperature", "0", "--chat-template-kwargs")
    code, out, _ = call(capsys, *given, '{"start": ":"}', "--chat")
    assert (code, out.splitlines()[0]) == (0, "12,18;12,06;06,06=06")
    for wrong in (("[1]", "--chat"), ('{"start": ":"}',)):
        assert "give a JSON object together with --chat" in refusal(capsys, *given, *wrong)
    unused = refusal(capsys, *given, '{"begin": ":"}', "--chat")
    assert "chat_template_kwargs.begin = ':': the chat template of" in unused
    assert unused.rstrip().endswith("start")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json; save the model's fast tokenizer there"),
        (
            "config.json",
            '{"model_type": "mamba"}',
            "'mamba' is not supported: config.json has no max_position_embeddings",
        ),
        ("model.safetensors", "torn", "model.safetensors cannot be read"),
        ("model.safetensors", None, "has no *.safetensors file"),
        ("config.json", None, "is not a model folder: it has no config.json"),
    ],
)
def test_the_error_for_an_unusable_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    err = refusal(capsys, "generate", str(folder), PROMPT)
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", PROMPT], "nowhere is not a model folder: it has no config.json"),
        (["Qwen/Qwen3-0.6B", PROMPT], "run `hf download Qwen/Qwen3-0.6B --local-dir Qwen/Qwen3-0.6B`"),
        ([str(MODEL), ""], "the prompt is empty; give at least one token"),
        ([str(MODEL), "what?"], "cannot tokenize the text"),
        ([str(MODEL), "1" * 600], "the prompt has 600 tokens and --max-tokens is 256: together they exceed"),
        (
            [str(MODEL), PROMPT, "--max-tokens", "507"],
            "the model's context of 512; shorten the prompt or lower --max-tokens",
        ),
        ([str(MODEL), PROMPT, "--max-tokens", "0"], "max_tokens = 0 must be at least 1"),
        ([str(MODEL), PROMPT, "--top-p", "1.5"], "top_p = 1.5 must be over 0 and at most 1"),
        ([str(MODEL), PROMPT, "--stop", ""], "a tuple of strings that are not empty"),
        ([str(MODEL), PROMPT, "--kernels", "fast"], "kernels = 'fast' must be one of auto, numba, eager"),
    ],
)
def test_the_error_for_an_invalid_request_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    err = refusal(capsys, "generate", *arguments)
    assert message in err
    assert err.count("\n") == 1


def test_the_example_responds_to_every_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLES / "generate.py"))
    example["main"](MODEL, ["12,30:", "07,05:"])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line[:6] for line in lines[::2]) == ["07,05:", "12,30:"]
    assert all(line.startswith("  log-probs ") for line in lines[1::2])
    assert len((EXAMPLES / "generate.py").read_text(encoding="utf-8").splitlines()) <= 40


def test_the_doctor_prints_kernels_threads_versions_and_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor")
    assert code == 0
    names = {line[:16].strip() for line in out.splitlines()}
    assert names >= {
        "dora",
        "python",
        "torch",
        "numpy",
        "numba",
        "engines (cuda)",
        "trainer",
        "torch threads",
    }
    assert "engines (cpu)   numba kernels in float32, eager kernels in bfloat16" in out
    assert "trainer         torch in float32 and bfloat16, on cpu" in out


def test_the_doctor_prints_why_engines_run_eagerly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dora.engine.kernels.numba_kernels", None)
    with pytest.raises(SystemExit):
        main(["doctor"])
    out = capsys.readouterr().out
    assert "eager kernels in float32 and bfloat16, because numba does not work: import of" in out
