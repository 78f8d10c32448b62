"""Partial outputs survive the driver: what was written is read again, and a torn end is dropped."""

from pathlib import Path

import numpy as np
import pytest
from tests.engine.tiny import make_request

from dora.core.types import Chunk, RequestId
from dora.engine.decode_batch import NUM_LOGPROBS
from dora.engine.messages import OutputPart
from dora.runtime.rollout import partial_outputs
from dora.runtime.rollout.partial_outputs import FILE_NAME, PartialOutputs, SavedEpisode

FIRST, SECOND = make_request(0), make_request(1)
UNFINISHED = {FIRST.id, SECOND.id}
START = SavedEpisode((3, 4), 0, 0, b"at the start")


def part(number: int, start: int, stop: int, digest: str = "a" * 64) -> OutputPart:
    """Tokens `start` to `stop` of an output whose tokens and log-probs depend on their place."""
    tokens = np.arange(start, stop, dtype=np.int32)
    logprobs = np.repeat(-tokens[:, None] / np.float32(7), NUM_LOGPROBS, 1).astype(np.float32)
    return OutputPart(make_request(number).id, 0, digest, start, tokens, logprobs)


def read(path: Path, unfinished: set[RequestId], *, are_episodes: bool = False) -> PartialOutputs:
    outputs = PartialOutputs(path)
    outputs.read(unfinished, are_episodes=are_episodes)
    return outputs


def lengths(outputs: PartialOutputs) -> list[int]:
    found = outputs.of([FIRST.id, SECOND.id])
    return [len(found[r.id].token_ids) if r.id in found else 0 for r in (FIRST, SECOND)]


def test_outputs_are_read_again_to_the_bit(tmp_path: Path) -> None:
    outputs = PartialOutputs(tmp_path / FILE_NAME)
    outputs.add([part(0, 0, 5), part(1, 0, 3)])
    outputs.add([part(0, 5, 9)])
    resumed = read(tmp_path / FILE_NAME, UNFINISHED).of([FIRST.id])[FIRST.id]
    expected = part(0, 0, 9)
    assert resumed.token_ids.tolist() == expected.token_ids.tolist()
    assert resumed.logprobs.tobytes() == expected.logprobs.tobytes()
    assert resumed.chunks == (Chunk(0, "a" * 64, 9),)
    assert lengths(read(tmp_path / FILE_NAME, {SECOND.id})) == [0, 3]
    assert lengths(PartialOutputs(tmp_path / FILE_NAME)) == [0, 0], "a new run begins without outputs"


def test_a_torn_record_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    outputs = PartialOutputs(path)
    outputs.add([part(0, 0, 5)])
    size = path.stat().st_size
    outputs.add([part(0, 5, 9)])
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[: size + 3], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(torn)
        assert lengths(read(path, UNFINISHED)) == [5, 0]


def test_parts_overlap_after_a_migration_and_other_weights_start_again(tmp_path: Path) -> None:
    outputs = PartialOutputs(tmp_path / FILE_NAME)
    outputs.add([part(0, 0, 5)])
    outputs.add([part(0, 0, 3)])  # a late report of the source
    outputs.add([part(0, 7, 9)])  # tokens before it miss
    assert lengths(outputs) == [5, 0]
    outputs.add([part(0, 0, 8)])
    assert lengths(outputs) == [8, 0]
    outputs.add([part(0, 2, 9, digest="b")])
    assert lengths(outputs) == [8, 0]
    outputs.add([part(0, 0, 2, digest="b")])
    assert lengths(outputs) == [2, 0]


def test_an_episode_is_read_again_up_to_its_last_saved_turn_and_a_part_of_the_next(tmp_path: Path) -> None:
    outputs = PartialOutputs(tmp_path / FILE_NAME)
    outputs.save(FIRST.id, START)
    outputs.save(SECOND.id, START)
    outputs.add([part(0, 0, 5), part(1, 0, 3)])  # both first turns may be whole
    assert lengths(read(tmp_path / FILE_NAME, UNFINISHED, are_episodes=True)) == [4, 2]
    outputs.add_observation(FIRST.id, 5, [1, 2])
    assert lengths(read(tmp_path / FILE_NAME, UNFINISHED, are_episodes=True)) == [4, 2], (
        "killed before `save`"
    )
    saved = SavedEpisode((3, 4), 1, 7, b"after one turn\xff")
    outputs.save(FIRST.id, saved)
    outputs.add([part(0, 7, 8)])
    resumed = read(tmp_path / FILE_NAME, UNFINISHED, are_episodes=True)
    assert (resumed.saved(FIRST.id), resumed.saved(SECOND.id), lengths(resumed)) == (saved, START, [7, 2])
    (output,) = resumed.of([FIRST.id]).values()
    assert np.isnan(output.logprobs).all(1).tolist() == [False] * 5 + [True] * 2
    assert lengths(outputs) == [8, 3], "the loss of an engine costs nothing that is kept"


def test_an_episode_that_cannot_be_restored_is_not_kept(tmp_path: Path) -> None:
    outputs = PartialOutputs(tmp_path / FILE_NAME)
    outputs.add([part(0, 0, 5)])  # its environment has no snapshots
    outputs.save(SECOND.id, START._replace(num_turns=2, num_tokens=4))
    outputs.add([part(1, 0, 3)])  # tokens of its second turn miss
    resumed = read(tmp_path / FILE_NAME, UNFINISHED, are_episodes=True)
    assert (lengths(resumed), resumed.saved(SECOND.id)) == ([0, 0], None)


def test_an_attempt_that_has_failed_is_not_read_again(tmp_path: Path) -> None:
    """Whenever the run is killed: before the next attempt has anything to save, or later."""
    outputs = PartialOutputs(tmp_path / FILE_NAME)
    outputs.save(SECOND.id, START._replace(num_turns=2, num_tokens=4))
    outputs.add([part(0, 0, 3), part(1, 0, 5)])
    assert outputs.restart(SECOND.id)
    size = (tmp_path / FILE_NAME).stat().st_size
    assert not outputs.restart(SECOND.id)
    assert (tmp_path / FILE_NAME).stat().st_size == size, "there is nothing left to drop"
    resumed = read(tmp_path / FILE_NAME, UNFINISHED)
    assert (lengths(resumed), resumed.saved(SECOND.id)) == ([3, 0], None)
    outputs.save(SECOND.id, START)
    outputs.add([part(1, 0, 2)])
    resumed = read(tmp_path / FILE_NAME, UNFINISHED, are_episodes=True)
    assert (lengths(resumed), resumed.saved(SECOND.id)) == ([0, 1], START)


def test_the_file_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_outputs, "_MIN_FILE_BYTES", 1000)
    path = tmp_path / FILE_NAME
    outputs = PartialOutputs(path)
    for start in range(40):
        outputs.add([part(0, start, start + 1), part(1, start, start + 1)])
        outputs.save(FIRST.id, START._replace(num_tokens=start + 1))
    outputs.forget(SECOND.id)
    for start in range(40, 80):
        outputs.add([part(0, start, start + 1)])
    assert path.stat().st_size < 80 * 170
    resumed = read(path, UNFINISHED)
    assert (lengths(resumed), resumed.saved(FIRST.id)) == ([80, 0], START._replace(num_tokens=40))
