"""What a finished run has left, and what to do with it next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

_FILES = {
    "policies": "trained models, each a Hugging Face folder",
    "episodes": "every episode, as JSON lines",
    "checkpoints": "to resume from",
    "metrics.csv": "all metrics",
    "tensorboard": "the same for TensorBoard",
    "config.yaml": "the whole configuration",
}


class BatchCount(Callback):
    """Counts the batches that this process trains on: none where a complete run is resumed."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        """Count a batch."""
        self.count += 1


def run_summary(folder: str | Path, played: bool = True) -> str:
    """Return a few lines on the files of a run folder and the commands that go on from there.

    Args:
        folder: the run folder.
        played: whether the run played episodes, so that ``mrlm eval`` knows its environment.
    """
    folder = Path(folder)
    found = {name: text for name, text in _FILES.items() if (folder / name).exists()}
    evaluations = sorted(path.name for path in folder.glob("evaluation_*.json"))
    lines = [f"mrlm: the run is in {folder}", *(f"  {name:<12} {text}" for name, text in found.items())]
    lines += [f"  {name}" for name in evaluations]
    commands = []
    if "policies" in found:
        commands.append(f"mrlm eval --model {folder}" + ("" if played else " --environment NAME"))
    if "tensorboard" in found:
        commands.append(f"tensorboard --logdir {folder / 'tensorboard'}  # curves")
    if commands:
        lines += ["next:", *(f"  {command}" for command in commands)]
    return "\n".join(lines)
