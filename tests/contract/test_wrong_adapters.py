"""The contracts catch what adapters get wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples.adapters.transformers_engine import Transformers as Engine
from examples.adapters.transformers_trainer import Transformers as Trainer
from torch import Tensor

from dora.contract.inference import InferenceContract
from dora.contract.training import TrainingContract
from dora.core.records import RequestId
from dora.engine.sequence import Completion, EngineError, Request
from dora.errors import RunError
from dora.trainer.settings import Sample

FAILURES = (AssertionError, pytest.fail.Exception)  # the second: nothing was raised


class TellsOtherLogProbs(Engine):
    def step(self) -> list[Completion]:
        return [
            replace(c, unfiltered_logprobs=[p - 0.01 for p in c.unfiltered_logprobs]) for c in super().step()
        ]


class DropsWhatIsInUse(Engine):
    def drop(self, version: int) -> None:
        self._rows.clear()
        self._waiting.clear()
        super().drop(version)


class TellsThePublishedDigest(Engine):
    """Without having taken the weights."""

    def load(self, version: int, source: Tensor) -> str:
        kept = self._flat.clone()
        digest: str = super().load(version, source)
        self._flat.copy_(kept)
        return digest


class KeepsViewsOfWhatItWasGiven(Engine):
    def load(self, version: int, source: Tensor) -> str:
        digest: str = super().load(version, source)
        views = self._layout.views(source)
        for name, parameter in self._model.named_parameters():
            parameter.data = views[name]
        return digest


class ClaimsToFilter(Engine):
    capabilities = replace(Engine.capabilities, filters=True)


class ClaimsToReadText(Engine):
    capabilities = replace(Engine.capabilities, stop_strings=True)


class ClaimsADtype(Engine):
    capabilities = replace(Engine.capabilities, dtypes=("float32", "bfloat16"))


class RefusesAll(Engine):
    def submit(self, requests: Sequence[Request]) -> None:
        try:
            super().submit(requests)
        except EngineError as error:
            super().abort([request.id for request in requests])
            raise error from None


class ForgetsToStop(Engine):
    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(r, sampling=replace(r.sampling, stop_ids=())) for r in requests])


class KeepsWhatIsGivenUp(Engine):
    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        progress = self.progress()
        return {id: progress[id] for id in ids if id in progress}


class TellsNotWhatComputes(Engine):
    def __getattribute__(self, name: str) -> Any:
        if name == "kernels":
            raise AttributeError(name)
        return super().__getattribute__(name)


ENGINES = {
    TellsNotWhatComputes: "test_it_has_all_that_is_asked_for",
    TellsOtherLogProbs: "test_log_probs_are_those_of_the_weights",
    DropsWhatIsInUse: "test_a_version_with_unfinished_requests_is_not_dropped",
    TellsThePublishedDigest: "test_a_version_that_is_dropped_makes_room",
    KeepsViewsOfWhatItWasGiven: "test_what_was_given_may_change_once_it_is_loaded",
    ClaimsToFilter: "test_what_is_filtered_out_is_not_drawn",
    ClaimsToReadText: "test_a_text_that_ends_an_answer_is_its_last",
    ClaimsADtype: "test_every_dtype_it_knows_is_attested_by_its_own_bytes",
    RefusesAll: "test_a_request_that_cannot_run_is_refused_by_name_and_the_others_go_on",
    ForgetsToStop: "test_an_answer_ends_with_its_first_stop_token",
    KeepsWhatIsGivenUp: "test_requests_that_are_given_up_are_gone",
}


@pytest.mark.parametrize(("wrong", "test"), ENGINES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_engine_fails(tmp_path: Path, wrong: Any, test: str) -> None:
    contract = type("Contract", (InferenceContract,), {"factory": wrong})()
    asked = inspect.signature(getattr(contract, test)).parameters
    given: dict[str, Any] = {"tmp_path": tmp_path, "temperature": 0.5, "filters": {"top_k": 3}}
    given["made"] = unwrapped(InferenceContract.made)(contract, tmp_path)
    if "engine" in asked:
        given["engine"] = unwrapped(InferenceContract.engine)(contract, given["made"])
    with pytest.raises(FAILURES):
        getattr(contract, test)(**{name: given[name] for name in asked})


class RemembersWhatItShouldForget(Trainer):
    def forget(self) -> None:
        grads = [p.grad for p in self._parameters.values()]
        super().forget()
        for parameter, grad in zip(self._parameters.values(), grads, strict=True):
            parameter.grad = grad


class StepsOnNan(Trainer):
    def finish(self) -> dict[str, float]:
        try:
            metrics: dict[str, float] = super().finish()
        except RunError:
            self._optimizer.step()
            return {}
        return metrics


class DividesByTheAnswers(Trainer):
    """By those of the last piece."""

    def put(self, samples: Sequence[Sample], is_whole: bool = False) -> None:
        self._num_tokens = 0
        super().put(samples, is_whole)


class ClimbsDown(Trainer):
    def put(self, samples: Sequence[Sample], is_whole: bool = False) -> None:
        super().put([replace(s, advantage=-s.advantages[0]) for s in samples], is_whole)


class LearnsWhatItRead(Trainer):
    def put(self, samples: Sequence[Sample], is_whole: bool = False) -> None:
        def drawn(s: Sample) -> Sample:
            taken = iter(s.logprobs)
            logprobs = [next(taken) if is_drawn else 0.0 for is_drawn in s.loss_mask or ()]
            return replace(s, loss_mask=None, logprobs=logprobs or s.logprobs)

        super().put([drawn(s) for s in samples], is_whole)


TRAINERS = {
    LearnsWhatItRead: "test_what_was_read_between_turns_is_no_lesson",
    RemembersWhatItShouldForget: "test_what_is_forgotten_leaves_no_trace",
    StepsOnNan: "test_a_step_that_fails_changes_nothing_and_can_be_taken_again",
    DividesByTheAnswers: "test_pieces_make_the_step_of_the_whole_batch",
    ClimbsDown: "test_a_step_makes_good_answers_likelier_and_bad_ones_less_likely",
}


@pytest.mark.parametrize(("wrong", "test"), TRAINERS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_trainer_fails(wrong: Any, test: str) -> None:
    contract = type("Contract", (TrainingContract,), {"factory": wrong})()
    with pytest.raises(FAILURES):
        getattr(contract, test)(unwrapped(TrainingContract.trainer)(contract))


def unwrapped(fixture: Any) -> Callable[..., Any]:
    """The function that pytest made a fixture of."""
    found: Callable[..., Any] = fixture._get_wrapped_function()
    return found
