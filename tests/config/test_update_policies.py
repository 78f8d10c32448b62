"""Rules of the update policies that break C1, and of overrides that change the policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.config.load import dropped_settings, read_config
from dora.errors import ConfigError

POLICIES = pytest.mark.parametrize("policy", ["partial", "inflight"])


def override(policy: str) -> str:
    return f"orchestrator.update_policy={policy}"


@POLICIES
def test_engines_hold_two_versions_during_an_update(file: Path, policy: str) -> None:
    assert read_config(file, [override(policy)]).version_slots == 2
    assert read_config(file, [override(policy), "orchestrator.max_staleness=0"]).version_slots == 1
    evaluation = ["eval.path=gcd", "eval.every=2"]
    assert read_config(file, [override(policy), *evaluation]).version_slots == 3


@POLICIES
@pytest.mark.parametrize("num_slots", [1, 3])
def test_other_numbers_of_slots_are_refused(file: Path, policy: str, num_slots: int) -> None:
    with pytest.raises(ConfigError, match=r"engine.version_slots = . ?.*needs 2.*remove version_slots"):
        read_config(file, [override(policy), f"engine.version_slots={num_slots}"])


@POLICIES
@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("engine.exact_logprobs=true", "engine.exact_logprobs"),
        ("service.agents=true", "service.agents"),
    ],
)
def test_features_that_need_one_version_are_refused(file: Path, policy: str, change: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"continues responses with newer weights.*remove .*{key}.*dora"):
        read_config(file, [override(policy), change])


@POLICIES
@pytest.mark.parametrize("change", ["orchestrator.placement=static", "orchestrator.balance_running=true"])
def test_keys_without_effect_are_refused(file: Path, policy: str, change: str) -> None:
    with pytest.raises(ConfigError, match=f"{change.partition('=')[0]} has no effect"):
        read_config(file, [override(policy), change])


def test_routing_replay_of_recomputed_tokens_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"remove trainer\.routing_replay"):
        read_config(file, [override("partial"), "trainer.routing_replay=true"])


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        (["orchestrator.update_policy=sync"], "sync, for which max_staleness is 0"),
        (["orchestrator.update_policy=one_step"], "one_step, for which max_staleness is 1"),
        (["orchestrator.update_policy=partial"], "partial, for which max_staleness is 2"),
        (["orchestrator.update_policy=dora"], None),
        (["orchestrator.update_policy=partial", "orchestrator.max_staleness=3"], None),
        (["run.steps=3"], None),
    ],
)
def test_a_notice_names_a_bound_that_another_policy_makes_void(
    file: Path, overrides: list[str], value: str | None
) -> None:
    file.write_text(file.read_text() + "[orchestrator]\nmax_staleness = 4\n")
    notice = (
        f"orchestrator.max_staleness = 4 in {file} does not apply: an override sets update_policy = {value}"
    )
    notices = dropped_settings(file, overrides, read_config(file, overrides))
    assert notices == ([] if value is None else [notice])


@pytest.mark.parametrize(
    ("overrides", "message"),
    {
        "moves": (["orchestrator.placement=static", 'orchestrator.ablations=["moves"]'], "for moves,"),
        "room": (["orchestrator.placement=static", 'orchestrator.ablations=["period", "room"]'], "for room,"),
        "shares": (
            ['orchestrator.ablations=["shares", "remainders"]'],
            "for remainders, with shares: remainders is a part of shares",
        ),
        "twice": (['orchestrator.ablations=["fill", "fill"]'], "names fill twice"),
        "balance": (
            ['orchestrator.ablations=["moves"]', "orchestrator.balance_running=true"],
            "balance_running has no effect with orchestrator.ablations = moves",
        ),
        "timeout": (
            ['orchestrator.ablations=["moves"]', "runtime.migration_timeout_s=9.0"],
            "migration_timeout_s has no effect with orchestrator.ablations = moves",
        ),
    }.values(),
    ids=["moves", "room", "shares", "twice", "balance", "timeout"],
)
def test_ablations_without_effect_are_refused(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(file, overrides)


def test_ablations_with_an_effect_are_accepted(file: Path) -> None:
    static = ["orchestrator.placement=static", 'orchestrator.ablations=["update", "pressure", "period"]']
    assert len(read_config(file, static).orchestrator.ablations) == 3
    moves = ['orchestrator.ablations=["moves", "room"]', "orchestrator.rebalance_interval_s=2.0"]
    assert read_config(file, [*moves, "orchestrator.kv_watermark=0.5"]).orchestrator.kv_watermark == 0.5


def test_ablations_of_the_file_do_not_apply_to_another_policy(file: Path) -> None:
    file.write_text(file.read_text() + '[orchestrator]\nablations = ["fill"]\n')
    config = read_config(file, [override("sync")])
    assert config.orchestrator.ablations == []
    (notice,) = dropped_settings(file, [override("sync")], config)
    assert notice.startswith(f"orchestrator.ablations = ['fill'] in {file} does not apply")
