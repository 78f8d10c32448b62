"""Prompts to token ids, with or without the chat template of the model's tokenizer.

transformers renders the template, because only it has all functions that templates call.
"""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.data.dataset import Messages, Prompt
from dora.data.images import IMAGE, ImageReader, ImageSource
from dora.data.tokenizer import Tokenizer
from dora.data.tool_calls import Parser, Tool, parser_of
from dora.errors import ConfigError, DataError, ModelError

Turns = Mapping[int, Sequence[int]]  # index of a message -> token ids that the model sampled for it
NO_TURNS: Turns = {}
NO_VARIABLES: Mapping[str, Any] = {}
_FUNCTIONS = {"raise_exception", "strftime_now"}  # that transformers adds for templates, as the next
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


class PromptEncoder:
    """Encodes prompts and observations for one model. `template` None: text is encoded as it is.

    `images` reads those of prompts, if the model does.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None, images: ImageReader | None = None
    ) -> None:
        self._tokenizer, self._template, self.images = tokenizer, template, images

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def num_tokens(self, prompt: Prompt, images: Sequence[ImageSource]) -> int:
        """Tokens of a prompt with images. Raises DataError as `encode_with_images`, or for a bad image."""
        if not images or self.images is None:
            return len(self.encode_with_images(prompt, [[]] * len(images)))
        return len(self.encode_with_images(prompt, [[0] * self.images.num_tokens(x) for x in images]))

    def encode_with_images(self, prompt: Prompt, images: Sequence[Sequence[int]]) -> list[int]:
        """Token ids of a prompt in whose text IMAGE stands for each of the `images`, given as token ids.

        Raises DataError if it cannot be tokenized, or its text has not one IMAGE for each image.
        """
        if self.images is None:
            if images:
                raise DataError(
                    "the row has images, and the model reads text only; use a model of Qwen-VL, or name "
                    "another column with data.image_key"
                )
            return self.encode(prompt)
        ids = self.encode(_with_image_placeholders(prompt, self.images.placeholder) if images else prompt)
        if (num := ids.count(self.images.token_id)) != len(images):
            raise DataError(
                f"the prompt has {num} places for images, and the row has {len(images)} of them; write "
                f"{IMAGE} where each belongs"
            )
        given = iter(images)
        parts = (next(given) if id == self.images.token_id else (id,) for id in ids)
        return [id for part in parts for id in part]

    def encode(self, prompt: Prompt, tools: Sequence[Tool] = (), turns: Turns = NO_TURNS) -> list[int]:
        """Token ids of a prompt with the tools that the model may call.

        `turns` are the messages that the model has generated, by index: they have the tokens that were
        sampled. Raises DataError if it cannot be tokenized, or the template shows the model no tools.
        """
        if tools and self.tool_parser is None:
            raise DataError(
                "the model's chat template describes no tool calls that DORA-RL can parse; leave tools out, "
                "or set data.chat_template = true with a model whose template does"
            )
        if self._template is not None:
            # The template writes the special tokens at the start of a sequence itself.
            messages, names = _with_placeholders(prompt, turns)
            return self._splice(self._template.render(messages, tools), names, add_special_tokens=False)
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if turns:
            text, names = _joined_with_placeholders(prompt, turns)
            return self._splice(text, names)
        raise DataError("the prompt is a conversation; set data.chat_template = true")

    @property
    def tool_parser(self) -> Parser | None:
        """Finds the tool calls in the text of a turn; None if the model's template has none."""
        return None if self._template is None else self._template.tool_parser

    def encode_observation(
        self, observation: Prompt, turn_ids: Sequence[int], turns: Turns = NO_TURNS
    ) -> list[int]:
        """Token ids of an observation, between the model's turn `turn_ids` and its next one.

        A first token in which the template repeats the last one of the turn (its end) is dropped.
        `turns` as in `encode`. Raises DataError if it cannot be tokenized.
        """
        if self._template is None:
            if isinstance(observation, str):
                return self._tokenizer.encode(observation, add_special_tokens=False)
            if not turns:
                raise DataError("the observation has messages; set data.chat_template = true")
            text, names = _joined_with_placeholders(observation, turns)
        else:
            messages, names = _with_placeholders(observation, turns)
            text = self._template.render_observation(messages)
        return self._without_end(self._splice(text, names, add_special_tokens=False), turn_ids)

    def _splice(
        self, text: str, names: Mapping[str, Sequence[int]], add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text in which each placeholder of `names` stands for a turn's tokens."""
        ids: list[int] = []
        turn_ids: Sequence[int] = ()
        for name, next_ids in [*names.items(), ("", ())]:
            part, found, text = text.partition(name) if name else (text, "", "")
            if name and not found:
                raise DataError("the chat template leaves out earlier answers, so histories cannot change")
            part_ids = self._tokenizer.encode(part, add_special_tokens=add_special_tokens) if part else []
            ids += self._without_end(part_ids, turn_ids) if turn_ids else part_ids
            ids += next_ids
            turn_ids, add_special_tokens = next_ids, False
        return ids

    def _without_end(self, ids: list[int], turn_ids: Sequence[int]) -> list[int]:
        """The tokens after a turn, without a first one in which the template repeats the end of the turn."""
        return ids[1:] if self._template and ids and ids[0] == turn_ids[-1] else ids


class ChatTemplate:
    """The chat template of a model folder, up to the start of the assistant's answer."""

    def __init__(
        self, folder: Path, system_prompt: str | None = None, variables: Mapping[str, Any] = NO_VARIABLES
    ) -> None:
        """`variables` are set in every rendering of the template.

        Raises ModelError if the folder has no template or transformers is not installed, and ConfigError for
        variables that the template does not use, or that are set already.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ModelError(
                "data.chat_template = true needs transformers; run pip install 'dora-rl[data]'"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many types
            reason = " ".join(str(error).split())
            raise ModelError(
                f"transformers cannot read the tokenizer of {folder}: {reason}; copy or save it again"
            ) from error
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"{folder}: its tokenizer has no chat template; set data.chat_template = false, or add "
                "chat_template.jinja"
            )
        self.tool_parser = parser_of(str(self._tokenizer.chat_template))
        self._variables = variables
        if variables:
            self._check_variables(folder)
        self._system: list[Mapping[str, str]] = []
        if system_prompt is not None:
            self._system = [{"role": "system", "content": system_prompt}]

    def _check_variables(self, folder: Path) -> None:
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        reserved = {"messages", *parameters, *self._tokenizer.special_tokens_map}
        used = _undeclared_variables(self._tokenizer.chat_template)
        for name, value in self._variables.items():
            problem = f"chat_template_kwargs.{name} = {value!r}: "
            if name in reserved:
                raise ConfigError(f"{problem}DORA-RL and the tokenizer set {name} themselves; remove it")
            if used is not None and name not in used:
                names = ", ".join(sorted(used - reserved)) or "none"
                raise ConfigError(
                    f"{problem}the chat template of {folder} does not use {name}; remove it, or set another "
                    f"variable of the template: {names}"
                )

    def render(self, prompt: Prompt, tools: Sequence[Tool] = ()) -> str:
        """The conversation as text, after a description of the tools; text becomes a message of the user.

        Raises DataError if the template refuses it.
        """
        messages = _messages(prompt)
        if messages[0]["role"] != "system":
            messages = [*self._system, *messages]
        return self._render(messages, tools)

    def render_observation(self, observation: Prompt) -> str:
        """The text after an answer of the assistant: its end, the observation, the start of the next answer.

        Text becomes a message of the user. Raises DataError as `render`.
        """
        answer = f"(answer {secrets.token_hex(8)})"  # a placeholder: the text after it is the same for any
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        _, found, after = self._render([*before, *_messages(observation)]).partition(answer)
        if not found:
            raise DataError("the chat template leaves out earlier answers, so episodes cannot have turns")
        return after

    def _render(self, messages: Messages, tools: Sequence[Tool] = ()) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._variables,
            )
        except Exception as error:  # templates raise any type
            reason = " ".join(str(error).split())
            raise DataError(
                f"the chat template refuses the prompt: {reason}; correct the prompt, or the template in the "
                "model's folder"
            ) from error
        return text


def _undeclared_variables(template: str | Mapping[str, str]) -> set[str] | None:
    """The variables that a template, or one of several, does not set itself; None if it cannot be parsed."""
    import jinja2.meta

    text = template if isinstance(template, str) else "\n".join(template.values())
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION_TAG.sub("", text))
    except jinja2.TemplateSyntaxError:
        return None
    return jinja2.meta.find_undeclared_variables(parsed) - environment.globals.keys() - _FUNCTIONS


def _with_image_placeholders(prompt: Prompt, placeholder: str) -> Prompt:
    """The prompt with the model's placeholder in place of IMAGE."""
    if isinstance(prompt, str):
        return prompt.replace(IMAGE, placeholder)
    return [{**message, "content": message["content"].replace(IMAGE, placeholder)} for message in prompt]


def _with_placeholders(prompt: Prompt, turns: Turns) -> tuple[Prompt, dict[str, Sequence[int]]]:
    """The messages with a placeholder for each turn, and the token ids of the turns by placeholder."""
    if not turns:
        return prompt, {}
    names = {i: f"(answer {secrets.token_hex(8)})" for i in sorted(turns)}
    messages = [
        {"role": message["role"], "content": names[i]} if i in names else message
        for i, message in enumerate(_messages(prompt))
    ]
    return messages, {name: turns[i] for i, name in names.items()}


def _joined_with_placeholders(prompt: Prompt, turns: Turns) -> tuple[str, dict[str, Sequence[int]]]:
    """As `_with_placeholders`, the contents joined."""
    messages, names = _with_placeholders(prompt, turns)
    return "".join(message["content"] for message in _messages(messages)), names


def _messages(prompt: Prompt) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
