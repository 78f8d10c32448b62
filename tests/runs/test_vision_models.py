"""A run whose prompts have images: a random Qwen-VL learns to name colours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from PIL import Image
from tests.model.vision_models import save_tiny_vision
from tests.runs.conftest import StartRun
from tests.runs.other_families import other_family_task
from tests.runtime.running import metrics
from tests.runtime.tiny import CHARACTERS, drop_engine_settings, write_task
from transformers import AutoModelForImageTextToText

from dora.audit import audit, logprob_recheck
from dora.config.load import read_config
from dora.core.types import FIRST_IMAGE_ID
from dora.errors import InputError
from dora.journal.reader import read_responses, read_samples
from dora.runtime.run_setup import RunSetup

REWARD = """
def reward(prompt, completion, colour=None, **row):
    return completion.count((colour or "7")[0]) + len(set(completion)) / 100
"""
SPECIAL_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
OVERRIDES = {
    "engine.backend": "transformers",
    "orchestrator.placement": "static",
    "data.max_prompt_length": "24",
    "sampling.max_response_length": "8",
    "engine.num_engines": "1",
}


def vision_task(folder: Path, kind: str = "qwen3_vl") -> Path:
    """The tiny task with squares of three colours and several sizes, in three prompts of four."""
    rows: list[dict[str, object]] = []
    for i, colour in enumerate(("red", "green", "blue", "red", "green", "blue")):
        Image.new("RGB", (16 + 8 * (i % 3), 16), colour).save(folder / f"{i}.png")
        rows.append({"prompt": "<image>colour:", "images": [f"{i}.png"], "colour": colour})
    rows.append({"prompt": "<image>or<image>:", "images": ["0.png", "1.png"], "colour": "red"})
    rows.append({"prompt": "10:", "images": [], "colour": None})
    path = drop_engine_settings(write_task(folder, REWARD, rows))
    start = folder / "start"
    for old in start.glob("model*"):
        old.unlink()
    tokenizer = tokenizers.Tokenizer.from_file(str(start / "tokenizer.json"))
    tokenizer.add_special_tokens([*SPECIAL_TOKENS])
    tokenizer.save(str(start / "tokenizer.json"))
    first = len(CHARACTERS) + 1
    special = {"vision_start_token_id": first, "image_token_id": first + 1, "vision_end_token_id": first + 2}
    save_tiny_vision(kind, start, first + 3, video_token_id=first + 1, **special)
    return path


def test_a_model_that_reads_images_is_trained_and_audited(tmp_path: Path, start_run: StartRun) -> None:
    settings = {key.replace(".", "__"): value for key, value in OVERRIDES.items()}
    run = start_run(vision_task(tmp_path), run__steps=3, algorithm__filter_groups="false", **settings)
    run.succeed()
    assert audit.check(run.out).findings == ()
    recheck = logprob_recheck.check(run.out, 8)
    assert recheck.findings == []
    assert sum(version.num_samples for version in recheck.versions) == 8
    steps = metrics(run.out)
    assert len(steps) == 3
    assert max(step["mismatch/logprob_abs_diff_max"] for step in steps) < 1e-4

    samples = [*read_samples(run.out).values()]
    images = {
        id for s in read_responses(run.out, samples) if s for id in s.prompt_ids if id >= FIRST_IMAGE_ID
    }
    stored = {int(path.stem, 16) for path in (run.out / "images").glob("*.npy")}
    assert images <= stored
    assert len(images) > 1
    saved = AutoModelForImageTextToText.from_pretrained(run.out / "checkpoints" / "step-3")
    started = AutoModelForImageTextToText.from_pretrained(tmp_path / "start")
    changed = {
        name: not (weight == started.state_dict()[name]).all() for name, weight in saved.state_dict().items()
    }
    assert changed["model.visual.patch_embed.proj.weight"]
    assert changed["lm_head.weight"]
    assert (run.out / "checkpoints" / "step-3" / "preprocessor_config.json").is_file()

    (run.out / "images" / f"{min(images):08x}.npy").unlink()
    assert any(
        f"the image {min(images):08x}, which the run does not have" in x
        for x in audit.check(run.out).findings
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine.backend": "vllm"}, "not supported by engine.backend = vllm: set engine.backend = transf"),
        ({"algorithm.adv_estimator": "gae"}, "not supported by algorithm.adv_estimator = gae"),
        ({"data.max_prompt_length": "9"}, "line 1: the prompt has 13 tokens; must be"),
        ({"data.image_key": "colour"}, "prompts.jsonl, line 1: .*/red does not exist"),
        ({"data.image_key": "none"}, None),
    ],
)
def test_what_images_cannot_be_combined_with_is_rejected_early(
    changes: dict[str, str], message: str | None, tmp_path: Path
) -> None:
    overrides = [f"{key}={value}" for key, value in (OVERRIDES | changes).items()]
    config = read_config(vision_task(tmp_path), overrides)
    if message is None:  # "<image>" is text then
        with pytest.raises(InputError, match="the character '<'"):
            RunSetup.make(config, tmp_path / "run")
        return
    with pytest.raises(InputError, match=message) as raised:
        RunSetup.make(config, tmp_path / "run")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "colour:", "images": ["0.png"]},
            "line 1: the prompt has 0 places for images, and",
        ),
        ({"prompt": "<image>:", "images": ["7.png"]}, r"line 1: .*7\.png does not exist; correct the path"),
        ({"prompt": "<|image_pad|>:", "images": []}, "line 1: the prompt has 1 places for images"),
    ],
)
def test_a_row_whose_images_do_not_fit_its_prompt_is_named(
    row: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = vision_task(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    config = read_config(path, [f"{key}={value}" for key, value in OVERRIDES.items()])
    with pytest.raises(InputError, match=message):
        RunSetup.make(config, tmp_path / "run")


def test_a_model_of_text_takes_no_images(tmp_path: Path) -> None:
    path = other_family_task(tmp_path)
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1", "images": ["a.png"]}) + "\n")
    config = read_config(path, [f"{key}={value}" for key, value in OVERRIDES.items()])
    with pytest.raises(InputError, match="line 1: the row has images, and the model reads text only; use"):
        RunSetup.make(config, tmp_path / "run")
