"""`dora train --resume RUN`: whether a run can be resumed, with which settings, and its folder afterwards.

`prepare_run_dir` changes the folder, after all checks have passed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from dora.config.load import parse_config, read_config
from dora.config.schema import LIST_SECTIONS, Config, iter_values
from dora.config.toml import to_toml
from dora.core.actions import Stop
from dora.core.events import Published
from dora.engine.kernels.workspace import DTYPES
from dora.errors import FinishedRunError, InputError
from dora.journal.extensions import Extension, find_extensions, read_extensions
from dora.journal.reader import CONFIG_FILE, JOURNAL_FILE, Journal, explain_missing_run, read_journal
from dora.journal.writer import file_digest
from dora.metrics.status import driver_of
from dora.model.pretrained import load_pretrained
from dora.model.weights import weight_digest
from dora.runtime.run_dir import CODE, INCOMING_PARTS, code_files
from dora.text import plural
from dora.trainer.checkpoint import SNAPSHOT_FILE
from dora.trainer.checkpoint_folders import (
    MANIFEST,
    checkpoint_folders,
    find_damage,
    recover_replaced,
    remove_after,
)
from dora.trainer.recipe import EarlierSchedule

SUMMARY = "summary.json"
CHANGEABLE_KEYS = (  # neither the guarantees depend on these nor, up to rounding, the computed weights
    "runtime.*",
    "ray.*",
    "journal.*",
    "metrics.*",
    "engine.num_engines",
    "engine.max_num_seqs",
    "engine.version_slots",
    "engine.num_kv_blocks",
    "engine.max_prefill_tokens",
    "engine.options",
    "engine.min_step_time",
    "fleet.*.max_num_seqs",
    "fleet.*.num_engines",
    "fleet.*.version_slots",
    "fleet.*.options",
    "env.hosts",
    "env.token_file",
    "env.num_workers",
    "env.timeout_s",
    "reward.timeout_s",
    "reward.num_workers",
    "reward_task.*.timeout_s",
    "reward_task.*.num_workers",
    "reward.max_failed_fraction",
    "trainer.save_freq",
    "trainer.keep_last",
    "trainer.keep_best",
    "trainer.num_ranks",
    "trainer.micro_batch_tokens",
    "trainer.logits_chunk_tokens",
    "trainer.activation_checkpointing",
    "trainer.offload_optimizer",
    "service.host",
    "service.port",
    "service.token_file",
    "service.max_body_bytes",
    "service.session_timeout_s",
    "service.idle_timeout_s",
    "service.linger_s",
)

LR_DECAY, MIN_LR_RATIO = SCHEDULE_KEYS = ("trainer.lr_decay", "trainer.min_lr_ratio")
EXTENSION_KEYS = ("run.steps", *SCHEDULE_KEYS)  # these may change if the run gets more steps


def resumed_config(run: Path, overrides: Sequence[str], given: Config | None = None) -> Config:
    """The configuration to resume a run with. Raises InputError if the run or an override forbids it.

    `given` is a whole configuration, `overrides` included, that replaces the recorded one.
    """
    path = run / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"--resume {explain_missing_run(run, CONFIG_FILE)}")
    if driver_of(run) is not None:
        raise InputError(f"--resume {run}: this run is in progress; stop it first")
    extended = _extension_overrides(run)
    before = read_config(path, extended)
    if given is None:
        config = read_config(path, [*extended, *overrides])
    else:  # without the keys that config.toml leaves out, because they have no effect
        config = parse_config(tomllib.loads(to_toml(given)))
    is_longer = config.run.steps > before.run.steps
    if before.run.steps and not config.run.steps:
        raise InputError(f"--resume {run}: this run trains; name another folder for the evaluation")
    if is_longer and not before.run.steps:
        raise InputError(
            f"--resume {run}: this run only evaluates, without settings of a trainer; to train, start a run "
            "with the configuration file that was evaluated"
        )
    changeable = (*CHANGEABLE_KEYS, *(EXTENSION_KEYS if is_longer else ()))
    changed = _values(config)
    for key, old in _values(before).items():
        new = changed.get(key)
        if old != new and not any(fnmatchcase(key, pattern) for pattern in changeable):
            remedy = (
                "a run can only get more steps; to end it earlier, stop it with Ctrl-C"
                if key == "run.steps"
                else f"start another run{_continued(run)}, or change only {', '.join(CHANGEABLE_KEYS)}"
            )
            if key in SCHEDULE_KEYS:
                remedy = "it may change together with a larger run.steps"
            raise InputError(
                f"--resume {run}: {key} was {old!r} and cannot become {new!r}, because the recorded steps "
                f"depend on it; {remedy}"
            )
    if is_longer:
        _check_schedule(run, before, config, overrides)
    return config


def _continued(run: Path) -> str:
    """How another run starts with the newest weights of this one; empty without a checkpoint."""
    newest = next(iter(checkpoint_folders(run / "checkpoints").values()), None)
    return "" if newest is None else f" from its weights and optimizer (--continue-from {newest})"


def _values(config: Config) -> dict[str, Any]:
    """The value of each key, and for each list of tables their names in order."""
    names = {section: [table.name for table in getattr(config, section)] for section in LIST_SECTIONS}
    return {**names, **dict(iter_values(config))}


def _extension_overrides(run: Path) -> list[str]:
    """What earlier resumes have changed of the recorded configuration, as overrides."""
    overrides = []
    for extension in read_extensions(run)[-1:]:
        overrides += [f"run.steps={extension.num_steps}", f"{LR_DECAY}={extension.lr_decay}"]
        if extension.lr_decay != "constant":
            overrides.append(f"{MIN_LR_RATIO}={extension.min_lr_ratio}")
    return overrides


def _check_schedule(run: Path, before: Config, config: Config, overrides: Sequence[str]) -> None:
    """Raises InputError if more steps change a learning rate that the user has not stated again."""
    old, new = before.trainer, config.trainer
    is_stated = any(override.partition("=")[0].strip() in SCHEDULE_KEYS for override in overrides)
    is_changed = (old.lr_decay, old.min_lr_ratio) != (new.lr_decay, new.min_lr_ratio)
    if old.lr_decay != "constant" and not (is_stated or is_changed):
        lowest = f"{old.lr * old.min_lr_ratio:g}"
        raise InputError(
            f"--resume {run} with run.steps = {config.run.steps}: {LR_DECAY} = {old.lr_decay!r} "
            f"lowers the learning rate to {lowest} at step {before.run.steps}, so the schedule of the steps "
            f"from now on must be stated: --set {LR_DECAY}=constant (trainer.lr = {old.lr:g} for each of "
            f"them), or --set {LR_DECAY}=linear or cosine (it falls to {lowest} at step {config.run.steps})"
        )


def earlier_schedules(
    run: Path, num_steps: int, extensions: Sequence[Extension]
) -> tuple[EarlierSchedule, ...]:
    """The learning-rate schedules before the last of `extensions`; the run began with `num_steps` steps."""
    if not extensions:
        return ()
    trainer = read_config(run / CONFIG_FILE).trainer
    decay: tuple[Any, float] = trainer.lr_decay, trainer.min_lr_ratio
    schedules = []
    for extension in extensions:
        schedules.append(EarlierSchedule(extension.from_step, num_steps, *decay))
        num_steps, decay = extension.num_steps, (extension.lr_decay, extension.min_lr_ratio)
    return tuple(schedules)


def has_recorded_events(run: Path) -> bool:
    """Whether the journal of a run has a complete line of an event or action."""
    path = run / JOURNAL_FILE
    with path.open("rb") if path.is_file() else io.BytesIO() as file:
        return any(line.startswith(b'{"seq": 0,') and line.endswith(b"\n") for line in file)


def read_recorded_journal(
    run: Path, num_prompts: int | None, num_steps: int | None = None, *, repeats_steps: bool = True
) -> Journal:
    """The journal of a run to resume. Raises InputError if it cannot be resumed, or has finished.

    `num_steps` is how many steps the resumed run has; None: as many as before. `repeats_steps`: a run that
    has finished and whose last checkpoint was removed or is damaged trains the lost steps again.
    """
    journal = read_journal(run)
    if journal.chain_breaks:
        raise InputError(
            f"{run / JOURNAL_FILE}, line {journal.chain_breaks[0]}: it was changed, or lines before it were "
            "removed or inserted; restore the file that the run wrote"
        )
    config = (run / CONFIG_FILE).read_bytes()
    if journal.config_digest != hashlib.blake2b(config, digest_size=16).hexdigest():
        raise InputError(
            f"{run / CONFIG_FILE} has changed since the run started; restore its old content, and change "
            "settings with --set"
        )
    if journal.num_prompts != num_prompts:
        raise InputError(
            f"--resume {run}: the dataset had {journal.num_prompts} prompts and now has {num_prompts}; "
            "restore the old dataset"
        )
    recover_replaced(run / "checkpoints")
    extensions = find_extensions(line.record for line in journal.lines)
    last_step = extensions[-1].num_steps if extensions else journal.limits.num_steps
    is_done = num_steps in (None, last_step) and isinstance(journal.lines[-1].record, Stop)
    if is_done and _has_finished(run):
        last = checkpoint_folders(run / "checkpoints").get(last_step)
        if not last_step:
            raise FinishedRunError(f"--resume {run}: this run, which only evaluates, has finished")
        finished = f"--resume {run}: this run has finished all its {last_step} steps"
        if last is not None and not find_damage(last):
            raise FinishedRunError(f"{finished}; --set run.steps=N, with a larger N, gives it more")
        if not repeats_steps:
            raise FinishedRunError(
                f"{finished}, and its last checkpoint was removed or is damaged; dora train --resume {run} "
                "trains the lost steps again"
            )
    return journal


def check_not_begun(run: Path) -> None:
    """Raises InputError if a run without a recorded event has checkpoints, which a new start would remove."""
    if folders := checkpoint_folders(run / "checkpoints"):
        raise InputError(
            f"--resume {run}: {JOURNAL_FILE} has no event, although {plural(len(folders), 'checkpoint')} "
            f"exist; restore it, or start a new run from the newest weights: dora train {run / CONFIG_FILE} "
            f"--out NEW --set model.path={next(iter(folders.values()))}"
        )


def find_checkpoint(run: Path, journal: Journal) -> tuple[int, Path | None, tuple[str, ...]]:
    """Step and folder of the newest checkpoint that is whole and that the journal covers.

    The last value says why newer ones cannot be used. (0, None, ()) if there is no checkpoint. Raises
    InputError if there are only unusable ones.
    """
    unusable: list[str] = []
    num_lines, recorded = len(journal.lines), journal.recorded_digests()
    for step, folder in checkpoint_folders(run / "checkpoints").items():
        reason = find_damage(folder)
        digest = recorded.get(f"checkpoints/{folder.name}/{MANIFEST}")
        if not reason and digest not in (None, file_digest(folder / MANIFEST)):
            reason = f"{MANIFEST} has changed since the run wrote it"
        if (
            not reason
            and (seq := json.loads((folder / SNAPSHOT_FILE).read_text(encoding="utf-8"))["seq"]) > num_lines
        ):
            reason = f"it needs {seq} lines of {JOURNAL_FILE}, which has {num_lines}"
        if not reason:
            return step, folder, tuple(unusable)
        unusable.append(f"{folder} cannot be used: {reason}")
    if unusable:
        raise InputError(
            f"{'; '.join(unusable)}. No other checkpoint exists: restore the files, or train all steps again "
            f"from the initial model: rm -r {run / 'checkpoints'} && dora train --resume {run}"
        )
    return 0, None, ()


def _has_finished(run: Path) -> bool:
    """Whether the run was not killed before it wrote its summary; a damaged one counts as missing."""
    summary = _read_json_object(run / SUMMARY)
    return summary is not None and not summary.get("stopped")


def find_damaged_results(run: Path) -> tuple[str, ...]:
    """A warning if the summary, which a resume replaces, is damaged."""
    is_damaged = (run / SUMMARY).is_file() and _read_json_object(run / SUMMARY) is None
    return (f"{run / SUMMARY} is damaged and is written again at the end",) if is_damaged else ()


def find_changed_code(config: Config, journal: Journal) -> tuple[str, ...]:
    """A warning for each of the user's files that has changed since the run used it last."""
    copies = [line.sha256 for line in journal.files if any(n.startswith(CODE) for n in line.sha256)]
    changed = [file for name, file in code_files(config).items() if copies and name not in copies[-1]]
    return tuple(f"{file} has changed; the steps from now on use the new file" for file in changed)


def _read_json_object(path: Path) -> dict[str, Any] | None:
    """None if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def prepare_run_dir(run: Path, from_step: int) -> None:
    """Make the run folder ready to continue after `from_step`.

    Cuts off an incomplete last line of the journal, and removes the summary, incomplete uploads of weights
    and the checkpoints of later steps, which are redone.
    """
    path = run / JOURNAL_FILE
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
    (run / SUMMARY).unlink(missing_ok=True)
    shutil.rmtree(run / INCOMING_PARTS, ignore_errors=True)
    remove_after(run / "checkpoints", from_step)


def critic_digest(config: Config) -> str | None:
    """Digest of the weights in critic.path; None if there is no critic, or if it starts from the policy."""
    return None if config.critic.path is None else _digest(config.critic.path, torch.float32)


def check_initial_weights(config: Config, journal: Journal, *, has_checkpoint: bool) -> None:
    """Raises InputError if the run would now start with other weights of the policy or the critic.

    The initial policy is needed even with a checkpoint: the reference policy and LoRA adapters are relative
    to it. The journal has its digest as that of version 0. A critic is complete in every checkpoint. With
    trainer.continue_from the setup of the run has compared adapters with their base.
    """
    key, path = config.start
    is_merged = key != "model.path" and config.trainer.lora_rank > 0  # on the device of the trainer
    published = (r.digest for _, _, r in journal.lines if isinstance(r, Published) and r.version == 0)
    digest = next(published, None)
    if not is_merged and digest not in (None, _digest(path, DTYPES[config.engine.dtype])):
        _refuse(key, path, f"the weights that the run started with (version 0, {digest})")
    digest = journal.critic_digest
    if digest is not None and not has_checkpoint and digest != critic_digest(config):
        _refuse("critic.path", str(config.critic.path), "the weights that the critic started with")


def _digest(folder: str, dtype: torch.dtype) -> str:
    return weight_digest(load_pretrained(Path(folder))[1].to(dtype))


def _refuse(key: str, path: str, expected: str) -> None:
    raise InputError(f"{key} = {path!r} no longer holds {expected}; restore the old files")
