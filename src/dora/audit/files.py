"""The files of a run against the digests in its journal: which were changed since they were written.

The journal's lines form a hash chain; its header has the digest of `config.toml`, its `files` lines those of
checkpoints, and its seal those of all files at the end of the run. A change of a file is not
found if all digests are computed again: compare the seal, which `dora audit` prints, with a copy of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from dora.journal.reader import CONFIG_FILE, SUMMARY_FILE, Journal, JournalLine
from dora.journal.writer import file_digest
from dora.text import plural
from dora.trainer.checkpoint_folders import MANIFEST, checkpoint_folders, find_damage

CHECKPOINTS = "checkpoints"


class FileAudit:
    """Checks the files of a run once; `findings` are sentences, `notes` say what could not be checked."""

    def __init__(self, run: Path, journal: Journal) -> None:
        self.findings: list[str] = []
        self.notes: list[str] = []
        self.num_files = 0  # whose digest was compared
        self._run, self._journal = run, journal
        self._check_chain()
        _check_times(journal.lines, self.findings)
        self._check_config()
        self._check_seal()
        for name, digest in journal.recorded_digests().items():
            self._check_file(name, digest)
        self._check_checkpoints()

    def _check_chain(self) -> None:
        for number in self._journal.chain_breaks:
            self.findings.append(
                f"line {number} of the journal was changed, or lines before it were removed or inserted"
            )

    def _check_config(self) -> None:
        path = self._run / CONFIG_FILE
        if not self._journal.config_digest:
            self.notes.append(f"the journal has no digest of {CONFIG_FILE}")
        elif not path.is_file():
            self.findings.append(f"{CONFIG_FILE} is missing")
        elif hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() != self._journal.config_digest:
            self.findings.append(f"{CONFIG_FILE} has changed since the run started")
        else:
            self.num_files += 1

    def _check_seal(self) -> None:
        if self._journal.is_sealed:
            return
        if (self._run / SUMMARY_FILE).is_file():
            self.findings.append(
                f"{SUMMARY_FILE} exists, and the journal does not end with a seal: its last lines were "
                "removed, or the run was killed while it ended"
            )
        else:
            self.notes.append("the journal has no seal, as the run is in progress or was killed")

    def _check_file(self, name: str, digest: str) -> None:
        path = self._run / name
        if not path.is_file():
            if path.name == MANIFEST and not self._is_in_seal(name):
                return  # an older checkpoint, which the run has removed
            self.findings.append(f"{name} is missing")
        elif file_digest(path) != digest:
            self.findings.append(f"{name} has changed since it was written")
        else:
            self.num_files += 1

    def _is_in_seal(self, name: str) -> bool:
        """Whether the file was there when the run ended."""
        return self._journal.is_sealed and name in self._journal.files[-1].sha256

    def _check_checkpoints(self) -> None:
        """Every file of a checkpoint has its digest in the manifest, whose digest is in the journal."""
        recorded = self._journal.recorded_digests()
        for folder in checkpoint_folders(self._run / CHECKPOINTS).values():
            name = f"{CHECKPOINTS}/{folder.name}"
            if f"{name}/{MANIFEST}" not in recorded:
                sentence = f"{name} is not in the journal"
                (self.findings if self._journal.is_sealed else self.notes).append(sentence)
            if damage := find_damage(folder):
                self.findings.append(f"{name} is damaged: {damage}")


def _check_times(lines: Sequence[JournalLine], findings: list[str]) -> None:
    """Times are finite and do not step back."""
    before, num = 0.0, 0
    for line in lines:
        if not (math.isfinite(line.t_s) and line.t_s >= before):
            num += 1
            if num == 1:
                findings.append(f"the time of seq {line.seq} is {line.t_s}, after {before}")
            continue
        before = line.t_s
    if num > 1:
        findings.append(f"{plural(num, 'time')} step back or are no numbers")
