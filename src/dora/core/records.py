"""The nouns, in journey order.

Identities, lengths, versions and rewards; never a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ProtocolError(Exception):
    """A station told the orchestrator a fact that cannot be true."""


class GroupId(NamedTuple):
    """The siblings sampled from one prompt: dataset row `row`, on its `epoch`-th visit."""

    epoch: int
    row: int

    @property
    def is_held_out(self) -> bool:
        """A prompt of an evaluation is no group: its epoch is -1 - the version that answers it."""
        return self.epoch < 0

    def __str__(self) -> str:
        return f"{self.epoch}/{self.row}"


class RequestId(NamedTuple):
    """One sibling of a group."""

    epoch: int
    row: int
    sibling: int

    @property
    def group(self) -> GroupId:
        return GroupId(self.epoch, self.row)

    @property
    def is_held_out(self) -> bool:
        """One answer of an evaluation."""
        return self.epoch < 0

    def __str__(self) -> str:
        return f"{self.epoch}/{self.row}/{self.sibling}"


class Member(NamedTuple):
    """A group in a batch, with its position in the dataset's order, and the version it was admitted at."""

    group: GroupId
    position: int
    version: int


class Chunk(NamedTuple):
    """A run of tokens sampled from one version's weights; digest of the bytes that were used."""

    version: int
    digest: str
    num_tokens: int


# Parts of the rules that a run may do without, so that what each is worth can be measured.
ABLATIONS = ("moves", "shares", "fill", "update", "pressure", "period", "remainders", "room")


@dataclass(frozen=True, slots=True)
class AgingRule:
    """What a batch must still say for its age to be allowed; `Aging` has the rule that reads it."""

    min_ess: float  # effective sample size, as a share of the tokens
    max_kl: float  # KL(policy that sampled || policy in training), nats per token
    window: int  # batches that are judged together

    def __post_init__(self) -> None:
        if not 0 < self.min_ess < 1 or not self.max_kl > 0 or self.window < 1:
            raise ValueError(f"{self}: min_ess is between 0 and 1, max_kl above 0, window at least 1")


@dataclass(frozen=True, slots=True)
class EvaluationRule:
    """Every so many-th version answers the held-out prompts, while the run goes on."""

    every: int
    num_prompts: int
    num_answers: int  # to each prompt

    def __post_init__(self) -> None:
        if min(self.every, self.num_prompts, self.num_answers) < 1:
            raise ValueError(f"{self}: each must be at least 1")

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_answers

    def request(self, version: int, index: int) -> RequestId:
        """The answers to a prompt stand in a row, so that they share its KV."""
        return RequestId(-1 - version, *divmod(index, self.num_answers))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run promises and how large it is."""

    num_steps: int  # T
    batch_size: int  # P, groups per training step
    group_size: int  # G, siblings per group
    max_staleness: int  # S, in versions
    filter_groups: bool = False  # drop (and name) groups whose rewards are all equal
    stall_report_s: float = 5.0  # a trainer that waits longer gets its straggler named
    batches_per_version: int | None = None  # one live version at a time, for so many batches; None: many
    slack: int = 0  # groups by which admission stays below the bound, so that stragglers can be passed
    load_interval: int = 1  # engines take every so many-th version, unless the bound asks for more
    is_deferred: bool = False  # they do so one after another, each once it has a free row
    skip_below_kl: float | None = None  # nats per token to the newest below which it is left out; None: never
    is_static: bool = False  # requests and engines stay where they are
    breaks_c1: bool = False  # answers under way go on with the version their engine takes
    level_running: bool = False  # even out running requests among engines of one version
    rush: bool = True  # a waited-for request decodes alone on its engine
    rebalance_interval_s: float = 1.0
    max_moves: int = 5_000  # requests that one decision may set moving for other versions
    kv_watermark: float = 0.9  # share of an engine's KV in use above which requests move away
    evaluation: EvaluationRule | None = None  # None: not during training
    aging: AgingRule | None = None  # how S is lowered while old samples say little; None: never
    without: tuple[str, ...] = ()  # of ABLATIONS

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "group_size", "max_moves"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.batches_per_version is not None and self.batches_per_version < 1:
            raise ValueError(f"batches_per_version = {self.batches_per_version} must be at least 1")
        if self.load_interval < 1 or self.slack < 0 or self.rebalance_interval_s <= 0:
            raise ValueError("load_interval is at least 1, slack at least 0, rebalance_interval_s above 0")
        if self.skip_below_kl is not None and not self.skip_below_kl > 0:
            raise ValueError(f"skip_below_kl = {self.skip_below_kl} must be above 0")
        if self.breaks_c1 and (self.batches_per_version is not None or not self.is_static):
            raise ValueError("breaks_c1 goes with is_static, and without batches_per_version")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness = {self.max_staleness} must be at least 0")
        if self.aging is not None and self.max_staleness == 0:
            raise ValueError("max_staleness = 0 leaves nothing for aging to lower")
        if not {*self.without} <= {*ABLATIONS}:
            raise ValueError(f"without = {self.without} names parts other than {ABLATIONS}")
        if self.filter_groups and self.group_size == 1:
            raise ValueError("filter_groups with group_size = 1 would filter every group")

    @property
    def is_eager(self) -> bool:
        """Whether engines take every version as soon as they can, unasked."""
        is_lazy = self.load_interval > 1 or self.is_deferred or self.skip_below_kl is not None
        return self.batches_per_version is None and not is_lazy

    def deadline(self, version: int, lowered: int = 0) -> int:
        """Last step that may train a group admitted at `version`, with S lowered: min(v + S, T - 1)."""
        return min(version + self.max_staleness - lowered, self.num_steps - 1)
