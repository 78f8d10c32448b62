"""What an admission must keep beside the bound: slack, expiry, the one live version.

Part of the checker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora.core.records import GroupId
from dora.sim.seats import require

if TYPE_CHECKING:
    from dora.sim.checker import Ledger


def check(ledger: Ledger, group: GroupId, version: int) -> None:
    """The group has just been entered."""
    _check_slack(ledger, group)
    _check_expiry(ledger, version)
    if ledger.limits.batches_per_version is not None:
        _check_single_version(ledger, version, ledger.limits.batches_per_version)


def _check_slack(ledger: Ledger, group: GroupId) -> None:
    """So many groups fewer than the bound allows, but always enough for one batch."""
    limits = ledger.limits
    most = max(limits.batch_size, (ledger.ages.staleness + 1) * limits.batch_size - limits.slack)
    num_open = ledger.open.total() + ledger.num_committed
    require(not limits.slack or num_open <= most, f"admitting {group} uses up the slack: {num_open} open")


def _check_expiry(ledger: Ledger, version: int) -> None:
    """No group at an old version whose deadline is upon us, once the newest is near."""
    newest = max(ledger.store)
    if version < newest and ledger.deadline(version) <= ledger.next_step:
        staying = (e for e in ledger.seats.engines.values() if not e.is_draining)
        is_near = any(newest in e.held or e.loading == newest for e in staying)
        require(not is_near, f"version {version} is admitted at, and is about to expire")


def _check_single_version(ledger: Ledger, version: int, num_batches: int) -> None:
    evaluated = {ledger.held_out.version: len(ledger.held_out.running)}
    others = [v for v, count in ledger.pins.items() if count > evaluated.get(v, 0) and v != version]
    require(not others, f"version {version} is admitted beside {others}, and only one may live")
    most = (num_batches if version else ledger.limits.max_staleness + 1) * ledger.limits.batch_size
    require(ledger.live[version] <= most, f"version {version} has more than {most} groups")
