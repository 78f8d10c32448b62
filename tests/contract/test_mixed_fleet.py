"""A run with vLLM servers and DORA's own engines, which evaluate, and between which requests migrate.

One server crashes. The servers are fakes with made-up answers, so the test checks the run's guarantees only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.fake_vllm_server import FakeVllmServer
from tests.runtime.running import Run, journal, summary
from tests.runtime.tiny import write_task

FLEET = '[[fleet]]\nname = "{name}"\nbackend = "vllm"\noptions = {{url = "{url}"}}\n'
SETTINGS: dict[str, Any] = {
    "run__steps": 8,
    "engine__num_engines": 1,
    "engine__version_slots": 1,
    "sampling__max_response_length": 48,
    "orchestrator__prioritize_stragglers": "false",
    "eval__num_prompts": 4,
    "orchestrator__balance_running": "true",
    "orchestrator__rebalance_interval_s": 0.1,
    "runtime__output_interval_s": 0.01,
}
CRASHING = 1  # the engine of the first server


@pytest.fixture
def servers() -> Iterator[list[FakeVllmServer]]:
    servers = [FakeVllmServer(event_interval_s=0.08), FakeVllmServer(event_interval_s=0.04)]
    yield servers
    for server in servers:
        server.close()


def is_held_back(out: Path) -> bool:
    """Whether a request has the same tokens, at least one, in the crashing engine's last two reports."""
    reports = [e for e in journal(out) if e["kind"] == "progress_reported" and e["engine"] == CRASHING]
    if len(reports) < 2:
        return False
    before, last = ({tuple(id): num for id, num in report["lengths"]} for report in reports[-2:])
    return any(num_tokens and before.get(id) == num_tokens for id, num_tokens in last.items())


def test_requests_migrate_between_engines_of_all_kinds(servers: list[FakeVllmServer], tmp_path: Path) -> None:
    """The journal counts tokens that are prefilled again. C1, C2 and C3 hold.

    The requests of a crashed server continue on another engine from what they had reported.
    """
    task = write_task(tmp_path)
    fleets = (FLEET.format(name=f"server{i}", url=server.url) for i, server in enumerate(servers))
    task.write_text(task.read_text() + "".join(fleets))
    run = Run(task, tmp_path / "run", eval__path=tmp_path / "prompts.jsonl", **SETTINGS)
    try:
        run.wait_for_steps(2)
        servers[0].faults["holds_after"] = 3
        run.wait_until(lambda: is_held_back(run.out) and servers[0].crash() > 0, "the first server crashes")
        del servers[0].faults["holds_after"]
        ended = run.end()
    finally:
        run.kill_all()
    assert ended.code == 0, ended.err
    lost = [event["engine"] for event in journal(run.out) if event["kind"] == "engine_lost"]
    assert lost == [CRASHING], "the evaluations lost no other engine"
    migrations = [event for event in journal(run.out) if event["kind"] == "migrated"]
    directions = {(event["source"] == 0, event["destination"] == 0) for event in migrations}
    assert directions >= {(False, True), (True, False)}, migrations
    assert all(event["num_bytes"] == 0 and event["num_prefilled"] > 0 for event in migrations)
    s, num_prefilled = summary(run.out), sum(event["num_prefilled"] for event in migrations)
    assert s["reprefill_tokens"] >= num_prefilled
    assert (s["engine_failures"], s["pending_groups"]) == (1, 0)
    assert s["kept_tokens"] > 0
    audit = run.check_records()
    assert f"{num_prefilled:,} tokens re-prefilled in migrations" in audit
    assert f"engines, or the whole run, were lost 1 time: {s['kept_tokens']:,} token" in audit
