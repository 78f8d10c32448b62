"""Identities and limits of a run: the types that events, actions and state share. No token data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

FIRST_IMAGE_ID = 2**30  # token ids from here to 2**31 - 1 identify images; no vocabulary is as large


def passes(reward: float, pass_threshold: float) -> bool:
    """Whether a response solves its prompt. Rounding does not count: the sum 0.7 + 0.2 + 0.1 is below 1."""
    return reward >= pass_threshold - 1e-6


class ProtocolError(Exception):
    """An event or a record contradicts the orchestrator's state."""


def require(condition: bool, event: object, rule: str, found: object) -> None:
    """Raise ProtocolError with the event, the rule and the state's value unless `condition` holds."""
    if not condition:
        raise ProtocolError(f"{event}: {rule}; the state has {found!r}")


class GroupId(NamedTuple):
    """The siblings sampled from dataset row `row` in epoch `epoch`."""

    epoch: int
    row: int

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """The inverse of `str`. Raises ValueError."""
        epoch, row = text.split("/")
        return cls(int(epoch), int(row))

    @property
    def is_held_out(self) -> bool:
        """Whether this is an evaluation prompt; its epoch is -1 - (the evaluated version)."""
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
        """Whether this is a response to an evaluation prompt."""
        return self.epoch < 0

    def __str__(self) -> str:
        return f"{self.epoch}/{self.row}/{self.sibling}"


class BatchMember(NamedTuple):
    """A group of a batch, its position in the dataset's order, and the version it was admitted at."""

    group: GroupId
    position: int
    version: int


class Chunk(NamedTuple):
    """Consecutive tokens sampled from one version; `digest` is that of the weights in use."""

    version: int
    digest: str
    num_tokens: int


class Branch(NamedTuple):
    """A second continuation of an episode's tokens, both as positions in its prompt and response.

    The tokens from `start` do not follow those before `start`, but those before `parent`, which is at most
    `start`.
    """

    start: int
    parent: int


# Parts of the scheduler that a run can switch off, to measure what each contributes: moves (live migration),
# shares (repartition of engines), fill (admission at older versions), update, pressure and period (triggers
# of a rebalance: a new version, KV pressure, the interval), remainders (largest-remainder rounding), room
# (free KV at the destinations as a condition of a repartition).
Ablation = Literal["moves", "shares", "fill", "update", "pressure", "period", "remainders", "room"]
ABLATIONS: tuple[Ablation, ...] = get_args(Ablation)


@dataclass(frozen=True, slots=True)
class AdaptiveStalenessRule:
    """Thresholds below which samples of the current age stay useful; `AdaptiveStaleness` applies them."""

    min_ess: float  # effective sample size, as a fraction of the tokens
    max_kl: float  # KL(sampling policy || policy in training), nats per token
    window: int  # batches averaged for one decision

    def __post_init__(self) -> None:
        if not 0 < self.min_ess < 1 or not self.max_kl > 0 or self.window < 1:
            raise ValueError(f"{self}: min_ess must be between 0 and 1, max_kl above 0 and window at least 1")


@dataclass(frozen=True, slots=True)
class CurriculumRule:
    """A prompt with an easy or a hard group is skipped in the next `skip_epochs` epochs.

    A group is easy or hard by its solved share: the fraction of its responses with a passing reward.
    """

    easy_threshold: float | None  # lowest solved share of an easy group; None: no group is easy
    hard_threshold: float | None  # highest solved share of a hard group; None: no group is hard
    skip_epochs: int

    def __post_init__(self) -> None:
        hard, easy = self.hard_threshold, self.easy_threshold
        is_ordered = hard is None or easy is None or hard < easy
        if (hard is None and easy is None) or not is_ordered or self.skip_epochs < 1:
            raise ValueError(
                f"{self}: it needs a threshold, hard_threshold below easy_threshold, and skip_epochs >= 1"
            )

    def skips_after(self, rewards: Sequence[float], pass_threshold: float) -> bool:
        """Whether a group with these rewards is easy or hard."""
        solved_share = sum(passes(reward, pass_threshold) for reward in rewards) / len(rewards)
        is_easy = self.easy_threshold is not None and solved_share >= self.easy_threshold
        return is_easy or (self.hard_threshold is not None and solved_share <= self.hard_threshold)


@dataclass(frozen=True, slots=True)
class EvaluationRule:
    """The initial, the last and every `every`-th version are evaluated on `num_prompts` held-out prompts."""

    every: int  # 0: only the initial and the last
    num_prompts: int
    num_answers: int  # per prompt

    def __post_init__(self) -> None:
        if self.every < 0 or min(self.num_prompts, self.num_answers) < 1:
            raise ValueError(f"{self}: every must be at least 0, num_prompts and num_answers at least 1")

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_answers

    def is_due(self, version: int, num_steps: int) -> bool:
        """Whether `version` of a run of `num_steps` steps is to be evaluated."""
        return version in (0, num_steps) or (self.every > 0 and version % self.every == 0)

    def request_id(self, version: int, index: int) -> RequestId:
        """The `index`-th request; responses to one prompt are consecutive, so that they share its KV."""
        return RequestId(-1 - version, *divmod(index, self.num_answers))


@dataclass(frozen=True, slots=True)
class Limits:
    """Guarantees, size and scheduling policy of a run. Raises ValueError for impossible values."""

    num_steps: int  # T
    batch_size: int  # P, groups per training step
    group_size: int  # G, siblings per group
    max_staleness: int  # S, in versions
    filter_groups: bool = False  # drop groups whose rewards are all equal
    stall_report_s: float = 5.0  # report a straggler after the trainer has waited this long
    batches_per_version: int | None = None  # one live version at a time, for this many batches; None: many
    slack: int = 0  # groups by which admission stays below the bound, so that stragglers can be passed
    weight_sync_interval: int = 1  # engines load every n-th version, unless the bound requires more
    defers_loads: bool = False  # engines load in turn, each once it has a free row
    skip_below_kl: float | None = None  # skip a version closer than this (nats per token); None: never
    max_retries: int = 0  # of a request whose environment fails, before its group fails
    num_queued: int = 0  # requests that an engine gets beyond its rows: it starts them as rows become free
    is_static: bool = False  # no migrations, no repartition
    breaks_c1: bool = False  # running requests continue on the version that their engine loads
    balance_running: bool = False  # balance running requests among the engines of a version
    prioritize_stragglers: bool = True  # engines decode only the requests that the trainer waits for
    rebalance_interval_s: float = 1.0
    max_migrations: int = 5_000  # requests that one repartition may set in motion
    kv_watermark: float = 0.9  # KV usage of an engine above which requests migrate away
    evaluation: EvaluationRule | None = None  # None: no evaluation
    adaptive_staleness: AdaptiveStalenessRule | None = None  # None: S is fixed
    curriculum: CurriculumRule | None = None  # None: no prompt is skipped
    pass_threshold: float = 1.0  # a response with this reward solves its prompt
    ablations: tuple[str, ...] = ()  # of ABLATIONS

    def __post_init__(self) -> None:
        from_0 = ("num_steps", "max_staleness", "slack", "max_retries", "num_queued")
        from_1 = ("batch_size", "group_size", "weight_sync_interval", "max_migrations")
        for name in (*from_0, *from_1):
            if getattr(self, name) < (minimum := int(name in from_1)):
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {minimum}")
        if self.batches_per_version is not None and self.batches_per_version < 1:
            raise ValueError(f"batches_per_version = {self.batches_per_version} must be at least 1")
        if not self.rebalance_interval_s > 0:
            raise ValueError(f"rebalance_interval_s = {self.rebalance_interval_s} must be above 0")
        if self.skip_below_kl is not None and not self.skip_below_kl > 0:
            raise ValueError(f"skip_below_kl = {self.skip_below_kl} must be above 0")
        if self.breaks_c1 and (self.batches_per_version is not None or not self.is_static):
            raise ValueError("breaks_c1 = True requires is_static = True and batches_per_version = None")
        if self.adaptive_staleness is not None and self.max_staleness == 0:
            raise ValueError("adaptive_staleness requires max_staleness of at least 1: 0 cannot be lowered")
        if not {*self.ablations} <= {*ABLATIONS}:
            raise ValueError(f"ablations = {self.ablations} must be taken from {ABLATIONS}")
        if self.filter_groups and self.group_size == 1:
            raise ValueError("filter_groups with group_size = 1 would filter every group")

    @property
    def has_migrations(self) -> bool:
        """Whether running requests may migrate."""
        return not self.is_static and "moves" not in self.ablations

    @property
    def loads_eagerly(self) -> bool:
        """Whether engines load every version as soon as they can."""
        is_lazy = self.weight_sync_interval > 1 or self.defers_loads or self.skip_below_kl is not None
        return self.batches_per_version is None and not is_lazy

    def deadline(self, version: int, reduction: int = 0) -> int:
        """Last step that may train a group admitted at `version`, with S lowered by `reduction`.

        min(v + S - reduction, T - 1)
        """
        return min(version + self.max_staleness - reduction, self.num_steps - 1)
