"""Messages and specs are small: they carry no weights."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora.core.types import GroupId, RequestId
from dora.engine.decode_batch import PartialOutput
from dora.runtime.process import messages
from dora.stream.metadata import BatchRequest
from dora.trainer.checkpoint_folders import KeptCheckpoints
from dora.trainer.critic import CriticSettings
from dora.trainer.trainer import TrainerSettings
from dora.weights.store import RemoteVersionSource

MESSAGES = [
    kind
    for _, kind in inspect.getmembers(messages, dataclasses.is_dataclass)
    if kind.__module__ == messages.__name__
]
NAMES = vars(messages) | {  # messages.py imports these under TYPE_CHECKING
    "BatchRequest": BatchRequest,
    "CriticSettings": CriticSettings,
    "PartialOutput": PartialOutput,
    "TrainerSettings": TrainerSettings,
    "RemoteVersionSource": RemoteVersionSource,
}
# object: a column of the dataset; int16: the experts that tokens were sent to; int32, int64 and float32:
# tokens and log-probs of a response; bytes: keys of channels; RemoteVersionSource: of the own process
NUMBERS = {int, float, bool, np.int16, np.int32, np.int64, np.float32}
LEAVES = NUMBERS | {str, bytes, type(None), Path, object, RemoteVersionSource}


def leaves(hint: Any) -> Iterator[type]:
    """The types that a value of the annotated type is made of."""
    if typing.get_origin(hint) is typing.Literal:
        yield from (type(value) for value in typing.get_args(hint))
    elif typing.get_origin(hint) is np.ndarray:
        yield from leaves(typing.get_args(hint)[1])  # the dtype, of any shape
    elif typing.get_origin(hint) is not None:
        for argument in typing.get_args(hint):
            if argument is not Ellipsis:
                yield from leaves(argument)
    elif dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        for field in typing.get_type_hints(hint, NAMES if hint in MESSAGES else None).values():
            yield from leaves(field)
    else:
        assert not isinstance(hint, types.UnionType)
        yield hint


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_messages_consist_of_numbers_and_strings(kind: type) -> None:
    assert set(leaves(kind)) <= LEAVES


def test_messages_about_weights_are_a_few_bytes() -> None:
    small = (
        messages.PublishWeights(7),
        messages.WeightsPublished(7, "f" * 32),
        messages.PrefetchWeights(7),
        messages.LoadWeights(7),
        messages.WeightsLoaded(7, "f" * 32),
        messages.DropWeights(7),
        messages.TrainStep(7, (GroupId(0, 1), GroupId(0, 2))),
        messages.StepCompleted(7, {"actor/pg_loss": 0.1}),
        messages.AbortRequests((RequestId(0, 1, 2),)),
        messages.SaveCheckpoint(Path("checkpoints"), "{}", Path("held-0"), KeptCheckpoints(2), False),
    )
    assert max(len(pickle.dumps(message)) for message in small) < 300
