"""What the policies that break C1 need and refuse, and what another policy leaves out of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.errors import ConfigError
from dora.settings import forgotten, read

POLICIES = pytest.mark.parametrize("policy", ["partial", "inflight"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def named(policy: str) -> str:
    return f"orchestrator.update_policy={policy}"


@POLICIES
def test_engines_hold_two_versions_for_the_moment_of_the_change(file: Path, policy: str) -> None:
    assert read(file, [named(policy)]).version_slots == 2
    assert read(file, [named(policy), "orchestrator.max_staleness=0"]).version_slots == 1
    beside = ["eval.path=gcd", "eval.every=2"]
    assert read(file, [named(policy), *beside]).version_slots == 3


@POLICIES
@pytest.mark.parametrize("num_slots", [1, 3])
def test_other_numbers_of_slots_are_refused(file: Path, policy: str, num_slots: int) -> None:
    with pytest.raises(ConfigError, match=r"engine.version_slots = . ?.*needs 2.*remove it"):
        read(file, [named(policy), f"engine.version_slots={num_slots}"])


@POLICIES
@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("engine.adapter=dora.engine.engine:Engine", "engine.adapter"),
        ("engine.exact=true", "engine.exact"),
        ("service.agents=true", "service.agents"),
    ],
)
def test_what_keeps_one_version_is_refused(file: Path, policy: str, change: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"lets answers go on with newer weights.*remove .*{key}.*dora"):
        read(file, [named(policy), change])


@POLICIES
@pytest.mark.parametrize(
    "change", ["engine.tail_interval=2", "orchestrator.placement=static", "orchestrator.level_running=true"]
)
def test_keys_without_effect_are_refused(file: Path, policy: str, change: str) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        read(file, [named(policy), change])


def test_routes_of_what_is_computed_again_cannot_be_replayed(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"remove trainer\.routing_replay"):
        read(file, [named("partial"), "trainer.routing_replay=true"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["orchestrator.update_policy=sync"], "with sync it is 0"),
        (["orchestrator.update_policy=one_step"], "with one_step it is 1"),
        (["orchestrator.update_policy=partial"], "with partial it is 2"),
        (["orchestrator.update_policy=dora"], None),
        (["orchestrator.update_policy=partial", "orchestrator.max_staleness=3"], None),
        (["run.steps=3"], None),
    ],
)
def test_a_bound_that_another_policy_leaves_out_is_told(
    file: Path, overrides: list[str], told: str | None
) -> None:
    file.write_text(file.read_text() + "[orchestrator]\nmax_staleness = 4\n")
    what = f"orchestrator.max_staleness = 4 in {file} was meant for another update_policy"
    assert forgotten(file, overrides, read(file, overrides)) == ([] if told is None else [f"{what}: {told}"])
