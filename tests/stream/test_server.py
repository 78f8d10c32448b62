"""A stream in another process: waiting, refusing, dying and coming back, with processes that are killed."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.stream.peers import TASK, Peer
from tests.stream.rows import FIELDS, columns, group, numbers, rewards, row

from dora.errors import NoRoomError, RunError, StreamError
from dora.stream import segments, wire
from dora.stream.batch import Batch, Waited
from dora.stream.client import StreamClient
from dora.stream.lines import Want
from dora.stream.server import Server
from dora.stream.stream import Stream

ALL = Want(num_rows=99)


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name, for that of a socket may have 107 letters."""
    made = Path(tempfile.mkdtemp(prefix="dora-"))
    yield made
    shutil.rmtree(made)


class Served:
    """A stream of at most 8 rows behind a server in a thread, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.server = Server(
            Stream(FIELDS, folder, max_rows=8), [wire.endpoint_of(folder), "tcp://127.0.0.1:*"]
        )
        self.thread = self.server.start()
        self.clients: list[StreamClient] = []

    def client(self, is_near: bool = True) -> StreamClient:
        endpoint, token = self.server.endpoints[0 if is_near else 1], self.server.token
        self.clients.append(StreamClient(endpoint, timeout_s=20.0, token=token))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop()
        self.thread.join()


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    made = Served(folder)
    yield made
    made.close()


def put(client: StreamClient, *which: int, wait_s: float = 10.0) -> range | Waited:
    return client.put([row(n) for n in which], columns(which), wait_s)


def get(client: StreamClient, name: str = TASK, want: Want = ALL, wait_s: float = 10.0) -> Batch:
    batch = client.get(name, want, wait_s)
    assert isinstance(batch, Batch)
    return batch


@pytest.fixture(params=["near", "far"])
def client(served: Served, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StreamClient:
    """Both on this machine, though the far one does not know it."""
    if request.param == "far":
        monkeypatch.setattr(wire, "shares_memory", lambda *_: False)
    made = served.client(request.param == "near")
    assert made.shares_memory == (request.param == "near")
    made.declare(TASK, ["ids", "logprobs"])
    made.declare("actor", ["ids", "reward"], group_size=2)
    return made


def test_rows_go_from_a_producer_to_each_consumer(client: StreamClient) -> None:
    assert put(client, 0, 1, 3) == range(3)
    client.fill([2, 0, 1], rewards([3, 0, 1]))
    batch, chosen = get(client), get(client, "actor", Want(groups=(group(0),)))
    assert (numbers(batch), numbers(chosen)) == ([0, 1, 3], [0, 1])
    assert chosen.column("reward").values.tolist() == [0.0, 1.0]
    assert batch.column("logprobs").values.tolist() == [1.0, 3.0, 4.0, 5.0]
    for done in (batch, chosen):
        client.commit(done)
    assert client.status()["num_rows"] == 1
    client.clear([group(1)])
    assert client.status()["num_bytes"] == 0


def test_ranks_of_a_trainer_read_their_rows_of_what_one_of_them_holds(
    served: Served, client: StreamClient
) -> None:
    """All ranks of a replica the same ones."""
    put(client, 0, 1, 2, 3)
    batch = get(client)
    shares = [batch.indices[::2], batch.indices[1::2]]
    ranks = [(served.client(rank < 2), shares[rank % 2]) for rank in range(4)]
    for rank, share in ranks:
        assert numbers(rank.look(TASK, share)) == share
    with pytest.raises(StreamError, match="this client has no lease 0"):
        ranks[0][0].commit(ranks[0][0].look(TASK, shares[0]))
    client.commit(batch)
    with pytest.raises(StreamError, match="row 1 is not on lease to 'reward': somebody must get it"):
        ranks[1][0].look(TASK, shares[1])


def test_a_get_waits_for_rows_and_names_what_it_waits_for(served: Served, client: StreamClient) -> None:
    late = client.get("actor", Want(groups=(group(0),)), wait_s=0.05)
    assert isinstance(late, Waited)
    assert late.why == "group 0/0: 0 of 2 rows are here, 0 on lease or consumed"
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(numbers(get(client))))
    waiting.start()
    put(served.client(), 3)
    waiting.join()
    assert found == [[3]]


def test_who_is_said_to_be_dead_has_nothing_on_lease_and_gets_nothing_more(
    served: Served, client: StreamClient
) -> None:
    """From far away it says nothing itself, and a request of it may wait for rows."""
    driver, dead = served.client(), served.client(is_near=False)
    put(driver, 0)
    get(dead)
    dead._send("get", {"consumer": TASK, "want": ALL._asdict(), "inline": True, "wait_s": 60.0}, ())
    driver.bury(dead.owner)
    put(driver, 1)
    assert numbers(get(client)) == [0, 1]
    with pytest.raises(StreamError, match="does not know this client, or took it for dead"):
        dead.status()
    with pytest.raises(StreamError, match="only a client of the storage's own machine"):
        served.client(is_near=False).bury(client.owner)


def test_a_full_stream_makes_a_producer_wait_and_says_who_is_slow(
    served: Served, client: StreamClient
) -> None:
    assert put(client, *range(8)) == range(8)
    client.fill([*range(8)], rewards([*range(8)]))
    full = put(client, 8, wait_s=0.05)
    assert isinstance(full, Waited)
    assert full.why.startswith("the stream is full: 'reward' is 8 rows behind: 8 are ready for it")
    found: list[range | Waited] = []
    waiting = threading.Thread(target=lambda: found.append(put(client, 8)))
    waiting.start()
    other = served.client()
    for name in (TASK, "actor"):
        other.commit(get(other, name))
    waiting.join()
    assert found == [range(8, 9)]
    assert numbers(get(other)) == [8]


def test_a_full_memory_makes_a_producer_wait_too(
    client: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: Path, num_bytes: int) -> mmap.mmap:
        if num_fulls.pop(0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return make_segment(path, num_bytes)

    make_segment, num_fulls = segments._make, [True] * 100
    monkeypatch.setattr(segments, "_make", make)
    late = put(client, 0, wait_s=0.05)
    assert isinstance(late, Waited)
    assert "'reward' is 0 rows behind" in late.why
    num_fulls[:] = [*[True] * client.shares_memory, False, *[True] * 100]  # a far one does not try again
    assert put(client, 0) == range(1)
    with pytest.raises(NoRoomError, match="No space left on device"):
        client.fill([0], {"routes": [np.zeros((1 << 22, 3), np.int16)]})
    assert client.status()["num_rows"] == 1


def test_what_is_refused_is_refused_with_a_remedy_and_changes_nothing(client: StreamClient) -> None:
    put(client, 0, 1)
    batch = get(client)
    client.commit(batch)
    before = client.status()
    bad: list[tuple[Any, str]] = [
        (lambda: put(client, 0), "row 0/0/0 is here already: put a row once"),
        (lambda: client.put([row(4)], {"ids": [np.zeros(1)]}), "'ids' is float64 and was declared <i4"),
        (lambda: client.put([row(4)], {"value": [np.zeros(1)]}), "field 'value' is not declared"),
        (lambda: client.put([], {"ids": []}), "no row was given"),
        (lambda: put(client, *range(10, 19)), "9 rows at once, but max_rows = 8"),
        (lambda: client.fill([0], columns([0])), "row 0 has ids, logprobs already"),
        (lambda: client.fill([77], rewards([7])), "row 77 is not here"),
        (lambda: client.commit(batch), "lease 1 is over"),
        (lambda: client.get("critic"), "consumer 'critic' is not declared"),
        (lambda: client.get(TASK, Want(groups=(group(0),))), "needs a group_size"),
        (lambda: client.get(TASK, Want(num_rows=0)), "ask for a whole number above 0"),
        (lambda: client.get(TASK, Want(at_least=3)), "at_least = 3 is more than num_rows = 1"),
        (lambda: client.declare(TASK, ["reward"]), "declared already, and otherwise"),
    ]
    for request, fragment in bad:
        with pytest.raises(StreamError, match=fragment):
            request()
    assert client.status() == before


def test_messages_that_make_no_sense_are_answered_and_harm_nobody(
    served: Served, client: StreamClient
) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(served.server.endpoints[1])
    hello = {"do": "hello", "n": 1, "owner": "f" * 16, "token": served.server.token}
    get_it = {"do": "get", "n": 1, "consumer": TASK, "want": [1, None, 1, []], "inline": True, "wait_s": 1}
    put_it = {"do": "put", "n": 1, "names": ["ids"], "wait_s": 1}
    eight = np.zeros(5, np.int64).tobytes()
    bad: list[list[bytes]] = [
        [json.dumps(get_it).encode()],  # of nobody
        [b""],
        [b"\x80\x04pickle"],
        [b"[]"],
        [b'{"do": "put"}'],
        [json.dumps({"do": ["put"], "n": 1}).encode()],
        [json.dumps({"do": "explode", "n": 1}).encode()],
        [json.dumps(put_it | {"place": None}).encode(), b"123"],
        [json.dumps(put_it | {"place": None}).encode(), eight],
        [json.dumps(put_it | {"place": None}).encode(), eight, b"short"],
        [json.dumps(put_it | {"place": ["../../etc/passwd", 0, 9]}).encode(), eight],
        [json.dumps(put_it | {"place": [f"{0:016x}-1", 0, 9]}).encode(), eight],
        [json.dumps(put_it | {"place": [f"{15:x}" * 16 + "-1", 0, 9]}).encode(), eight],
        [json.dumps({"do": "commit", "n": 1, "lease": "x"}).encode()],
        [json.dumps(hello | {"owner": "../.."}).encode()],
        [json.dumps({"do": "get", "n": 1, "consumer": [], "want": 3}).encode()],
    ]
    for is_known in (False, True):
        for frames in bad[is_known:]:
            socket.send_multipart(frames)
            assert "error" in wire.header_of(socket.recv_multipart()), frames
        socket.send_multipart([json.dumps(hello).encode()])
        assert "error" not in wire.header_of(socket.recv_multipart())
    socket.close()
    put(client, 3)
    assert numbers(get(client)) == [3]


def test_rows_that_came_too_late_go_to_another_client(folder: Path) -> None:
    class Slow(Stream):
        def settle(self) -> None:
            assert may_go_on.wait(20.0)
            super().settle()

    may_go_on = threading.Event()
    may_go_on.set()
    server = Server(Slow(FIELDS, folder), [wire.endpoint_of(folder)])
    thread = server.start()
    with (
        StreamClient(server.endpoints[0], timeout_s=0.5) as hasty,
        StreamClient(server.endpoints[0]) as other,
    ):
        hasty.declare(TASK, ["ids"])
        put(hasty, 3)
        may_go_on.clear()
        with pytest.raises(RunError, match=r"has not answered 'get' for 0.5 s: is its process alive"):
            hasty.get(TASK, wait_s=0.0)
        may_go_on.set()
        hasty.status()  # whatever it asks for next: it hears of the rows, and gives them back
        assert numbers(get(other)) == [3]
    server.stop()
    thread.join()


def test_an_expired_lease_goes_to_another_client(served: Served) -> None:
    slow, quick = served.client(), served.client()
    slow.declare("critic", ["ids"], lease_s=0.05)
    put(slow, 3)
    batch = get(slow, "critic")
    again = get(quick, "critic")
    assert numbers(again) == [3]
    with pytest.raises(StreamError, match="lease 1 is over"):
        slow.commit(batch)


def test_a_client_that_says_goodbye_gives_back_what_it_held(served: Served) -> None:
    leaving, staying = served.client(), served.client()
    staying.declare(TASK, ["ids"])
    put(leaving, 3)
    assert numbers(get(leaving)) == [3]
    leaving.close()
    assert numbers(get(staying)) == [3]


def test_nobody_answers_for_a_stream_that_is_not_there(folder: Path) -> None:
    with pytest.raises(RunError, match=r"no stream has listened at .* for 0.05 s: is its process alive"):
        StreamClient(wire.endpoint_of(folder), timeout_s=0.05)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the death of a process is seen on Linux only")
def test_killed_consumers_lose_nothing_and_repeat_nothing(folder: Path) -> None:
    """Every row is committed once, though each consumer is killed at another point of its work."""
    server = Peer("serve", folder)
    assert server.hear() == "ready"
    producer = StreamClient(wire.endpoint_of(folder))
    producer.declare(TASK, ["ids", "logprobs"])
    put(producer, *range(12))
    committed: list[int] = []
    for num_commits in (0, 1, 2):
        consumer = Peer("consume", folder)
        for _ in range(num_commits):
            got = consumer.hear().split()[1:]
            consumer.tell()
            assert consumer.hear() == "committed"
            committed += map(int, got)
        assert consumer.hear().startswith("got") or len(committed) == 12
        consumer.kill()  # with a batch on lease
    last = get(producer, want=Want(99, at_least=12 - len(committed)))
    assert sorted([*committed, *numbers(last)]) == [*range(12)]
    producer.commit(last)
    assert producer.status()["num_rows"] == 0
    producer.close()
    server.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the death of a process is seen on Linux only")
def test_what_peers_in_full_work_leave_behind_when_they_are_killed(folder: Path) -> None:
    """A producer, at most what it was about to say; consumers, nothing that is consumed twice or never."""
    server = Peer("serve", folder)
    assert server.hear() == "ready"
    client = StreamClient(wire.endpoint_of(folder))
    client.declare(TASK, ["ids"])
    producer = Peer("produce", folder)
    put_rows = [int(n) for _ in range(300) for n in producer.hear().split()]
    put_rows += [int(n) for line in producer.kill() for n in line.split()]
    consumed: list[int] = []
    for num_heard in (1, 20):
        pair = [Peer("hurry", folder) for _ in range(2)]
        for hasty in pair:
            assert hasty.hear() == "ready"
        for hasty in pair:
            hasty.tell()
        for hasty in pair:
            consumed += [int(n) for _ in range(num_heard) for n in hasty.hear().split()]
        for hasty in pair:
            consumed += [int(n) for line in hasty.kill() for n in line.split()]
    while client.status()["num_rows"]:
        batch = get(client)
        consumed += numbers(batch)
        client.commit(batch)
    assert len({*consumed}) == len(consumed)
    assert 0 <= len({*consumed} - {*put_rows}) <= 3  # one put that was not answered before it died
    assert len({*put_rows} - {*consumed}) <= 4 * 3  # commits that were not heard of before one died
    assert not [*folder.glob("*-[0-9]")]  # the producer's memory is gone as well
    client.close()
    server.kill()


def test_a_killed_storage_comes_back_with_all_that_was_answered(folder: Path) -> None:
    server = Peer("serve", folder)
    assert server.hear() == "ready"
    producer = StreamClient(wire.endpoint_of(folder))
    producer.declare(TASK, ["ids", "logprobs"])
    put(producer, *range(6))
    producer.commit(get(producer, want=Want(2)))
    assert numbers(get(producer, want=Want(2))) == [2, 3]  # on lease, when the storage dies
    server.kill()
    server = Peer("serve", folder)
    assert server.hear() == "ready"
    consumer = StreamClient(wire.endpoint_of(folder))
    assert numbers(get(consumer)) == [2, 3, 4, 5]
    for client in (producer, consumer):
        client.close()
    server.kill()
