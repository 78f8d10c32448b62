"""Training of causal language models that transformers computes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from tests.model.families import CONFIGS, random_weights
from tests.model.transformers_families import FAMILIES, save_tiny
from tests.trainer.batches import CPU, at_the_end, first_moment
from tests.trainer.batches import samples as tiny_samples
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM, PreTrainedModel

from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained, save_pretrained
from dora.model.weights import WeightLayout
from dora.trainer.critic import Critic, CriticSettings, initial_critic_weights, value_layout
from dora.trainer.lora import LoraSettings, peft_files
from dora.trainer.packing import pack
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.sft import train_sft
from dora.trainer.trainer import Trainer
from dora.trainer.transformers_policy import TransformersPolicy

SETTINGS = TrainerSettings(
    lr=0.0,
    num_steps=1,
    warmup_steps=0,
    max_grad_norm=1e9,
    micro_batch_tokens=64,
    temperature=0.7,
    logits_chunk_tokens=5,
)
TOLERANCE = 1e-4
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def sequence_logprobs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """Log-probs of one response by transformers' own forward pass of the one sequence."""
    tokens = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    logits = model(tokens, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / SETTINGS.temperature, -1)
    return logprobs.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def samples(model: PreTrainedModel) -> list[Sample]:
    """Responses of 1 to 20 tokens, two to each prompt, with this model's log-probs."""
    source, batch = random.Random(0), []
    for i in range(8):
        if i % 2 == 0:
            prompt = [source.randrange(40) for _ in range(source.randint(1, 6))]
        response = [source.randrange(40) for _ in range(source.randint(1, 20))]
        sample = Sample(prompt, response, [], source.choice([-1.0, 0.5, 2.0]))
        batch.append(replace(sample, logprobs=sequence_logprobs(model, sample).tolist()))
    return batch


def check_gradient(trainer: Trainer, model: nn.Module, config: ModelConfig) -> set[str]:
    """The first step had the gradient of the model. Returns the names of the parameters that have one."""
    own = WeightLayout(config).views(first_moment(trainer) / (1.0 - SETTINGS.betas[0]))
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(x.abs().max()) for x in expected.values())
    errors = {name: float((own[name] - x).abs().max()) / largest for name, x in expected.items()}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])
    assert all(not view.any() for name, view in own.items() if name not in expected)
    return {*expected}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_of_a_step_is_that_of_transformers_per_sequence(
    folder: Path, *, checkpointing: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = samples(model)
    config, flat = load_pretrained(folder)
    trainer = Trainer(config, flat, replace(SETTINGS, activation_checkpointing=checkpointing))
    trainer.step(batch)

    num_tokens = sum(len(s.token_ids) for s in batch)
    for sample in batch:
        (-sample.advantages[0] * sequence_logprobs(model, sample).sum() / num_tokens).backward()
    check_gradient(trainer, model, config)


def test_checkpointed_layers_are_computed_again_in_the_backward_pass(tmp_path: Path) -> None:
    config, flat = load_pretrained(save_tiny("gemma3_text", tmp_path))
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    for num_passes in (1, 2):
        weights = {k: x.requires_grad_() for k, x in WeightLayout(config).views(flat.clone()).items()}
        policy = TransformersPolicy(config, weights, activation_checkpointing=num_passes == 2)
        num_calls = 0
        with register_module_forward_hook(lambda module, *_: count() if is_mlp(module) else None):
            torch.autograd.backward(policy.logprobs(pack([[1, 2]], [[3, 4]], CPU))[0].sum())
        assert num_calls == num_passes * config.num_hidden_layers


def is_mlp(module: nn.Module) -> bool:
    return type(module).__name__.endswith("MLP")


def test_a_saved_model_is_loaded_with_the_same_bits_under_the_names_of_the_hub(
    folder: Path, tmp_path: Path
) -> None:
    config, flat = load_pretrained(folder)
    save_pretrained(tmp_path / "saved", config, flat)
    again, loaded = load_pretrained(tmp_path / "saved")
    assert again == config
    assert torch.equal(loaded, flat)
    names = [{*load_file(path / "model.safetensors")} for path in (folder, tmp_path / "saved")]
    assert names[0] == names[1]


def test_a_model_in_bfloat16_gets_gradients_in_fp32(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = samples(model)
    config, flat = load_pretrained(folder)
    gradients = []
    for dtype in ("float32", "bfloat16"):
        trainer = Trainer(config, flat.clone(), replace(SETTINGS, dtype=dtype))
        trainer.step(batch)
        gradients.append(first_moment(trainer))
    assert gradients[1].dtype == torch.float32
    assert torch.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.8
    assert not torch.equal(gradients[0], gradients[1])


def test_adapters_of_all_linear_layers_are_trained_and_saved_as_peft_names_them(folder: Path) -> None:
    batch = samples(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    config, flat = load_pretrained(folder)
    before, views = WeightLayout(config).views(flat.clone()), WeightLayout(config).views(flat)
    lora = LoraSettings(rank=2, alpha=4.0, targets=config.linear_names)
    trainer = Trainer(config, flat, replace(SETTINGS, lr=1e-2, lora=lora))
    trainer.step(batch)
    content = peft_files(config, lora, trainer.state_dict()["optimizer"]["adapters"], "")[ADAPTER]
    assert isinstance(content, bytes)
    factors = load(content)
    modules = {name.partition(".lora_")[0] for name in factors}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert modules == {
        f"base_model.model.{name}"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name != "lm_head"
    }
    for name, merged in views.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = before[name]
        if module in modules:
            b, a = (factors[f"{module}.lora_{factor}.weight"] for factor in "BA")
            expected = expected + 2.0 * b @ a
            assert not torch.equal(merged, before[name])
        torch.testing.assert_close(merged, expected)


def test_a_critic_reads_values_from_the_hidden_states_and_learns_the_returns(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, flat = load_pretrained(folder)
    settings = CriticSettings(lr=1e-2, num_steps=8, micro_batch_tokens=64, lr_decay="constant")
    critic = Critic(config, initial_critic_weights(config, flat), settings)
    head = value_layout(config).views(critic.flat)["score.weight"].fill_(0.1)
    batch = samples(model)
    for sample, predicted in zip(batch, critic.predict_values(batch), strict=True):
        tokens = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
        outputs = next(model.children())(tokens, use_cache=False)  # without the head
        hidden = outputs.last_hidden_state[0, len(sample.prompt_ids) - 1 : -1]
        assert predicted.values == pytest.approx((hidden @ head[0]).tolist(), abs=1e-4)
    losses = []
    for step in range(8):
        critic.compute_advantages(*at_the_end(batch, [float(s.token_ids[0] < 20) for s in batch]))
        losses.append(critic.update(step)["critic/vf_loss"])
    assert losses[-1] < 0.5 * losses[0]


def test_supervised_steps_lower_the_loss(folder: Path) -> None:
    config, flat = load_pretrained(folder)
    examples = [([1, 2, 3], [4, 5, 6, 7]), ([2, 1], [4, 5])]
    losses = [*train_sft(config, flat, repeat(examples), num_steps=3, lr=1e-3, warmup_steps=0)]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("family", ["llama-biased", "qwen2-untied", "qwen3", "qwen3_moe", "qwen3_moe-mixed"])
def test_both_implementations_of_an_own_family_train_to_the_same_curve(family: str) -> None:
    config, curves = CONFIGS[family], []
    for implementation in ("dora", "transformers"):
        settings = replace(SETTINGS, lr=1e-2, num_steps=6, lr_decay="constant", temperature=1.0)
        trainer = Trainer(config, random_weights(config), replace(settings, model=implementation))
        curves.append([trainer.step(tiny_samples()) for _ in range(6)])
    keys = ("actor/grad_norm", "actor/pg_loss", "actor/entropy")
    own, foreign = ([[step[key] for key in keys] for step in curve] for curve in curves)
    assert torch.allclose(torch.tensor(own), torch.tensor(foreign), rtol=1e-3, atol=1e-4)
    assert own[0] != own[-1]
