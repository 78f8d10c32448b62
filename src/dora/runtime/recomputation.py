"""Log-probs of recorded answers, computed again with the weights that drew them.

In exact mode by the engine's own steps, and so to the last bit; else by the trainer's decoder in fp32,
which rounds otherwise than an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dora.config import Config
from dora.engine.exact import Scorer
from dora.engine.sequence import EngineError
from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.observe.samples import Answer, SampleRow
from dora.runtime.plan import GREEDY
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.routes import replay


class Allowed(NamedTuple):
    """The gaps of log-probs in one sample that rounding explains."""

    largest: float
    mean: float


EXACT = Allowed(0.0, 0.0)
# At temperature 1; a lower one makes gaps larger. Measured on random models of up to 28 layers: at most
# 4e-5, mean 6e-6 in fp32, and 0.6, mean 0.08 in bf16, where engines round activations, too.
ROUNDED = {"float32": Allowed(5e-4, 1e-4), "bfloat16": Allowed(2.0, 0.3)}


class Recomputation:
    """Computes as the engines of a run did, or nearly; says how near that has to be."""

    def __init__(self, config: Config, model: ModelConfig) -> None:
        self.config, self._model = config, model
        self._scorers: dict[float, Scorer] = {}
        self._is_exact, self._why_not = config.engine.exact, ""
        if self._is_exact:
            torch.set_num_threads(1)  # as engines have it
            try:
                self._scorer(config.sampling.temperature)
            except EngineError as error:
                self._is_exact, self._why_not = False, f"; exact mode is not to be had here: {error}"

    def __str__(self) -> str:
        """The rule that samples are judged by."""
        if self._is_exact:
            return "all bits must be equal, on a machine and with a torch like the run's"
        largest, mean = self.allowed(self.config.sampling.temperature)
        dtype = self.config.engine.dtype
        return f"{largest:.2g}, mean {mean:.2g} are allowed for rounding in {dtype}{self._why_not}"

    @property
    def why_impossible(self) -> str:
        """Why nothing can be said about this run's samples; empty where something can."""
        if self._model.mixture_layers and not (self._is_exact or self.config.trainer.routing_replay):
            return (
                "routers may choose otherwise where two experts are nearly alike, and routes are recorded "
                "only with trainer.routing_replay = true"
            )
        return ""

    def allowed(self, temperature: float) -> Allowed:
        """How far a sample's log-probs may be from those that are computed."""
        if self._is_exact:
            return EXACT
        largest, mean = ROUNDED[self.config.engine.dtype]
        return Allowed(largest / min(1.0, temperature), mean / min(1.0, temperature))

    def temperature_of(self, row: SampleRow) -> float:
        """At which a sample's log-probs are recorded; those of greedy answers to held-out prompts at 1."""
        is_held_out = row.group.startswith("-")
        is_greedy = is_held_out and self.config.eval.greedy and row.sibling == GREEDY
        return 1.0 if is_greedy else self.config.sampling.temperature

    def misfit(self, answer: Answer | None) -> str:
        """What about a sample cannot be, so that there is nothing to compute; or nothing."""
        if answer is None or len(answer.token_ids) != len(answer.logprobs):
            return "was cut"
        ids, vocab = (*answer.prompt_ids, *answer.token_ids), self._model.vocab_size
        if not (answer.prompt_ids and answer.token_ids) or len(ids) > self.config.context:
            return f"has {len(answer.prompt_ids)} + {len(answer.token_ids)} tokens"
        if not 0 <= min(ids) <= max(ids) < vocab:
            return f"names a token that is not in the vocabulary of {vocab}"
        if len(answer.loss_mask) != len(answer.token_ids) or not {1} <= {*answer.loss_mask} <= {0, 1}:
            return "does not say which of its tokens were drawn"
        if self.config.trainer.routing_replay:
            num_chosen = len(self._model.mixture_layers) * self._model.num_experts_per_tok
            chosen = np.asarray(answer.routes)
            if len(chosen) != (len(ids) - 1) * num_chosen or not np.isin(chosen, self._experts).all():
                return "was sent to experts that are not there"
        return ""

    def logprobs(self, flat: Tensor, temperature: float, answers: Sequence[Answer]) -> Iterator[Tensor]:
        """Those [tokens] of each answer, with the weights `flat` ([numel]) as engines had them."""
        if self._is_exact:
            prompts, responses = [a.prompt_ids for a in answers], [a.token_ids for a in answers]
            yield from self._scorer(temperature)(flat, prompts, responses).split([*map(len, responses)])
            return
        policy = Policy(self._model, Layout(self._model).views(flat.float()), temperature)
        for answer in answers:
            batch = pack([answer.prompt_ids], [answer.token_ids], torch.device("cpu"))
            route = None
            if self._model.mixture_layers:
                routes = np.array(answer.routes, np.int16).reshape(len(batch.inputs), -1)
                route = replay(self._model, batch, [routes])
            with torch.no_grad():
                yield policy.logprobs(batch, route)[0]

    @property
    def _experts(self) -> range:
        return range(self._model.num_experts)

    def _scorer(self, temperature: float) -> Scorer:
        if temperature not in self._scorers:
            engine, context = self.config.engine, self.config.context
            made = Scorer(self._model, context, temperature, engine.kernels, engine.dtype)
            self._scorers[temperature] = made
        return self._scorers[temperature]
