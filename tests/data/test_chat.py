"""Prompts and observations are encoded with the chat template of the model, or as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.tokenizer import CHAT_TEMPLATE, Tokenizer, save_bpe_tokenizer, save_character_tokenizer
from dora.errors import ConfigError, DataError, ModelError

QUESTION = "How many are 6 x 7, in €?"
THINKING = """\
{%- macro thoughts() %}{{ empty_thoughts | default('<think></think>') }}{% endmacro %}
{%- set tools = tools or [] %}{% set ns = namespace(last=0) %}
{%- for message in messages %}{% if message['role'] == 'x' %}{% continue %}{% endif %}
{%- generation %}{{ bos_token }}{{ message['content'] }}{% endgeneration %}{% endfor %}
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{%- if add_generation_prompt and not enable_thinking %}{{ thoughts() }}{% endif %}
{%- set mode = 'fixed' %}{{ mode }}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with a chat template, in a folder that transformers accepts as a model's."""
    save_bpe_tokenizer(tmp_path, [QUESTION] * 4, 300)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return tmp_path


def test_a_text_becomes_a_message_of_the_user_and_the_assistant_starts(folder: Path) -> None:
    assert ChatTemplate(folder).render(QUESTION) == (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_prompt_comes_first_unless_the_conversation_has_its_own(folder: Path) -> None:
    template = ChatTemplate(folder, "Be brief.")
    assert template.render(QUESTION).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": QUESTION}]
    assert "Be brief." not in template.render(own)


def test_the_ids_equal_those_of_transformers(folder: Path) -> None:
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "Why?"},
    ]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert PromptEncoder(Tokenizer(folder), ChatTemplate(folder)).encode(messages) == theirs


def test_start_tokens_of_the_tokenizer_are_not_added_to_a_template(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    begin = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    raw["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {"<|im_start|>": begin},
    }  # fmt: skip
    path.write_text(json.dumps(raw))
    tokenizer = Tokenizer(folder)
    assert PromptEncoder(tokenizer).encode("a")[0] == 1
    with_template = PromptEncoder(tokenizer, ChatTemplate(folder)).encode("a")
    assert with_template.count(1) == 2  # of the user and of the assistant


def test_without_a_template_text_is_encoded_and_a_conversation_is_refused(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert PromptEncoder(tokenizer).encode(QUESTION) == tokenizer.encode(QUESTION)
    assert tokenizer.decode(tokenizer.encode(QUESTION)) == QUESTION
    with pytest.raises(DataError, match=r"is a conversation; set data.chat_template = true"):
        PromptEncoder(tokenizer).encode([{"role": "user", "content": QUESTION}])


def test_a_prompt_that_the_template_refuses_is_reported(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    refusing = "{{ raise_exception('no system\\nrole') }}" + CHAT_TEMPLATE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": refusing}))
    with pytest.raises(DataError, match="refuses the prompt: no system role; correct the prompt, or"):
        ChatTemplate(folder).render(QUESTION)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, "abc")
    with pytest.raises(ModelError, match=r"has no chat template; set data.chat_template = false"):
        ChatTemplate(tmp_path)


def test_a_tokenizer_that_transformers_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="transformers cannot read the tokenizer of"):
        ChatTemplate(tmp_path)


def test_missing_transformers_are_named_with_their_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"needs transformers; run pip install 'dora-rl\[data\]'"):
        ChatTemplate(folder)


def test_turns_and_observations_have_the_ids_of_the_whole_conversation(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    encoder = PromptEncoder(tokenizer, ChatTemplate(folder, "Be brief."))
    turn = [*tokenizer.encode("6 x 7"), tokenizer.eos_id]
    episode = [*encoder.encode(QUESTION), *turn, *encoder.encode_observation("42", turn)]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "6 x 7"},
        {"role": "user", "content": "42"},
    ]
    assert episode == encoder.encode(messages)


@pytest.mark.parametrize("observation", ["(an answer of the assistant)", "(answer 0) and (answer 1)"])
def test_the_whole_observation_is_rendered(folder: Path, observation: str) -> None:
    template = ChatTemplate(folder)
    assert observation in template.render_observation(observation)
    assert template.render_observation(f"{observation} ?").replace(" ?", "") == template.render_observation(
        observation
    )


def test_a_truncated_turn_gets_its_end_token(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    encoder = PromptEncoder(tokenizer, ChatTemplate(folder))
    turn = tokenizer.encode("6 x")
    observation = [{"role": "tool", "content": "what?"}]
    assert encoder.encode_observation(observation, turn)[0] == tokenizer.eos_id
    assert encoder.encode_observation(observation, [*turn, tokenizer.eos_id])[0] != tokenizer.eos_id


def test_without_a_template_an_observation_is_encoded_as_it_is(tmp_path: Path) -> None:
    save_character_tokenizer(tmp_path, "0123456789")
    encoder = PromptEncoder(Tokenizer(tmp_path))
    assert encoder.encode_observation("42", [1]) == [4, 2]
    with pytest.raises(DataError, match=r"the observation has messages; set data\.chat_template = true"):
        encoder.encode_observation([{"role": "user", "content": "42"}], [1])


def test_a_template_that_drops_earlier_answers_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(DataError, match="the chat template leaves out earlier answers"):
        ChatTemplate(folder).render_observation("42")


def write_thinking(folder: Path, template: str = THINKING) -> Path:
    """The tokenizer with a template that has the variables `enable_thinking` and `empty_thoughts`."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": template, "bos_token": "<|im_start|>"}
    path.write_text(json.dumps(config))
    return folder


def test_variables_reach_prompts_and_observations(folder: Path) -> None:
    default = ChatTemplate(write_thinking(folder))
    chosen = ChatTemplate(folder, variables={"enable_thinking": False, "empty_thoughts": "<no>"})
    assert default.render("a") == "<|im_start|>afixed"
    assert chosen.render("a") == "<|im_start|>a<no>fixed"
    assert chosen.render_observation("b") == "<|im_start|>b<no>fixed"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "tokenize", "documents", "conversation", "bos_token"],
)
def test_a_variable_that_is_set_already_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"chat_template_kwargs\.{name} = 0: DORA-RL and the tokenizer set"
    ):
        ChatTemplate(write_thinking(folder), variables={name: 0})


@pytest.mark.parametrize("name", ["enable_thinkng", "mode", "ns", "message", "namespace", "raise_exception"])
def test_a_variable_that_the_template_does_not_use_is_refused(folder: Path, name: str) -> None:
    reason = rf"does not use {name}; remove it, .*: empty_thoughts, enable_thinking$"
    with pytest.raises(ConfigError, match=reason):
        ChatTemplate(write_thinking(folder), variables={"enable_thinking": False, name: 0})


def test_a_variable_of_one_of_several_templates_is_used(folder: Path) -> None:
    named = {"default": "{{ messages[0].content }}{{ mood }}", "tool_use": "{{ budget }}"}
    templates = [{"name": name, "template": template} for name, template in named.items()]
    write_thinking(folder, templates)  # type: ignore[arg-type]
    assert ChatTemplate(folder, variables={"mood": "!", "budget": 1}).render("a") == "a!"


def test_a_template_that_cannot_be_parsed_is_refused_with_its_prompt(folder: Path) -> None:
    template = ChatTemplate(write_thinking(folder, "{% if %}"), variables={"enable_thinking": False})
    with pytest.raises(DataError, match="the chat template refuses the prompt"):
        template.render("a")
