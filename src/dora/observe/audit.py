"""`dora audit`: C1, C2 and C3, derived again from `journal.jsonl` and `samples.sqlite` alone.

Nothing of the orchestrator's rules or state is imported here: the audit shares with it only the
words of the record, so that a mistake of one is not a mistake of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dora.core.wording import counted
from dora.observe.fates import Fates
from dora.observe.journal import read_journal
from dora.observe.provenance import Provenance
from dora.observe.samples import read_samples

MAX_PRINTED = 5  # findings per guarantee


@dataclass(frozen=True, slots=True)
class Counts:
    """What the audit looked at; groups, unless said otherwise."""

    trajectories: int  # requests finished
    versions: int  # that trajectories were sampled from
    admitted: int
    trained: int
    filtered: int
    failed: int
    pending: int
    staleness: tuple[int, int] | None  # least and most of a group in a batch; None without any
    max_staleness: int  # the bound
    prefilled_tokens: int = 0  # whose KV was computed again, for their requests moved without it
    segmented: int | None = None  # trajectories of several versions, where the policy lets go of C1


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict; `findings` are sentences, each begins with the guarantee it breaks."""

    findings: tuple[str, ...]
    counts: Counts
    is_torn: bool  # the journal's last line was cut off and left out

    @property
    def c1(self) -> bool:
        """Not kept by policies that let go of it, whatever else is in order."""
        return self.counts.segmented is None and not self.against("C1")

    @property
    def c2(self) -> bool:
        return not self.against("C2")

    @property
    def c3(self) -> bool:
        return not self.against("C3")

    def against(self, guarantee: str) -> list[str]:
        """The findings against "C1", "C2" or "C3"."""
        return [finding for finding in self.findings if finding.startswith(guarantee)]


def check(run: Path) -> Audit:
    """Audit the run in a folder. Raises InputError where its files cannot be read."""
    journal, samples = read_journal(run), read_samples(run)
    breaks_c1 = journal.limits.breaks_c1
    provenance = Provenance(samples, breaks_c1=breaks_c1)
    fates = Fates(journal.limits, journal.num_prompts, samples)
    for line in journal.lines:
        provenance.read(line.record)
        fates.read(line.record)
    fates.close()
    staleness = fates.staleness
    counts = Counts(
        trajectories=provenance.num_trajectories,
        versions=len(provenance.versions),
        admitted=fates.num_admitted,
        trained=fates.ends["trained"],
        filtered=fates.ends["filtered"],
        failed=fates.ends["failed"],
        pending=fates.ends["pending"],
        staleness=(min(staleness), max(staleness)) if staleness else None,
        max_staleness=journal.limits.max_staleness,
        prefilled_tokens=provenance.num_prefilled,
        segmented=provenance.num_segmented if breaks_c1 else None,
    )
    findings = (
        *(f"C1: {sentence}" for sentence in provenance.findings),
        *(f"C2: {sentence}" for sentence in fates.findings),
        *(f"C3: {sentence}" for sentence in fates.findings_late),
    )
    return Audit(findings, counts, journal.is_torn)


def main(run: Path) -> int:
    """Print one line per guarantee and the first findings against it; exit code 1 on a violation."""
    audit = check(run)
    if audit.is_torn:
        print("the journal's last line was cut off and is left out")
    for guarantee, described in describe(audit.counts).items():
        findings = audit.against(guarantee)
        is_given_up = guarantee == "C1" and audit.counts.segmented is not None
        verdict = "VIOLATED" if findings else "given up" if is_given_up else "ok"
        print(f"{guarantee} {verdict}  {described}")
        for finding in findings[:MAX_PRINTED]:
            print(f"   {finding}")
        if len(findings) > MAX_PRINTED:
            print(f"   and {len(findings) - MAX_PRINTED:,} more")
    return 1 if audit.findings else 0


def describe(counts: Counts) -> dict[str, str]:
    """What each guarantee is about in this run, in numbers."""
    ends = " + ".join(
        f"{getattr(counts, end):,} {end}" for end in ("trained", "filtered", "failed", "pending")
    )
    seen = "{}..{}".format(*counts.staleness) if counts.staleness else "of no batch"
    drawn = "each from one version's bytes"
    if counts.segmented is not None:
        drawn = f"{counts.segmented:,} of them from several, by the run's update policy"
    if counts.prefilled_tokens:
        drawn += f", {counted(counts.prefilled_tokens, 'token')} re-prefilled in moves"
    return {
        "C1": f"{counted(counts.trajectories, 'answer')}, {counted(counts.versions, 'version')}, {drawn}",
        "C2": f"{counted(counts.admitted, 'group')} admitted = {ends}",
        "C3": f"staleness {seen}, bound {counts.max_staleness}",
    }
