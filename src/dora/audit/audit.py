"""`dora audit`: derive C1, C2 and C3 again from `journal.jsonl` and `samples.sqlite`, and compare the run's
files with their digests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dora.atomic_file import write_text_atomically
from dora.audit.files import CHECKPOINTS, FileAudit
from dora.audit.guarantees import GuaranteeAudit
from dora.audit.samples import SampleAudit
from dora.config.load import read_run_config
from dora.config.schema import Config
from dora.core.events import RequestFinished
from dora.errors import DamagedRunError
from dora.journal.reader import JOURNAL_FILE, SAMPLES_FILE, SUMMARY_FILE, Journal, read_journal, read_samples
from dora.journal.writer import seal
from dora.text import plural
from dora.trainer.checkpoint_folders import checkpoint_folders

FILES = "files"
MAX_PRINTED = 5  # findings per guarantee


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The verdict; each finding is a sentence that starts with the guarantee it breaks, or with FILES."""

    findings: tuple[str, ...]
    notes: tuple[str, ...]  # sentences about what could not be checked, or what deserves a look
    journal: Journal
    guarantees: GuaranteeAudit
    files: FileAudit
    stored: SampleAudit

    @property
    def c1(self) -> bool:
        """False for an update policy that does not promise C1, even without findings."""
        return not self.journal.limits.breaks_c1 and not self.findings_against("C1")

    @property
    def c2(self) -> bool:
        return not self.findings_against("C2")

    @property
    def c3(self) -> bool:
        return not self.findings_against("C3")

    def findings_against(self, guarantee: str) -> list[str]:
        """The findings against "C1", "C2", "C3" or FILES."""
        return [finding for finding in self.findings if finding.startswith(guarantee)]


def main(run: Path) -> int:
    """Print one line per guarantee and the first findings against it; exit code 1 on a violation."""
    try:
        result = check(run)
    except DamagedRunError as error:
        print(f"{FILES} VIOLATED  {error}; nothing else can be checked")
        return 1
    if result.journal.is_torn:
        print("the journal's last line was cut off and is not audited")
    for guarantee, description in describe(result).items():
        findings = result.findings_against(guarantee)
        is_waived = guarantee == "C1" and result.journal.limits.breaks_c1
        verdict = "VIOLATED" if findings else "waived" if is_waived else "ok"
        print(f"{guarantee} {verdict}  {description}")
        for finding in findings[:MAX_PRINTED]:
            print(f"   {finding}")
        if len(findings) > MAX_PRINTED:
            print(f"   and {len(findings) - MAX_PRINTED:,} more")
    for note in result.notes:
        print(f"note: {note}")
    return 1 if result.findings else 0


def check(run: Path) -> AuditResult:
    """Audit the run in a folder. Raises InputError if its files cannot be read."""
    journal = read_journal(run)
    if not (run / SAMPLES_FILE).is_file() and any(
        isinstance(x.record, RequestFinished) for x in journal.lines
    ):
        raise DamagedRunError(f"{run / SAMPLES_FILE} is missing, and the journal has responses")
    samples = read_samples(run)
    files = FileAudit(run, journal)
    config = _read_config(run)
    guarantees = GuaranteeAudit(journal.limits, journal.num_prompts, samples, journal.source_rows)
    images = {int(path.stem, 16) for path in run.glob("images/*.npy")}
    stored = SampleAudit(config, _vocab_size(run, config), images)
    for line in journal.lines:
        guarantees.observe(line.record)
        stored.observe(line.record)
    guarantees.close()
    stored.close(run, is_sealed=journal.is_sealed)
    findings = (
        *sorted(guarantees.findings, key=lambda finding: finding[:2]),
        *(f"{FILES}: {sentence}" for sentence in (*files.findings, *stored.findings)),
    )
    notes = (*files.notes, *stored.notes, *guarantees.versions.notes)
    return AuditResult(findings, notes, journal, guarantees, files, stored)


def _read_config(run: Path) -> Config | None:
    """The run's configuration; None if it cannot be read: if it is damaged, its digest reports it."""
    try:
        return read_run_config(run)
    except DamagedRunError:
        return None


def _vocab_size(run: Path, config: Config | None) -> int | None:
    """Size of the vocabulary, by the newest checkpoint or the initial model; None if neither is there."""
    folders = [*checkpoint_folders(run / CHECKPOINTS).values()]
    folders += [] if config is None else [Path(config.model.path)]
    for folder in folders:
        try:
            content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return int(content.get("text_config", content)["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def describe(result: AuditResult) -> dict[str, str]:
    """What was audited for each guarantee, in numbers."""
    versions, groups, stored = result.guarantees.versions, result.guarantees.groups, result.stored
    limits, ages = result.journal.limits, groups.staleness
    outcomes = " + ".join(
        f"{groups.outcomes[outcome]:,} {outcome}" for outcome in ("trained", "filtered", "failed", "pending")
    )
    staleness = f"{min(ages)}..{max(ages)}" if ages else "of no batch yet"
    sampled = "each from the weights of one version"
    if limits.breaks_c1:
        sampled = f"{versions.num_segmented:,} of them from several versions, as the update policy allows"
    if versions.num_prefilled:
        sampled += f", {plural(versions.num_prefilled, 'token')} re-prefilled in migrations"
    if versions.num_losses:
        sampled += (
            f"; engines, or the whole run, were lost {plural(versions.num_losses, 'time')}: "
            f"{plural(versions.num_kept_tokens, 'token')} of their requests kept, "
            f"{versions.num_lost_tokens:,} of the reported ones lost, "
            f"{plural(versions.num_restarted, 'request')} restarted from the prompt"
        )
    if stored.num_branches:
        sampled += f", branches of changed histories: {stored.num_branches:,}"
    responses = plural(versions.num_trajectories, "response")
    lines, samples = plural(len(result.journal.lines), "line"), plural(stored.num_samples, "sample")
    return {
        "C1": f"{responses}, {plural(len(versions.versions), 'version')}, {sampled}",
        "C2": f"{plural(groups.num_admitted, 'group')} admitted = {outcomes}",
        "C3": f"staleness {staleness}, bound {limits.max_staleness}",
        FILES: f"{lines}, {samples} and {plural(result.files.num_files, 'file')} compared with the journal's "
        "digests",
    }


def write_verdicts(run: Path, result: AuditResult) -> None:
    """Write c1, c2 and c3 into the summary of a run that has ended, and seal it again."""
    path = run / SUMMARY_FILE
    if not path.is_file():
        return
    summary = json.loads(path.read_text(encoding="utf-8")) | {
        "c1": result.c1,
        "c2": result.c2,
        "c3": result.c3,
    }
    write_text_atomically(path, json.dumps(summary, indent=2) + "\n")
    seal(run / JOURNAL_FILE)
