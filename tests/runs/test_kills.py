"""A run that is killed at any moment and resumed ends in the weights of a run that was left alone."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers.utils.logging import disable_progress_bar

from mrlm_pl.algorithms import DPO, GRPO, MADPO, SFT, CorrectnessModel
from mrlm_pl.data import (
    AnswerDataModule,
    JointPreferenceDataModule,
    PreferenceDataModule,
    RolloutDataModule,
    TrajectoryDataModule,
)
from mrlm_pl.data.rollout import collection, history
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.episode_files import EpisodeWriter
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import collate_rows
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.learner.policies.reference import ReferencePolicy
from mrlm_pl.policy import Policy
from mrlm_pl.rollout import play
from mrlm_pl.runs import LastCheckpoint, MetricsFile, Trainer
from mrlm_pl.runs.folder import LAST_CHECKPOINT
from tests.conftest import EchoEnvironment
from tests.support.numbered_examples import NumberedExamples
from tests.support.runs.kill_moments import DiskStates, at_each_moment
from tests.support.runs.short_fits import fingerprint

Parts = Callable[[Path, Path], tuple[Any, Any]]


def rows_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def policy(model: Path) -> Policy:
    return Policy(str(model), learning_rate=1e-3)


class Mover(Algorithm):
    """Moves one weight towards the mean of each batch: a run of it takes a moment."""

    def __init__(self) -> None:
        super(Algorithm, self).__init__()
        self.metrics = Metrics(("main",), self)
        self.reference = ReferencePolicy()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    @property
    def policies(self) -> torch.nn.Module:
        return self

    def configure_model(self) -> None:
        """There is none."""

    def policy_loss(self, name: str, rows: Any, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.weight - batch.policies["main"].token_ids.float().mean()).square()
        self.metrics.add_sum("train/loss", loss)
        return loss

    def end_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.metrics.log(self.metrics.take_update())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measure no gradient norm."""

    def end_evaluation(self, prefix: str) -> None:
        """Measure no episodes."""

    configure_gradient_clipping = LightningModule.configure_gradient_clipping

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the weight alone."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the weight alone."""

    def on_train_end(self) -> None:
        folder = Path(self.trainer.default_root_dir) / "policies" / "main"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(str(self.weight.item()))


class Numbers(NumberedExamples):
    def collate(self, split: Any, chosen: Any) -> Any:
        rows = [Trajectory("a", "main", (number,), (True,), (0.0,), ()) for number in chosen]
        places = list(range(len(rows)))
        return {"main": collate_rows(rows, places, places, places)}


def numbers(model: Path, folder: Path) -> tuple[Any, Any]:
    return Mover(), Numbers(8, 2)


def rollouts(model: Path, folder: Path) -> tuple[Any, Any]:
    data = RolloutDataModule(
        EchoEnvironment(), groups=2, group_size=2, iterations=2, minibatches=2, sampling=Sampling(max_tokens=3)
    )
    data.validation_episodes = 2
    return GRPO({"main": policy(model)}), data


def demonstrations(model: Path, folder: Path) -> tuple[Any, Any]:
    chats = [{"prompt": f"{letter}?", "completion": "x" * number} for number, letter in enumerate("abcdefgh", start=1)]
    source = rows_of(folder, chats)
    return SFT({"main": policy(model)}), TrajectoryDataModule(source, source, batch_size=2)


def pairs(model: Path, folder: Path) -> tuple[Any, Any]:
    source = rows_of(folder, [{"prompt": f"{n}=", "chosen": str(n), "rejected": "x"} for n in range(8)])
    return DPO({"main": policy(model)}), PreferenceDataModule(source, source, batch_size=2)


def joint_pairs(model: Path, folder: Path) -> tuple[Any, Any]:
    rows = [
        {"agents": {agent: {"prompt": f"{agent}{n}", "chosen": "y", "rejected": "n"} for agent in "ab"}}
        for n in range(8)
    ]
    source = rows_of(folder, rows)
    both = {"one": policy(model), "two": Policy(str(model), learning_rate=1e-3, random_init_seed=5)}
    return MADPO(both, {"a": "one", "b": "two"}), JointPreferenceDataModule(source, source, batch_size=2)


def answers(model: Path, folder: Path) -> tuple[Any, Any]:
    rows = [{"question": f"{n}?", "answer": str(n), "correct": n % 2} for n in range(8)]
    source = rows_of(folder, rows)
    return CorrectnessModel({"main": policy(model)}), AnswerDataModule(source, source, batch_size=2)


MODULES: dict[str, Parts] = {
    "numbers": numbers,
    "rollouts": rollouts,
    "demonstrations": demonstrations,
    "pairs": pairs,
    "joint pairs": joint_pairs,
    "answers": answers,
}

# An epoch is 4 batches.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"max_epochs": 3},
    "validated inside an epoch": {"max_epochs": 3, "limit_val_batches": 1.0, "val_check_interval": 2},
    "accumulated": {"max_epochs": 2, "accumulate_grad_batches": 2},
    "a number of steps": {"max_epochs": -1, "max_steps": 7},
    "epochs amid the data": {"max_epochs": 3, "limit_train_batches": 3},
    "validated at the end of an epoch": {"max_epochs": 2, "limit_val_batches": 1.0},
}
CHECKPOINTS: dict[str, dict[str, int]] = {
    "every step": {"every_n_train_steps": 1},
    "every third step": {"every_n_train_steps": 3},
    "every epoch": {"every_n_epochs": 1},
}


class Served(Callback):
    """The tokens of each batch, by how many updates came before, and which validations ended."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int], list[Any]] = {}
        self.epochs: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        rows = {name: item.token_ids.tolist() for name, item in batch.policies.items()}
        self.batches[trainer.global_step, batch_idx] = [rows, {key: vars(size) for key, size in batch.totals.items()}]


@dataclass
class Outcome:
    weights: str
    steps: int
    position: tuple[int, int]
    epoch: int
    files: tuple[str, ...]
    metrics: Counter[int]


class Case:
    """A run that can be started again and again in the same folder."""

    def __init__(self, parts: Parts, settings: dict[str, Any], saved: dict[str, int], model: Path, below: Path) -> None:
        self.parts, self.settings, self.saved, self.model, self.below = parts, settings, saved, model, below
        self.folder = below / "run"

    def run(self, look: Callable[[str], None] | None = None) -> tuple[Outcome, Served]:
        """Run, or continue from the last checkpoint of the folder, to the end."""
        algorithm, data = self.parts(self.model, self.below)
        served = Served()
        trainer = Trainer(
            output=str(self.folder),
            resume=True,
            accelerator="cpu",
            logger=MetricsFile(self.folder),
            callbacks=[served, LastCheckpoint(**self.saved)],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **{"limit_val_batches": 0, **self.settings},
        )
        with at_each_moment(self.folder, look or (lambda moment: None)):
            trainer.fit(algorithm, data)
        rollouts = isinstance(data, RolloutDataModule)
        return Outcome(
            fingerprint(algorithm),
            trainer.global_step,
            (data.stream.iteration, data.stream.position) if rollouts else (data.epoch, data.position),
            trainer.current_epoch,
            self._files(),
            self._steps(),
        ), served

    def _files(self) -> tuple[str, ...]:
        paths = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.name != "metrics.csv")
        # The files of a run without a checkpoint are kept aside.
        return tuple(sorted(path for path in paths if not path.startswith("without-checkpoint-")))

    def _steps(self) -> Counter[int]:
        path = self.folder / "metrics.csv"
        with path.open(newline="") as file:
            return Counter(int(row["step"]) for row in csv.DictReader(file) if row["train/loss"])

    def put(self, state: Path | None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if state is not None and state.is_dir():
            shutil.copytree(state, self.folder)


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training wait for each file of episodes: the disk stands still at every moment.

    No state of the disk that matters is lost, as each checkpoint waits for the files anyway.
    """
    write = EpisodeWriter.write

    def at_once(writer: EpisodeWriter, path: str | Path, episodes: Any) -> None:
        write(writer, path, episodes)
        writer.finish()

    monkeypatch.setattr(EpisodeWriter, "write", at_once)


@pytest.fixture(autouse=True)
def clock_that_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checkpoints of an update be the same bytes, so that states of the disk differ only where it matters."""
    monkeypatch.setattr(history, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(collection, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    monkeypatch.setattr(play, "Episode", lambda **fields: Episode(**{**fields, "timings": {}}))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    disable_progress_bar()


def differences(whole: tuple[Outcome, Served], found: tuple[Outcome, Served]) -> list[str]:
    """The differences of a resumed run from an uninterrupted one."""
    (expected, all_served), (outcome, served) = whole, found
    wrong = [
        name
        for name in ("weights", "steps", "position", "epoch", "files", "metrics")
        if getattr(outcome, name) != getattr(expected, name)
    ]
    wrong += [f"batch {key}" for key, batch in served.batches.items() if all_served.batches.get(key) != batch]
    return wrong


def killed_everywhere(case: Case, below: Path, every: int) -> tuple[int, int, dict[str, list[str]]]:
    """Moments, states of the disk, and what went wrong by moment; also of runs that are killed after a resume."""
    states = DiskStates(below)
    whole = case.run(lambda moment: states.look(case.folder, moment))
    wrong: dict[str, list[str]] = {}
    tried = 0
    while tried < len(states.found):
        folder, moment = states.found[tried]
        case.put(folder)

        def look(later: str, moment: str = moment) -> None:
            states.look(case.folder, f"{moment}; then {later}", resumed=True)

        states.begin()
        found = differences(whole, case.run(look if every == 1 else None))
        if found:
            wrong[moment] = found
        tried += every
    return states.moments, len(states.found), wrong


def interrupted_everywhere(case: Case, every: int) -> tuple[int, dict[str, list[str]]]:
    """Moments, and what went wrong when SIGTERM came at one of them, by moment."""
    names: list[str] = []
    whole = case.run(names.append)
    wrong: dict[str, list[str]] = {}
    for number in range(every // 2, len(names), every):
        case.put(None)
        count = iter(range(len(names)))

        def end(moment: str, count: Any = count, number: int = number) -> None:
            if next(count, None) == number:
                signal.raise_signal(signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        try:
            case.run(end)
        except SystemExit:
            pass
        finally:
            signal.signal(signal.SIGTERM, before)
        found = differences(whole, case.run())
        if found:
            wrong[f"{number}: {names[number]}"] = found
    return len(names), wrong


@pytest.mark.parametrize("name", ["validated inside an epoch", "epochs amid the data"])
def test_a_kill_at_any_moment_changes_nothing(name: str, model_folder: Path, tmp_path: Path) -> None:
    case = Case(numbers, SETTINGS[name], CHECKPOINTS["every epoch"], model_folder, tmp_path)
    moments, states, wrong = killed_everywhere(case, tmp_path, every=5)
    assert wrong == {}
    assert moments > 400
    assert states > 20


def test_an_exported_policy_is_whole_or_absent_at_every_moment(model_folder: Path, tmp_path: Path) -> None:
    algorithm = GRPO({"main": policy(model_folder)})
    algorithm.configure_model()
    folder = tmp_path / "policies" / "main"
    algorithm.export(folder.parent)
    whole = sorted(path.name for path in folder.iterdir())
    seen: list[list[str]] = []

    def look(moment: str) -> None:
        seen.append(sorted(path.name for path in folder.iterdir()) if folder.exists() else whole)

    with at_each_moment(tmp_path, look):
        algorithm.export(folder.parent)
    look("at the end")
    assert len(seen) > 5
    assert all(names == whole for names in seen)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["main"]


class Killed(BaseException):
    """Ends a run between two files."""


@pytest.mark.parametrize("kills", [(4, 5), (4, 8), (2, 4, 6, 8, 10)])
@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=() if name == "numbers" else pytest.mark.slow) for name in MODULES]
)
def test_kills_around_the_ends_of_epochs_add_no_batch(
    module: str, kills: tuple[int, ...], model_folder: Path, tmp_path: Path
) -> None:
    """Each run is killed when its checkpoint has reached that number of updates; an epoch has 4."""
    case = Case(
        MODULES[module], SETTINGS["validated inside an epoch"], CHECKPOINTS["every step"], model_folder, tmp_path
    )
    whole = case.run()
    case.put(None)
    last = case.folder / LAST_CHECKPOINT
    for updates in kills:

        def look(moment: str, updates: int = updates) -> None:
            between = moment in ("before on_train_batch_start", "before on_train_epoch_end") and last.exists()
            if between and torch.load(last, weights_only=False)["global_step"] >= updates:
                raise Killed

        with pytest.raises(Killed):
            case.run(look)
    assert differences(whole, case.run()) == []


@pytest.mark.parametrize(
    ("kept", "folder"),
    [
        ({"filename": "best", "monitor": "train/loss", "every_n_train_steps": 5}, "killed"),
        ({"filename": "best", "monitor": "train/loss", "every_n_train_steps": 2}, "moved"),
        ({"filename": "two", "monitor": "train/loss", "save_top_k": 2, "every_n_train_steps": 2}, "killed"),
        ({"filename": "all", "save_top_k": -1, "every_n_train_steps": 2}, "killed"),
        ({"filename": "{train/loss:.1f}", "monitor": "train/loss", "every_n_train_steps": 2}, "killed"),
        ({"dirpath": "own", "filename": "best", "monitor": "train/loss", "every_n_train_steps": 5}, "killed"),
    ],
)
@pytest.mark.long_after(2)
def test_a_resumed_run_keeps_the_best_checkpoints_of_an_uninterrupted_one(
    kept: dict[str, Any], folder: str, tmp_path: Path
) -> None:
    """One run is killed after the update of the first best checkpoint, which ``last.ckpt`` does not know."""

    class Kill(Callback):
        def __init__(self, updates: int) -> None:
            self.updates = updates

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == self.updates:
                raise Killed

    def fit(folder: Path, kill: int = -1) -> dict[str, int]:
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
        best = ModelCheckpoint(**kept | ({"dirpath": folder / kept["dirpath"]} if "dirpath" in kept else {}))
        callbacks = [Kill(kill), best, LastCheckpoint(every_n_train_steps=4)]
        trainer = Trainer(
            output=str(folder), resume=True, accelerator="cpu", logger=False, callbacks=callbacks, max_epochs=3, **quiet
        )
        trainer.fit(Mover(), Numbers(8, 2))
        paths = folder.rglob("*.ckpt")
        return {str(path.relative_to(folder)): torch.load(path)["global_step"] for path in paths}

    with pytest.raises(Killed):
        fit(tmp_path / "killed", kill=7)
    (tmp_path / "killed").rename(tmp_path / folder)
    assert fit(tmp_path / folder) == fit(tmp_path / "whole")


@pytest.mark.parametrize("name", ["validated inside an epoch", "a number of steps"])
@pytest.mark.long_after(1)
def test_a_signal_at_any_moment_changes_nothing(name: str, model_folder: Path, tmp_path: Path) -> None:
    case = Case(numbers, SETTINGS[name], CHECKPOINTS["every epoch"], model_folder, tmp_path)
    moments, wrong = interrupted_everywhere(case, every=97)
    assert wrong == {}
    assert moments > 350


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_kills_and_signals_exhaustively(
    name: str, checkpoint: str, model_folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case = Case(numbers, SETTINGS[name], CHECKPOINTS[checkpoint], model_folder, tmp_path)
    moments, states, wrong = killed_everywhere(case, tmp_path, every=1)
    record_property("moments", moments)
    record_property("states", states)
    assert wrong == {}
    case.put(None)
    moments, wrong = interrupted_everywhere(case, every=7)
    record_property("signals", len(range(3, moments, 7)))
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("module", [name for name in MODULES if name != "numbers"])
def test_kills_and_signals_of_each_data_module(
    module: str, model_folder: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    settings = {"max_epochs": 2, "limit_val_batches": 1.0, "val_check_interval": 2}
    case = Case(MODULES[module], settings, CHECKPOINTS["every third step"], model_folder, tmp_path)
    moments, states, wrong = killed_everywhere(case, tmp_path, every=1)
    record_property("moments", moments)
    record_property("states", states)
    assert wrong == {}
    case.put(None)
    moments, wrong = interrupted_everywhere(case, every=61)
    record_property("signals", len(range(30, moments, 61)))
    assert wrong == {}
