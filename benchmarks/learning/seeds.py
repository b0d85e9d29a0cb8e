"""Runs over seeds: their budget, commands, options and files of results, and the means with paired differences."""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

sys.path.insert(0, str(Path(__file__).parents[1]))
from few_values import mean_and_half
from provenance import provenance
from quiet_trainer import quiet_trainer

MRLM = str(Path(sys.executable).with_name("mrlm"))


class Seen(Callback):
    """Keep the numbers of each update, and evaluate the final weights.

    Args:
        episodes: number of evaluated episodes, on held-out tasks of the run's only environment; 0 evaluates none.
    """

    def __init__(self, episodes: int = 0) -> None:
        self.episodes = episodes
        self.seen: list[dict[str, float]] = []
        self.after: dict[str, float] = {}
        self.components: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        if self.episodes:
            report = held_out(trainer, self.episodes)
            self.after, self.components = rewarded(report), report.components

    def of_updates(self, name: str) -> list[float]:
        """Return a number of the updates that have it."""
        return [numbers[name] for numbers in self.seen if name in numbers]


class Budget(Seen):
    """End a run before it would exceed its budget of generated tokens, and keep and evaluate like :class:`Seen`."""

    def __init__(self, tokens: float, episodes: int = 0) -> None:
        super().__init__(episodes)
        self.tokens = tokens

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        before, now = [0.0, *self.of_updates("progress/generated_tokens")][-2:]
        trainer.should_stop |= 2 * now - before > self.tokens

    def totals(self, *names: str) -> dict[str, float]:
        """Return totals of the run, such as ``generated_tokens``."""
        return {name: self.seen[-1][f"progress/{name}"] for name in names}


def held_out(trainer: Any, episodes: int) -> Any:
    """Return the report of the weights on held-out tasks of the run's only environment."""
    (name,) = trainer.datamodule.environments
    return trainer.datamodule.evaluate(name, split="test", episodes=episodes)


def rewarded(report: Any) -> dict[str, float]:
    """Return the mean reward and the success of a report."""
    return {"reward": report.mean_reward, "success": report.accuracy}


def fit(algorithm: Any, data: Any, *callbacks: Callback) -> None:
    """Train on a CPU without output."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(max_epochs=1, default_root_dir=folder, gradient_clip_val=1.0, callbacks=[*callbacks])
        trainer.fit(algorithm, data)


def call(*command: str) -> None:
    """Run a command, and end with its output if it fails."""
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout[-1000:]}{result.stderr[-3000:]}")


def seconds_of_children() -> float:
    """Return the CPU time of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parser_of(doc: str | None, seeds: int = 5, **choices: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with ``--seeds``, ``--json`` and lists of names.

    Args:
        doc: the description.
        seeds: number of seeds by default.
        choices: the names of each list; by default all of them.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, known in choices.items():
        parser.add_argument(f"--{name}", nargs="+", choices=[*known], default=[*known])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(seeds)])
    parser.add_argument("--json", type=Path)
    return parser


def silence() -> None:
    """Leave out Lightning's messages and all warnings."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


class ResultsFile:
    """The file of ``--json``: the results that it has, and those to write.

    Args:
        path: None writes none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}

    def begun(self, **found: Any) -> dict[str, Any]:
        """Return results with their origin, after the commands of those that the file has."""
        return {**provenance(kept=self.kept), **found}

    def write(self, found: Any) -> None:
        """Write results."""
        if self.path:
            self.path.write_text(json.dumps(found, indent=1) + "\n")


def rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    """Return the mean and the half width of its interval."""
    return [round(number, digits) for number in mean_and_half(values)]


def paired(
    runs: Mapping[str, Sequence[Mapping[str, float]]], baseline: str, names: Iterable[str], digits: int = 4
) -> dict[str, dict[str, list[float]]]:
    """Return mean and half width of each number by arm, and of its differences to the baseline's by seed.

    A number that a run lacks is 0, as a reward component that none of its episodes had.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for arm, rows in runs.items():
        found[arm] = {}
        for name in names:
            values = {name: [row.get(name, 0.0) for row in rows]}
            if arm != baseline and baseline in runs:
                others = [row.get(name, 0.0) for row in runs[baseline]]
                gaps = zip(values[name], others, strict=True)
                values[f"{name} minus {baseline}"] = [own - other for own, other in gaps]
            found[arm] |= {key: rounded(numbers, digits) for key, numbers in values.items()}
    return found
