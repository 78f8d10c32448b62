"""A process in which environments are played, and what it is told and tells.

It has one thread for all of them; what it says of an episode is a word of `dora.envs.host`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dora.envs.base import Environment
from dora.envs.host import Host, Language, Rules, Word
from dora.runtime.messages import Ready
from dora.runtime.players import Episode
from dora.runtime.process import Inbox, Outbox


@dataclass(frozen=True)
class EnvSpec:
    """Environments of the class named, or those of `hosts`; the model folder whose tokenizer they speak.

    `token` is what hosts are shown; `template`, whether they speak in the model's chat template, then with
    a `system_prompt`.
    """

    environment: str | None
    hosts: tuple[str, ...]
    token: str
    rules: Rules
    model: Path
    template: bool
    system_prompt: str | None


@dataclass(frozen=True)
class Begin:
    """Reset an environment to a row of the dataset."""

    episode: Episode
    row: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Step:
    """Have the environment of an episode answer a turn; `num_left` tokens may follow it."""

    episode: Episode
    token_ids: list[int]
    num_left: int


@dataclass(frozen=True)
class Forget:
    """Nobody waits for this episode any more."""

    episode: Episode


@dataclass(frozen=True)
class Saying:
    """What is to be said of an episode."""

    episode: Episode
    word: Word


@dataclass(frozen=True)
class PassedOver:
    """One of `hosts` could not be reached, and another one was tried."""

    host: str
    reason: str


def run_environments(outbox: Outbox, inbox: Inbox, spec: EnvSpec) -> None:
    """Play episodes on order until the process ends. Raises EnvError if they cannot be loaded."""
    make = _make_environments(spec, lambda host, reason: outbox.send(PassedOver(host, reason)))
    language = _language(spec)
    outbox.send(Ready())
    asyncio.run(_play(outbox, inbox, make, spec.rules, language))


async def _play(
    outbox: Outbox, inbox: Inbox, make: Callable[[], Environment], rules: Rules, language: Language
) -> None:
    host = Host(make, rules, language, lambda episode, word: outbox.send(Saying(episode, word)))
    while True:
        for message in await asyncio.to_thread(lambda: list(inbox.take(None))):
            match message:
                case Begin(episode, row, seed):
                    host.begin(episode, row, seed)
                case Step(episode, token_ids, num_left):
                    host.take_turn(episode, token_ids, num_left)
                case Forget(episode):
                    host.forget(episode)


def _make_environments(spec: EnvSpec, pass_over: Callable[[str, str], None]) -> Callable[[], Environment]:
    """What makes environments; those of several hosts go round, so that each gets its share.

    `pass_over` gets a host that cannot be reached, and why.
    """
    if spec.environment is not None:
        from dora.envs.base import load_environment

        return load_environment(spec.environment)
    from dora.envs.remote import RemoteEnvironment

    hosts, turns = spec.hosts, count()

    def make() -> Environment:
        first = next(turns) % len(hosts)
        rotated = [*hosts[first:], *hosts[:first]]
        return RemoteEnvironment(rotated, spec.token, spec.rules.timeout_s / 2, pass_over)

    return make


def _language(spec: EnvSpec) -> Language:
    from dora.data.chat import ChatTemplate, PromptEncoder
    from dora.data.tokenizer import Tokenizer

    tokenizer = Tokenizer(spec.model)
    encoder = PromptEncoder(
        tokenizer, ChatTemplate(spec.model, spec.system_prompt) if spec.template else None
    )
    return Language(encoder.encode, encoder.encode_next, tokenizer.decode)
