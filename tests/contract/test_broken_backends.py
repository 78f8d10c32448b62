"""The contracts fail for backends with typical errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples.adapters.transformers_trainer import Transformers as Trainer
from torch import Tensor

from dora.core.types import RequestId
from dora.engine.backends.transformers_engine import Transformers as Engine
from dora.engine.request import Completion, EngineError, Request
from dora.errors import RunError
from dora.model.transformers_model import TransformersModel
from dora.testing.engine_contract import InferenceContract
from dora.testing.trainer_contract import TrainingContract
from dora.trainer.settings import Sample

FAILURES = (AssertionError, pytest.fail.Exception)  # the second: `pytest.raises` without an exception


class WrongLogprobs(Engine):
    def step(self) -> list[Completion]:
        return [replace(c, unfiltered_logprobs=c.unfiltered_logprobs - 0.01) for c in super().step()]


class DropsVersionsInUse(Engine):
    def drop(self, version: int) -> None:
        self._rows.clear()
        self._waiting.clear()
        super().drop(version)


class IgnoresLoadedWeights(Engine):
    """It returns the digest of the source, but keeps its own weights."""

    def load(self, version: int, source: Tensor) -> str:
        digest = super().load(version, source)
        self._first = self._models[version] = getattr(self, "_first", self._models[version])
        return digest


class KeepsViewsOfTheSource(Engine):
    def load(self, version: int, source: Tensor) -> str:
        digest = super().load(version, source)
        views = self._layout.views(source)
        self._models[version] = TransformersModel(self._config, views, self._device, self._dtype)
        return digest


class ClaimsFilters(Engine):
    capabilities = replace(Engine.capabilities, filters=True)


class ClaimsStopStrings(Engine):
    capabilities = replace(Engine.capabilities, stop_strings=True)


class IgnoresTheDtype(Engine):
    def __init__(self, *, dtype: str, **others: Any) -> None:
        super().__init__(dtype="float32", **others)


class RejectsAllRequests(Engine):
    def submit(self, requests: Sequence[Request]) -> None:
        try:
            super().submit(requests)
        except EngineError as error:
            super().abort([request.id for request in requests])
            raise error from None


class IgnoresStopTokens(Engine):
    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(r, sampling=replace(r.sampling, stop_ids=())) for r in requests])


class IgnoresAborts(Engine):
    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        progress = self.progress()
        return {id: progress[id] for id in ids if id in progress}


class RejectsDecodingAll(Engine):
    def decode_only(self, ids: Iterable[RequestId]) -> None:
        raise EngineError("no decoding of some requests only")


class MissesKernels(Engine):
    def __getattribute__(self, name: str) -> Any:
        if name == "kernels":
            raise AttributeError(name)
        return super().__getattribute__(name)


ENGINES = {
    MissesKernels: "test_it_has_every_member_of_the_protocol",
    WrongLogprobs: "test_log_probs_are_those_of_the_weights",
    DropsVersionsInUse: "test_a_version_with_unfinished_requests_cannot_be_dropped",
    IgnoresLoadedWeights: "test_a_dropped_version_frees_its_slot",
    KeepsViewsOfTheSource: "test_the_source_buffer_may_change_after_the_load",
    ClaimsFilters: "test_tokens_that_a_filter_excludes_are_never_sampled",
    ClaimsStopStrings: "test_an_answer_ends_with_its_first_stop_string",
    IgnoresTheDtype: "test_every_claimed_dtype_has_the_digest_of_its_own_bytes",
    RejectsAllRequests: "test_a_request_that_cannot_run_is_rejected_by_id_and_the_others_run",
    IgnoresStopTokens: "test_an_answer_ends_with_its_first_stop_token",
    RejectsDecodingAll: "test_an_engine_that_decodes_everything_can_be_set_to_it_again",
    IgnoresAborts: "test_aborted_requests_are_not_answered",
}


@pytest.mark.parametrize(("broken", "test"), ENGINES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_engine_fails(tmp_path: Path, broken: Any, test: str) -> None:
    contract = type("Contract", (InferenceContract,), {"factory": broken})()
    parameters = inspect.signature(getattr(contract, test)).parameters
    arguments: dict[str, Any] = {"tmp_path": tmp_path, "temperature": 0.5, "filters": {"top_k": 3}}
    arguments["unloaded_engine"] = unwrapped(InferenceContract.unloaded_engine)(contract, tmp_path)
    if "engine" in parameters:
        arguments["engine"] = unwrapped(InferenceContract.engine)(contract, arguments["unloaded_engine"])
    with pytest.raises(FAILURES):
        getattr(contract, test)(**{name: arguments[name] for name in parameters})


class KeepsGradientsOfADiscardedBatch(Trainer):
    def discard_batch(self) -> None:
        grads = [p.grad for p in self._parameters.values()]
        super().discard_batch()
        for parameter, grad in zip(self._parameters.values(), grads, strict=True):
            parameter.grad = grad


class StepsOnNan(Trainer):
    def finish_step(self) -> dict[str, float]:
        try:
            metrics: dict[str, float] = super().finish_step()
        except RunError:
            self._optimizer.step()
            return {}
        return metrics


class DividesByTheLastPiece(Trainer):
    def add_samples(self, samples: Sequence[Sample], is_whole_batch: bool = False) -> None:
        self._num_tokens = 0
        super().add_samples(samples, is_whole_batch)


class NegatesAdvantages(Trainer):
    def add_samples(self, samples: Sequence[Sample], is_whole_batch: bool = False) -> None:
        super().add_samples([replace(s, advantage=-s.advantages[0]) for s in samples], is_whole_batch)


class TrainsOnObservations(Trainer):
    def add_samples(self, samples: Sequence[Sample], is_whole_batch: bool = False) -> None:
        def without_mask(s: Sample) -> Sample:
            sampled = iter(s.logprobs)
            logprobs = [next(sampled) if is_sampled else 0.0 for is_sampled in s.loss_mask or ()]
            return replace(s, loss_mask=None, logprobs=logprobs or s.logprobs)

        super().add_samples([without_mask(s) for s in samples], is_whole_batch)


TRAINERS = {
    TrainsOnObservations: "test_observation_tokens_have_no_loss",
    KeepsGradientsOfADiscardedBatch: "test_a_discarded_batch_leaves_no_trace",
    StepsOnNan: "test_a_failed_step_changes_nothing_and_can_be_repeated",
    DividesByTheLastPiece: "test_a_batch_in_pieces_makes_the_same_step",
    NegatesAdvantages: "test_a_step_makes_good_answers_likelier_and_bad_ones_less_likely",
}


@pytest.mark.parametrize(("broken", "test"), TRAINERS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_trainer_fails(broken: Any, test: str) -> None:
    contract = type("Contract", (TrainingContract,), {"factory": broken})()
    with pytest.raises(FAILURES):
        getattr(contract, test)(unwrapped(TrainingContract.trainer)(contract))


def unwrapped(fixture: Any) -> Callable[..., Any]:
    """The function of a pytest fixture."""
    function: Callable[..., Any] = fixture._get_wrapped_function()
    return function
