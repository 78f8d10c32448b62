"""The two ends of a pipe: what arrives when a worker dies, at whatever instant."""

from __future__ import annotations

from tests.runtime.torn import die_while_speaking

from dora.runtime.messages import Gone
from dora.runtime.process import Told, Worker


def test_a_worker_that_dies_in_the_middle_of_a_message_is_gone_after_its_last_whole_one() -> None:
    told = Told()
    worker = Worker("a worker", die_while_speaking, None, told)
    assert told.get(timeout=30) == (worker, "a whole message")
    assert told.get(timeout=30) == (worker, Gone())
    assert worker.how_it_ended == "a worker ended with exit code 0"
    worker.kill()
