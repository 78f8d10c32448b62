"""A real run of servers and DORA's own engines in which requests move between all of them.

The servers are stand-ins, whose answers are made up, so that only the run's promises are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.vllm_stand_in import TOKEN, StandIn
from tests.runtime.running import Run, dora, journal, summary
from tests.runtime.tiny import write_task

from dora.backends.inside.dora_vllm import TOKEN_KEY

KIND = '[[fleet]]\nname = "{name}"\nadapter = "vllm"\noptions = {{url = "{url}"}}\n'
SETTINGS: dict[str, Any] = {
    "run__steps": 8,
    "engine__num_engines": 1,
    "engine__version_slots": 1,
    "sampling__max_response_length": 48,
    "orchestrator__rush": "false",
    "orchestrator__level_running": "true",
    "orchestrator__rebalance_interval_s": 0.1,
}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandIn]]:
    monkeypatch.setenv(TOKEN_KEY, TOKEN)
    made = [StandIn(paces=0.08), StandIn(paces=0.04)]
    yield made
    for server in made:
        server.close()


def test_requests_move_between_engines_of_all_kinds(servers: list[StandIn], tmp_path: Path) -> None:
    """What is computed again is told by the record, and neither C1 nor C2 nor C3 is given up for it."""
    task = write_task(tmp_path)
    kinds = (KIND.format(name=f"server{i}", url=server.url) for i, server in enumerate(servers))
    task.write_text(task.read_text() + "".join(kinds))
    run = Run(task, tmp_path / "run", **SETTINGS)
    try:
        ended = run.end()
    finally:
        run.kill_all()
    assert ended.code == 0, ended.err
    moves = [fact for fact in journal(run.out) if fact["kind"] == "migrated"]
    kinds_of_moves = {(fact["source"] == 0, fact["destination"] == 0) for fact in moves}
    assert kinds_of_moves >= {(False, True), (True, False)}, moves
    assert all(fact["num_bytes"] == 0 and fact["num_prefilled"] > 0 for fact in moves)
    s, num_prefilled = summary(run.out), sum(fact["num_prefilled"] for fact in moves)
    assert s["reprefill_tokens"] >= num_prefilled
    assert (s["regenerated_tokens"], s["engine_losses"], s["pending_groups"]) == (0, 0, 0)
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), (audit, replay)
    assert f"{num_prefilled:,} tokens re-prefilled in moves" in audit.out
