"""A full disk: a clear error, the last good checkpoint kept, no drafts, and the run continues when there is space."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.episode import Episode, Task
from mrlm_pl.episode_files import EpisodeWriter
from mrlm_pl.errors import StorageError
from mrlm_pl.runs import collection

PAGE = 4096
CONFIG = """
model: {class_path: ToyAlgorithm, init_args: {rate: 0.25}}
data: {class_path: ToyData}
trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""


class SmallDisk:
    """A file system of half a megabyte, and a file that fills it."""

    def __init__(self, path: Path) -> None:
        self.path, self._ballast = path, path / "ballast"

    def leave(self, free: int) -> None:
        """Fill the disk until only this number of bytes is free."""
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError:
                pass
        with self._ballast.open("rb+") as file:
            file.truncate(max(0, self._ballast.stat().st_size - free))

    def clear(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=False).returncode
    if mounted:
        pytest.skip("this user may not mount a small file system")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fit(mrlm: Any, folder: Path, *options: str) -> tuple[int, str]:
    Path("toy.yaml").write_text(CONFIG)
    status, _, told = mrlm("train", "--config", "toy.yaml", "--output", str(folder), "--resume", *options)
    return status, told


@pytest.mark.parametrize("pages", [0, 2, 4, 6])
@pytest.mark.long_after(1)
def test_a_run_ends_with_one_message_and_goes_on_with_space(mrlm: Any, disk: SmallDisk, pages: int) -> None:
    run = disk.path / "run"
    assert fit(mrlm, run, "--trainer.max_epochs", "1")[0] == 0
    before = (run / "checkpoints" / "last.ckpt").read_bytes()
    disk.leave(pages * PAGE)
    status, told = fit(mrlm, run)
    assert (status, "No space left on device" in told) in ((0, False), (1, True))
    assert "Traceback" not in told
    assert not list(run.rglob("*.part"))
    if status:
        assert (run / "checkpoints" / "last.ckpt").read_bytes() == before
    disk.clear()
    assert fit(mrlm, run)[0] == 0
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4


def test_a_checkpoint_that_does_not_fit_is_named(mrlm: Any, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    from mrlm_toy.training import ToyAlgorithm

    step = ToyAlgorithm.training_step

    def fill(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            disk.leave(0)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ToyAlgorithm, "training_step", fill)
    status, told = fit(mrlm, disk.path / "run", "--trainer.logger", "false")
    checkpoint = disk.path / "run" / "checkpoints" / "last.ckpt"
    assert status == 1
    assert f"the checkpoint '{checkpoint}' cannot be written: No space left on device; the one before is kept; " in told
    assert [path.name for path in checkpoint.parent.iterdir()] == ["last.ckpt"]
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2


def test_a_collection_keeps_what_it_has(
    mrlm: Any, disk: SmallDisk, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "CHUNK", 4)
    add = collection.CollectionFile.add

    def fill(self: Any, episodes: Any, kept: Any) -> None:
        if self.played == 4:
            disk.leave(0)
        add(self, episodes, kept)

    monkeypatch.setattr(collection.CollectionFile, "add", fill)
    output = disk.path / "a.jsonl"
    command = ["collect", "--model", str(model_folder), "--environment", "parrot", "--environment.difficulty", "[1]"]
    command += ("--max-tokens", "2", "-n", "40", "--output", str(output))
    status, _, told = mrlm(*command)
    assert status == 1
    assert f"output: '{output}' cannot be written: No space left on device; it keeps the 4 episodes" in told
    assert len(output.read_text().splitlines()) == 4
    assert sorted(path.name for path in disk.path.iterdir()) == ["a.jsonl", "a.jsonl.progress", "ballast"]
    monkeypatch.setattr(collection.CollectionFile, "add", add)
    disk.clear()
    assert mrlm(*command)[0] == 0
    assert len(output.read_text().splitlines()) == 40


def test_a_writer_that_fails_tells_the_learner(disk: SmallDisk) -> None:
    disk.leave(0)
    writer, path = EpisodeWriter(), disk.path / "episodes" / "iteration-000000.jsonl.zst"
    writer.write(path, [Episode("e", Task("t", "train", 0), "g", 0, 0, {}, "end")])
    with pytest.raises(StorageError, match=r"iteration-000000\.jsonl\.zst' cannot be written: No space left on device"):
        writer.finish()
    writer.finish()  # its thread has ended with the error
    assert not list(path.parent.iterdir())
