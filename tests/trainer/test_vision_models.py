"""Training of models that read images, and their engine, against transformers' own forward pass."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.vision_models import (
    END_TOKEN,
    IMAGE_TOKEN,
    START_TOKEN,
    VISION,
    random_image,
    save_tiny_vision,
)
from tests.trainer.test_transformers_policy import check_gradient
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from dora.core.types import FIRST_IMAGE_ID, GroupId, RequestId
from dora.engine.backends.transformers_engine import Transformers
from dora.engine.request import EngineError, Request, SamplingParams
from dora.model.config import TransformersConfig
from dora.model.images import ImageFolder, Pixels, patch_grid, to_patches
from dora.model.pretrained import load_pretrained, save_pretrained
from dora.model.weights import WeightLayout
from dora.trainer.checkpoint import copy_tokenizer
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.lora import LoraSettings
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.trainer import Trainer

SETTINGS = TrainerSettings(
    lr=0.0, num_steps=1, warmup_steps=0, max_grad_norm=1e9, micro_batch_tokens=256, temperature=0.7
)
IMAGES = {"small": random_image(1, 2, 0), "square": random_image(2, 2, 1), "wide": random_image(2, 5, 2)}


@pytest.fixture(scope="module", params=VISION)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Pixels]:
    """The images by id."""
    store = ImageFolder(tmp_path_factory.getbasetemp() / "images")
    return {store.add(pixels): pixels for pixels in IMAGES.values()}


@pytest.fixture(scope="module")
def stored(images: dict[int, Pixels], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "images"


def image_tokens(id: int, pixels: Pixels) -> list[int]:
    return [START_TOKEN, *[id] * (pixels.shape[0] * pixels.shape[1] // 64), END_TOKEN]


def prompts(images: Mapping[int, Pixels]) -> list[list[int]]:
    """Text alone, an image, two images, the same image twice."""
    small, square, wide = ([*image_tokens(id, pixels)] for id, pixels in images.items())
    return [[1, 2, 3], [4, *wide, 5], [*small, 6, *square], [*square, 7, 8, *square]]


def plain_logprobs(model: Any, sample: Sample, images: Mapping[int, Pixels], config: Any) -> Tensor:
    """Log-probs of one response by transformers' own forward pass of the one sequence."""
    runs = [id for id, _ in groupby(sample.prompt_ids) if id >= FIRST_IMAGE_ID]
    tokens = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    is_image = tokens >= FIRST_IMAGE_ID
    given: dict[str, Any] = {"mm_token_type_ids": is_image.int()}
    if runs:
        given["pixel_values"] = torch.cat([to_patches(images[id], config.vision) for id in runs])
        given["image_grid_thw"] = torch.tensor([patch_grid(images[id], config.vision) for id in runs])
    model.model.rope_deltas = None
    logits = model(tokens.masked_fill(is_image, IMAGE_TOKEN), use_cache=False, **given).logits
    logprobs = torch.log_softmax(logits[0, len(sample.prompt_ids) - 1 : -1] / SETTINGS.temperature, -1)
    return logprobs.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def batch_of(images: Mapping[int, Pixels], logprobs: Any) -> list[Sample]:
    """Two responses of 1 to 12 tokens to each prompt."""
    source, batch = random.Random(0), []
    for prompt in prompts(images):
        for _ in range(2):
            response = [source.randrange(IMAGE_TOKEN) for _ in range(source.randint(1, 12))]
            sample = Sample(prompt, response, [], source.choice([-1.0, 0.5, 2.0]))
            batch.append(replace(sample, logprobs=logprobs(sample).tolist()))
    return batch


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_a_step_is_that_of_transformers_per_sequence(
    folder: Path, images: dict[int, Pixels], stored: Path, *, checkpointing: bool
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    config, flat = load_pretrained(folder)
    batch = batch_of(images, lambda sample: plain_logprobs(model, sample, images, config))
    settings = replace(SETTINGS, images=stored, activation_checkpointing=checkpointing)
    trainer = Trainer(config, flat, settings)
    trainer.step(batch)

    num_tokens = sum(len(s.token_ids) for s in batch)
    for sample in batch:
        logprobs = plain_logprobs(model, sample, images, config)
        (-sample.advantages[0] * logprobs.sum() / num_tokens).backward()
    assert any(".visual." in name for name in check_gradient(trainer, model, config))


def test_adapters_of_all_linear_layers_are_trained(
    folder: Path, images: dict[int, Pixels], stored: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    config, flat = load_pretrained(folder)
    batch = batch_of(images, lambda sample: plain_logprobs(model, sample, images, config))
    before, after = WeightLayout(config).views(flat.clone()), WeightLayout(config).views(flat)
    lora = LoraSettings(rank=2, alpha=4.0, targets=config.linear_names)
    Trainer(config, flat, replace(SETTINGS, lr=1e-2, lora=lora, images=stored)).step(batch)
    linears = {name for name, x in model.named_modules() if type(x) is nn.Linear and name != "lm_head"}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in linears}


def make_engine(folder: Path, stored: Path | None) -> Transformers:
    return Transformers(
        model=str(folder),
        max_rows=8,
        max_context=64,
        version_slots=1,
        device="cpu",
        dtype="float32",
        images=stored,
    )


def requests(prompts: Sequence[Sequence[int]]) -> list[Request]:
    sampling = SamplingParams(temperature=SETTINGS.temperature, max_tokens=16)
    return [
        Request(RequestId(0, 0, i), GroupId(0, 0), tuple(prompt), 0, i, sampling)
        for i, prompt in enumerate(prompts)
    ]


def test_log_probs_of_engine_and_trainer_agree(folder: Path, images: dict[int, Pixels], stored: Path) -> None:
    config, flat = load_pretrained(folder)
    engine = make_engine(folder, stored)
    engine.load(0, flat)
    engine.submit(requests(prompts(images)))
    outputs = [completion for _ in range(16) for completion in engine.step()]
    samples = [Sample(c.prompt_ids.tolist(), c.token_ids.tolist(), c.logprobs.tolist(), 0.0) for c in outputs]
    trainer = GroupLogprobs(config, replace(SETTINGS, images=stored), "cpu")
    trainer.load_weights(flat)
    assert len(samples) == 4
    for sample, logprobs in zip(samples, trainer(samples), strict=True):
        assert torch.allclose(torch.tensor(sample.logprobs), logprobs, rtol=0.0, atol=1e-4)


def test_a_sampled_placeholder_of_an_image_is_text(
    folder: Path, images: dict[int, Pixels], stored: Path
) -> None:
    config, flat = load_pretrained(folder)
    trainer = GroupLogprobs(config, replace(SETTINGS, images=stored), "cpu")
    trainer.load_weights(flat)
    prompt = prompts(images)[1]
    with_one, without = trainer(
        [Sample(prompt, [3, token, 4], [], 0.0) for token in (IMAGE_TOKEN, END_TOKEN)]
    )
    assert with_one[0] == pytest.approx(float(without[0]), abs=1e-5)
    assert with_one[2] != pytest.approx(float(without[2]), abs=1e-3)


def test_other_pixels_give_other_log_probs(folder: Path, images: dict[int, Pixels], tmp_path: Path) -> None:
    config, flat = load_pretrained(folder)
    store, found = ImageFolder(tmp_path), []
    for seed in (1, 2):
        trainer = GroupLogprobs(config, replace(SETTINGS, images=tmp_path), "cpu")
        trainer.load_weights(flat)
        pixels = random_image(2, 2, seed)
        found += trainer([Sample([*image_tokens(store.add(pixels), pixels), 1], [2, 3], [], 0.0)])
    assert (found[0] - found[1]).abs().min() > 1e-3


def test_an_image_that_is_not_stored_is_rejected(folder: Path, tmp_path: Path) -> None:
    for stored, message in ((tmp_path, "has the image 40000005, which .* lacks"), (None, "no folder of")):
        engine = make_engine(folder, stored)
        engine.load(0, load_pretrained(folder)[1])
        with pytest.raises(EngineError, match=message):
            engine.submit(requests([[START_TOKEN, FIRST_IMAGE_ID + 5, END_TOKEN]]))


def test_a_saved_model_is_loaded_with_the_same_bits_and_reads_images_alike(
    folder: Path, tmp_path: Path
) -> None:
    config, flat = load_pretrained(folder)
    assert isinstance(config, TransformersConfig)
    assert config.vision is not None
    save_pretrained(tmp_path, config, flat)
    copy_tokenizer(folder, tmp_path)
    again, loaded = load_pretrained(tmp_path)
    assert again == config
    assert torch.equal(loaded, flat)
