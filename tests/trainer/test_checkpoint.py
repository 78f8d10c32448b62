import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.trainer.batches import TINY, initial

from dora.errors import ModelError
from dora.trainer.checkpoint import load_checkpoint, save_checkpoint
from dora.trainer.checkpoint_folders import (
    KeptCheckpoints,
    checkpoint_folders,
    complete_checkpoints,
    find_best,
    find_damage,
    prune_checkpoints,
    recover_replaced,
    remove_after,
)
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

SETTINGS = TrainerSettings(lr=1e-2, num_steps=5, warmup_steps=1)
BATCH = [Sample([1, 2], [3, 4, 5], [-1.9, -1.9, -1.9], 1.0), Sample([1], [2], [-1.9], -1.0)]


def test_a_trainer_resumed_from_a_checkpoint_takes_the_same_next_step(tmp_path: Path) -> None:
    trainer = Trainer(TINY, initial(), SETTINGS)
    trainer.step(BATCH)
    (tmp_path / "tokenizer.json").write_text("{}")
    folder = tmp_path / "step-1"
    for _ in range(2):  # the second replaces the first
        save_checkpoint(folder, TINY, trainer.flat, trainer.state_dict(), step=1, source=tmp_path)

    config, flat, state, step = load_checkpoint(folder)
    resumed = Trainer(config, flat, SETTINGS)
    resumed.load_state_dict(state)
    assert (config, step) == (TINY, 1)
    assert trainer.step(BATCH) == resumed.step(BATCH)
    assert torch.equal(trainer.flat, resumed.flat)
    assert (folder / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "tokenizer.json"]


def test_a_checkpoint_has_what_the_processor_of_a_model_needs(tmp_path: Path) -> None:
    """Templates, and how images and videos are read: transformers has defaults in place of missing files."""
    names = "chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json"
    for name in names:
        (tmp_path / name).write_text(name)
    save_checkpoint(tmp_path / "step-1", TINY, initial(), {}, step=1, source=tmp_path)
    assert [(tmp_path / "step-1" / name).read_text() for name in names] == [*names]


def test_a_plain_model_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", TINY, initial(), {}, step=0, source=tmp_path)
    (tmp_path / "model" / "optimizer.pt").unlink()
    with pytest.raises(ModelError, match=r"no optimizer\.pt"):
        load_checkpoint(tmp_path / "model")


def save_steps(folder: Path, *steps: int) -> list[Path]:
    """Save the untrained model as the checkpoint of each step."""
    trainer = Trainer(TINY, initial(), SETTINGS)
    older = folder / "0.safetensors"
    older.write_bytes(b"older weights")
    extra_files: dict[str, str | Path] = {"core.json": "{}", "versions/0.safetensors": older}
    for step in steps:
        path = folder / f"step-{step}"
        state = trainer.state_dict()
        save_checkpoint(path, TINY, trainer.flat, state, step, folder, extra_files=extra_files, fsync=True)
    return [folder / f"step-{step}" for step in steps]


def test_a_checkpoint_contains_its_extra_files(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 1)
    assert (path / "core.json").read_text() == "{}"
    assert (path / "versions" / "0.safetensors").read_bytes() == b"older weights"


def test_complete_checkpoints_are_found_newest_first(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 10, 9)
    (tmp_path / "step-11.draft").mkdir()
    (tmp_path / "step-x").mkdir()
    assert list(complete_checkpoints(tmp_path).items()) == [(n, tmp_path / f"step-{n}") for n in (10, 9, 2)]
    assert complete_checkpoints(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "model.safetensors", "versions/0.safetensors", "checkpoint.json"]
)
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_checkpoint_with_a_damaged_or_missing_file_is_incomplete(
    tmp_path: Path, name: str, is_missing: bool
) -> None:
    _, path = save_steps(tmp_path, 1, 2)
    (path / name).unlink() if is_missing else (path / name).write_bytes(b"half")
    assert [*complete_checkpoints(tmp_path)] == [1]


def test_a_checkpoint_with_changed_weights_is_rejected(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 1)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert complete_checkpoints(tmp_path) == {}
    with pytest.raises(
        ModelError, match=r"model\.safetensors differs from its digest in checkpoint\.json; remove it"
    ):
        load_checkpoint(path)


def test_a_change_that_keeps_the_size_of_a_file_is_found_and_named(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 1)
    for name in sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()):
        before = (path / name).read_bytes()
        (path / name).write_bytes(bytes([before[0] ^ 1]) + before[1:])
        assert name in find_damage(path)
        (path / name).write_bytes(before)
    assert find_damage(path) == ""
    (path / "versions" / "1.safetensors").write_bytes(b"unknown")
    assert find_damage(path) == "versions/1.safetensors is not in checkpoint.json"


def test_pruning_keeps_the_newest_checkpoints_and_removes_leftovers(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 10, 9, 11)
    (tmp_path / "step-12.draft").mkdir()
    (tmp_path / "step-8.old").mkdir()
    prune_checkpoints(tmp_path, KeptCheckpoints(2))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-10", "step-11"]


KILLED_WHILE_REMOVING = """
import os, sys
from pathlib import Path
from dora.trainer.checkpoint_folders import KeptCheckpoints, prune_checkpoints, remove_after

sys.addaudithook(lambda event, arguments: os._exit(9) if event == "os.rmdir" else None)
folder = Path(sys.argv[1])
{call}
"""


@pytest.mark.parametrize(
    ("call", "kept"), [("prune_checkpoints(folder, KeptCheckpoints(1))", 4), ("remove_after(folder, 2)", 2)]
)
def test_a_checkpoint_that_is_partly_removed_does_not_come_back(call: str, kept: int, tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    command = [sys.executable, "-c", KILLED_WHILE_REMOVING.format(call=call), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 9
    assert len(list(tmp_path.glob("step-*"))) == 2
    recover_replaced(tmp_path)
    assert [*checkpoint_folders(tmp_path)] == [kept]
    prune_checkpoints(tmp_path, KeptCheckpoints(1))
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{kept}"]


def test_pruning_keeps_the_best_checkpoint_that_exists_and_that_of_an_evaluation(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4, 6, 8, 10)
    assert find_best(tmp_path, (3, 4, 2)) == 4
    prune_checkpoints(tmp_path, KeptCheckpoints(1, best_first=(3, 4, 2), evaluating=6))
    assert [*complete_checkpoints(tmp_path)] == [10, 6, 4]
    shutil.rmtree(tmp_path / "step-4")
    prune_checkpoints(tmp_path, KeptCheckpoints(1, best_first=(3, 6, 4, 2)))
    assert [*complete_checkpoints(tmp_path)] == [10, 6]
    prune_checkpoints(tmp_path, KeptCheckpoints(1, best_first=(10, 6)))
    assert [*complete_checkpoints(tmp_path)] == [10]
    assert find_best(tmp_path, (3, 4)) is None


def test_checkpoints_of_later_steps_are_removed_also_broken_ones(tmp_path: Path) -> None:
    *_, broken = save_steps(tmp_path, 1, 2, 3)
    (broken / "optimizer.pt").unlink()
    remove_after(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-1"]


def test_a_checkpoint_with_an_interrupted_replacement_gets_its_name_back(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 2)
    path.rename(path.with_name("step-2.old"))
    assert complete_checkpoints(tmp_path) == {}
    recover_replaced(tmp_path)
    assert complete_checkpoints(tmp_path) == {2: path}
    save_steps(tmp_path, 4)[0].rename(tmp_path / "step-2.old")
    recover_replaced(tmp_path)
    assert complete_checkpoints(tmp_path) == {2: path}


SAVED_IN_ASCII = """
import locale, sys
from pathlib import Path
from tests.trainer.batches import TINY, initial
from dora.trainer.checkpoint import save_checkpoint

assert locale.getencoding() != "utf-8"
folder = Path(sys.argv[1])
save_checkpoint(folder / "step-1", TINY, initial(), {}, 1, folder, extra_files={"README.md": chr(252)})
"""


def test_files_of_a_checkpoint_are_utf_8_in_any_locale(tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", SAVED_IN_ASCII, str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, **locale})
    assert (tmp_path / "step-1" / "README.md").read_bytes() == "ü".encode()
