"""SIGTERM during rollouts, during updates, and to one of several processes."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import model_checkpoint
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from mrlm_pl.algorithms import REINFORCE
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.collectors import groups as collectors
from mrlm_pl.data.rollout.collectors.groups import SyncCollector
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Observations, Step
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import Policy
from mrlm_pl.policy.snapshot import Snapshot
from mrlm_pl.rollout.cross_policy import CrossPolicy
from mrlm_pl.runs.checkpoint import LastCheckpoint
from mrlm_pl.trainer.termination import EndTogether, ended_by_sigterm
from tests.conftest import EchoEnvironment
from tests.support.runs.short_fits import fingerprint, make


@pytest.fixture(autouse=True)
def unsent() -> None:
    Signals.sent = Signals.ended = False


class Signals(EchoEnvironment):
    """Send the signal to the run in the first step of all copies; all steps are slow.

    Attributes:
        ended: whether a step has ended.
    """

    sent = ended = False

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        return super().reset(task)

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        if not Signals.sent:
            Signals.sent = True
            self.send()
        await asyncio.sleep(90.0)
        Signals.ended = True
        return super().step(actions)

    def send(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class SignalsToAnotherThread(Signals):
    """Send the signal to the thread of the event loop: the system wakes that thread, and no other."""

    def send(self) -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


@pytest.mark.parametrize("environment", [Signals, SignalsToAnotherThread])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_it_ends_a_run_that_waits_for_episodes(
    mode: Literal["sync", "async"], environment: type[Signals], model_folder: Path, quiet_trainer: Any
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    algorithm, data = make(model_folder, environment(), mode=mode, iterations=3, step_timeout=100.0, retries=0)
    trainer = quiet_trainer()
    with pytest.raises(SIGTERMException):
        trainer.fit(algorithm, data)
    assert not Signals.ended
    assert data.collection.collector is None
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.long_after(1)
def test_a_run_goes_on_from_that_moment(
    mode: Literal["sync", "async"], model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    class OnlyLater(Signals):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            if trainer.global_step >= 1:  # the third rollout may come after the second update
                return await super().step(actions)
            return EchoEnvironment.step(self, actions)

    algorithm, data = make(model_folder, OnlyLater(), mode=mode, iterations=3)
    last = LastCheckpoint(minutes=1000)
    last.dirpath = str(tmp_path)
    trainer = quiet_trainer(callbacks=[last], enable_checkpointing=True)
    with pytest.raises(SIGTERMException):
        trainer.fit(algorithm, data)
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["RolloutDataModule"]
    assert (state["position"], state["rows"]) == (0, [None])
    # In asynchronous runs the signal may come in an update, after which the run ends.
    assert state["iteration"] in ((1,) if mode == "sync" else (1, 2))

    class Plain(EchoEnvironment):
        async def reset(self, task: Task) -> Observations:  # type: ignore[override]
            return super().reset(task)

        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            return super().step(actions)

    whole, data = make(model_folder, Plain(), mode=mode, iterations=3)
    quiet_trainer().fit(whole, data)
    resumed, data = make(model_folder, Plain(), mode=mode, iterations=3)
    trainer = quiet_trainer()
    trainer.fit(resumed, data, ckpt_path=tmp_path / "last.ckpt")
    assert (trainer.global_step, data.stream.iteration) == (3, 3)
    if mode == "sync":  # in asynchronous runs, timing decides which weights sample a token
        assert fingerprint(resumed) == fingerprint(whole)


def test_credit_that_is_interrupted_leaves_no_trace(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    """A resumed run collects and prepares the rollout again, so a running mean must not include it yet."""

    class Interrupted(REINFORCE):
        def credit(self, *arguments: Any) -> Any:
            found = super().credit(*arguments)
            if self.global_step == 1 and not Signals.sent:
                Signals.sent = True
                signal.raise_signal(signal.SIGTERM)
            return found

    def parts() -> tuple[REINFORCE, RolloutDataModule]:
        algorithm = Interrupted({"main": Policy(str(model_folder), learning_rate=1e-3)}, baseline="running")
        options: dict[str, Any] = {"groups": 2, "group_size": 2, "iterations": 3, "sampling": Sampling(max_tokens=4)}
        return algorithm, RolloutDataModule(EchoEnvironment(), **options)

    last = LastCheckpoint(minutes=1000)
    last.dirpath = str(tmp_path)
    with pytest.raises(SIGTERMException):
        quiet_trainer(callbacks=[last], enable_checkpointing=True).fit(*parts())
    whole, data = parts()
    quiet_trainer().fit(whole, data)
    resumed, data = parts()
    quiet_trainer().fit(resumed, data, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.progress() == whole.progress()
    assert fingerprint(resumed) == fingerprint(whole)


def test_snapshots_are_taken_together(model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Snapshot.take

    def interrupted(snapshot: Snapshot, policy: Policy, version: int) -> None:
        signal.raise_signal(signal.SIGTERM)
        take(snapshot, policy, version)

    monkeypatch.setattr(Snapshot, "take", interrupted)
    stale = CrossPolicy(snapshots=1, refresh=2)
    grpo = {"recompute_old_logp": False}
    algorithm, data = make(model_folder, EchoEnvironment(), grpo, iterations=3, cross_policy=stale)
    with pytest.raises(SIGTERMException):
        quiet_trainer().fit(algorithm, data)
    state = data.state_dict()["stale"]
    assert state["iteration"] == data.stream.iteration == 2
    assert [slot["version"] for slot in state["slots"]["main"]] == [2]


class EndsInsideAnUpdate(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class LateAt(Callback):
    """Let a long time pass from the end of this batch on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
        self.monkeypatch, self.batch = monkeypatch, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            self.monkeypatch.setattr(model_checkpoint, "time", SimpleNamespace(monotonic=lambda: 1e9))


Fit = Callable[..., str]


@pytest.fixture
def fit(model_folder: Path, quiet_trainer: Any) -> Fit:
    """Train on two rollouts of two updates of two micro-batches each, and return the weights."""

    def fit(*callbacks: Callback, ckpt_path: Path | None = None) -> str:
        algorithm, data = make(model_folder, EchoEnvironment(), iterations=2, minibatches=2)
        quiet_trainer(accumulate_grad_batches=2, callbacks=list(callbacks), enable_checkpointing=bool(callbacks)).fit(
            algorithm, data, ckpt_path=ckpt_path
        )
        return fingerprint(algorithm)

    return fit


def progress(checkpoint: Path) -> tuple[int, int]:
    """Updates, and batches of the collection."""
    state = torch.load(checkpoint, weights_only=False)
    return state["global_step"], state["RolloutDataModule"]["position"]


def test_no_checkpoint_is_between_the_pieces_of_an_update(fit: Fit, tmp_path: Path) -> None:
    last = LastCheckpoint(minutes=1e-9)  # after every update, as far as the time goes
    last.dirpath = str(tmp_path)
    with pytest.raises(SIGTERMException):
        fit(EndsInsideAnUpdate(), last)
    assert progress(tmp_path / "last.ckpt") == (1, 2)
    assert fit(ckpt_path=tmp_path / "last.ckpt") == fit()


class KeepsTheFirst(LastCheckpoint):
    """Keeps the first checkpoint too."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        first = Path(filepath).with_name("first.ckpt")
        if not first.exists():
            shutil.copy(filepath, first)


def test_a_checkpoint_that_is_due_in_an_update_waits_for_its_end(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = KeepsTheFirst(minutes=60)
    last.dirpath = str(tmp_path)
    whole = fit(LateAt(monkeypatch, 2), last)
    assert progress(tmp_path / "first.ckpt") == (2, 0)
    assert progress(tmp_path / "last.ckpt") == (4, 0), "the end of the run"
    assert fit(ckpt_path=tmp_path / "first.ckpt") == fit(ckpt_path=tmp_path / "last.ckpt") == whole


class SignalsAt(Callback):
    """Send the signal at the end of a batch, or in the validation after it."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "batch" and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.hook == "validation" and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class SignalsInValidation(EchoEnvironment):
    """Send the signal during the second batch of a validation, which is slow."""

    played = 0

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        if task.split == "validation":
            SignalsInValidation.played += 1
            if SignalsInValidation.played == 100:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(600.0)
        return super().reset(task)

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        return super().step(actions)


@pytest.mark.parametrize("hook", ["batch", "validation", "episode"])
@pytest.mark.long_after(1)
def test_a_run_goes_on_that_was_to_be_validated(
    hook: str, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    SignalsInValidation.played = 0 if hook == "episode" else 1000

    def fit(*callbacks: Callback, ckpt_path: Path | None = None) -> str:
        algorithm, data = make(model_folder, SignalsInValidation(size=128), iterations=4, validation_episodes=128)
        validated = Validated()
        options = {"val_check_interval": 2, "limit_val_batches": 1.0, "enable_checkpointing": bool(callbacks)}
        trainer = quiet_trainer(callbacks=[*callbacks, validated], **options)
        try:
            trainer.fit(algorithm, data, ckpt_path=ckpt_path)
        finally:
            steps.extend(validated.steps)
        return fingerprint(algorithm)

    steps: list[int] = []
    last = LastCheckpoint(minutes=60)
    last.dirpath = str(tmp_path)
    with pytest.raises(SIGTERMException):
        fit(SignalsAt(hook), last)
    assert progress(tmp_path / "last.ckpt") == (2, 0)
    assert steps == []
    resumed = fit(ckpt_path=tmp_path / "last.ckpt")
    assert steps == [2, 4], "the validation that was due is played first"
    assert resumed == fit()


class Validated(Callback):
    """Record the number of updates before each finished validation."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(trainer.global_step)


class Trainers:
    world_size, received_sigterm = 1, False
    callbacks: tuple[Callback, ...] = ()
    state = SimpleNamespace(fn=TrainerFn.FITTING)


def test_several_processes_wait_for_the_batch() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        several = Trainers()
        several.world_size = 2
        with ended_by_sigterm(several):  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        with pytest.raises(SIGTERMException), ended_by_sigterm(Trainers()):  # type: ignore[arg-type]
            signal.raise_signal(signal.SIGTERM)
        assert len(seen) == 2, "the trainer's own handler has been called"
        late, agreed = Trainers(), Trainers()
        late.received_sigterm = agreed.received_sigterm = True
        agreed.world_size, agreed.callbacks = 2, (EndTogether(),)
        for trainer in (late, agreed):
            with pytest.raises(SIGTERMException), ended_by_sigterm(trainer):  # type: ignore[arg-type]
                pytest.fail("the collection began")
        several.received_sigterm = True
        with ended_by_sigterm(several):  # type: ignore[arg-type]
            begun = True
        assert begun, "the others may not have had it"
        signal.raise_signal(signal.SIGTERM)
        assert len(seen) == 3, "after the block its handler is there again"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_of_several_processes_leaves_a_collection_and_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks exchange by the sum over them, which is infinite if one of them was interrupted."""
    told: list[float] = []
    together = EndTogether()
    before = signal.signal(signal.SIGTERM, together._note_sigterm)
    several: Any = Trainers()
    several.world_size, several.callbacks = 2, (together,)
    monkeypatch.setattr(collectors, "UnfinishedGroup", lambda *key: SimpleNamespace(due=True))
    gathered: list[bool] = []

    def collect(interrupted: str | None, other: float) -> None:
        def meet(trainer: Any, mine: Tensor) -> Tensor:
            told.append(float(mine))
            return mine + (other if len(told) > 1 else 0.0)

        @contextmanager
        def published() -> Iterator[None]:
            gathered.append(False)
            if interrupted == "gathering":
                signal.raise_signal(signal.SIGTERM)
            gathered[-1] = True
            yield

        def run_blocking(play: Any) -> None:
            if interrupted == "playing":
                signal.raise_signal(signal.SIGTERM)

        class Collector(SyncCollector):
            def make_players(self, **options: Any) -> None:
                self.play_greedy_specs = None
                self.training_player = SimpleNamespace(run_blocking=run_blocking)  # type: ignore[assignment]

        monkeypatch.setattr(collectors, "all_reduce_sum", meet)
        players: Any = SimpleNamespace(published=published, learner=SimpleNamespace(trainer=several))
        Collector(players, *[None, None]).collect(0, 1, [0, 1])  # type: ignore[arg-type]

    try:
        with pytest.raises(SIGTERMException):
            collect(interrupted=None, other=math.inf)
        assert told == [2.0, 2.0], "the other has played its part"
        for moment in ("gathering", "playing", "before"):
            told.clear()
            together.received = moment == "before"
            gathered.clear()
            with pytest.raises(SIGTERMException):
                collect(interrupted=moment, other=2.0)
            assert told == [2.0, math.inf], "it met the others instead of leaving them"
            assert gathered == [True], "and gathered the weights with them, whenever the signal came"
    finally:
        signal.signal(signal.SIGTERM, before)


class Strategy:
    """A strategy of two processes, the other of which received the signal or not."""

    def __init__(self) -> None:
        self.other = False
        self.asked: list[bool] = []

    def reduce_boolean_decision(self, mine: bool, all: bool) -> bool:
        assert not all
        self.asked.append(mine)
        return mine or self.other


class TwoProcesses:
    """A trainer amid an epoch of 8 batches, two per update, with Lightning's own signal handling."""

    world_size, accumulate_grad_batches, num_training_batches = 2, 2, 8
    state = SimpleNamespace(fn=TrainerFn.FITTING)

    def __init__(self, ready: int) -> None:
        progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
        self.strategy = Strategy()
        self._accelerator_connector = SimpleNamespace(cluster_environment=None)
        self._signal_connector = _SignalConnector(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("receives", ["this", "the other"])
def test_processes_end_together_and_after_an_update(receives: str, hook: str) -> None:
    users: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: users.append(number))
    callback, trainer = EndTogether(), TwoProcesses(ready=1)
    agree = partial(getattr(callback, hook), trainer, None)
    try:
        callback.setup(trainer, None, "fit")  # type: ignore[arg-type]
        trainer._signal_connector.register_signal_handlers()
        agree()
        if receives == "this":
            signal.raise_signal(signal.SIGTERM)
        trainer.strategy.other = receives == "the other"
        agree()
        assert not trainer._signal_connector.received_sigterm, "in the middle of an update"
        trainer.strategy.other = False  # it is reported once
        trainer.fit_loop.epoch_loop.batch_progress.current.ready = 2
        agree()
        assert trainer._signal_connector.received_sigterm
    finally:
        signal.signal(signal.SIGTERM, before)
    assert users == [signal.SIGTERM] * (receives == "this")
    assert trainer.strategy.asked == [False, receives == "this", True]
