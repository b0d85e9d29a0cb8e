"""A micro-batch of an update never waits for the device, counted on a CPU; gradients are freed after it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from mrlm_pl.algorithms import GRPO, MADPO, PPO, CorrectnessModel, PairwiseRewardModel, madpo
from mrlm_pl.data import AnswerDataModule, JointPreferenceDataModule, PreferenceDataModule, RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Task
from mrlm_pl.learner import algorithm as algorithm_module
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward import attention, divergence, logprobs, packing
from mrlm_pl.policy.forward import devices as forward_devices
from tests.support.models.device_waits import DeviceWaits
from tests.support.runs.short_fits import fingerprint, make


def moved(rows: PolicyBatch, device: DeviceWaits, host: PolicyBatch | None = None) -> PolicyBatch:
    """Return the rows on the pretended device, with those of the host beside them."""
    copies: dict[str, Any] = {name: value.clone() for name, value in rows.tensors().items()}
    device.place(copies.values())
    return replace(rows, **copies, host=host)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that subclasses an algorithm, and the waits of each micro-batch, with its gradient, of it."""
    found: list[list[str]] = []
    devices: list[DeviceWaits] = []

    def on_device(numbers: Any, device: Any) -> Tensor:
        if not devices or isinstance(device, str):  # the host
            return forward_devices.on_device(numbers, device)
        copied = torch.as_tensor(numbers).clone()
        devices[0].place([copied])
        return copied

    for module in (attention, divergence, logprobs, madpo, packing):
        monkeypatch.setattr(module, "on_device", on_device)

    def counted(cls: Any) -> Any:
        class Counted(cls):
            def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
                sent, weights = copy.copy(batch), [weight for weight in self.parameters() if weight.requires_grad]
                with DeviceWaits() as device:
                    device.place(self.parameters())
                    devices[:] = [device]
                    sent.policies = {name: moved(rows, device, rows) for name, rows in batch.policies.items()}
                    sent.without_gradient = {
                        name: rows and moved(rows, device, rows) for name, rows in batch.without_gradient.items()
                    }
                    loss: Tensor = super().training_step(sent, batch_idx)
                    torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
                devices.clear()
                found.append(device.places)
                return loss

        return Counted

    return counted, found


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (GRPO, {}),
        (GRPO, {"kl": {"coefficient": 0.1}, "entropy": {"coefficient": 0.01}, "recompute_old_logp": True}),
        (GRPO, {"reduction": "episode_mean", "correction": {"kind": "truncated"}}),
        (GRPO, {"distillation": {"teachers": [{"reprompt": lambda attempt: attempt.opening}], "form": "top_k"}}),
        (PPO, {}),
    ],
)
@pytest.mark.long_after(1)
def test_a_micro_batch_and_its_gradient_wait_for_nothing(
    cls: Any, options: dict[str, Any], waits: Any, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    counted, found = waits
    # At most 40 tokens a pass, so that passes are recomputed in the backward pass.
    algorithm = counted(cls)({"main": Policy(str(model_folder), max_forward_tokens=40)}, **options)
    data = RolloutDataModule(
        echo(turns=2), groups=4, group_size=4, passes=2, iterations=1, sampling=Sampling(max_tokens=8)
    )
    quiet_trainer(accumulate_grad_batches=2).fit(algorithm, data)
    assert found == [[]] * 4


PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "it is 3"}
ANSWER = {"question": "1+1?", "answer": "it is 2"}
JOINT = {"agents": {"left": PAIR, "right": PAIR}}


@pytest.mark.parametrize(
    ("cls", "options", "source", "rows"),
    [
        (CorrectnessModel, {}, AnswerDataModule, [{**ANSWER, "correct": right} for right in (0, 1)]),
        (
            CorrectnessModel,
            {"score_tokens": "response"},
            AnswerDataModule,
            [{**ANSWER, "correct": right} for right in (0, 1)],
        ),
        (PairwiseRewardModel, {}, PreferenceDataModule, [PAIR] * 2),
        (MADPO, {}, JointPreferenceDataModule, [JOINT] * 2),
    ],
)
def test_a_micro_batch_of_given_answers_waits_for_nothing(
    cls: Any,
    options: dict[str, Any],
    source: Any,
    rows: list[dict[str, Any]],
    waits: Any,
    model_folder: Path,
    quiet_trainer: Any,
    tmp_path: Path,
) -> None:
    counted, found = waits
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm = counted(cls)({"main": Policy(str(model_folder), max_forward_tokens=40)}, **options)
    quiet_trainer().fit(algorithm, source(str(tmp_path / "rows.jsonl"), batch_size=2))
    assert found == [[]]


@pytest.mark.parametrize(
    ("cls", "options", "models"),
    [
        (GRPO, {"kl": {"coefficient": 0.1}, "recompute_old_logp": True, "zero_variance": "exclude"}, 2),
        (PPO, {"kl": {"coefficient": 0.1, "placement": "reward"}}, 2),
    ],
)
def test_a_rollout_waits_for_the_numbers_of_each_model_alone(
    cls: Any,
    options: dict[str, Any],
    models: int,
    model_folder: Path,
    echo: Any,
    quiet_trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Advantages, filters and the layout of each pass are computed on the host."""
    found: list[list[str]] = []

    class Counted(cls):
        def prepare(self, *arguments: Any) -> Any:
            with DeviceWaits() as device, monkeypatch.context() as patch:
                device.place(self.parameters())
                patch.setattr(PolicyBatch, "to", lambda rows, _: moved(rows, device))
                prepared = super().prepare(*arguments)
            found.append([place.split()[0] for place in device.places])
            return prepared

    data = RolloutDataModule(echo(), groups=4, group_size=4, passes=2, iterations=1, sampling=Sampling(max_tokens=8))
    quiet_trainer().fit(Counted({"main": Policy(str(model_folder))}, **options), data)
    assert found == [["cpu"] * models]


@pytest.mark.parametrize(("least", "freed"), [(1, True), (2**24, False)])
def test_large_gradients_are_freed_before_the_next_rollouts(
    least: int, freed: bool, model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithm_module, "MIN_FREED_WEIGHTS", least)
    found = []

    class Watched(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            found.append(all(weight.grad is None for weight in module.parameters()))

    data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=2, sampling=Sampling(max_tokens=8))
    quiet_trainer(callbacks=[Watched()], accumulate_grad_batches=2).fit(GRPO({"main": Policy(str(model_folder))}), data)
    assert found == [False, freed] * 2


def test_an_algorithm_is_loaded_from_a_checkpoint(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = GRPO.load_from_checkpoint(tmp_path / "last.ckpt", policies={"main": str(model_folder)})
    assert fingerprint(loaded) == fingerprint(algorithm)
    assert fingerprint(loaded) != fingerprint(make_read(model_folder))


def make_read(model_folder: Path) -> GRPO:
    """Return an algorithm with the initial weights."""
    algorithm = GRPO({"main": Policy(str(model_folder))})
    algorithm.read_weights()
    return algorithm


def test_under_ddp_of_one_process_an_idle_policy_has_all_gradients(model_folder: Path) -> None:
    algorithm = make_read(model_folder)
    for strategy, every in ((SingleDeviceStrategy(torch.device("cpu")), False), (DDPStrategy(), True)):
        trainer: Any = SimpleNamespace(strategy=strategy, world_size=1)
        algorithm._trainer, algorithm._without_data = trainer, {"main"}
        algorithm.zero_grad()
        algorithm.idle_loss("main").backward()
        assert all(weight.grad is not None for weight in algorithm.parameters()) == every


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_update_on_equal_rewards_moves_all_weights_by_their_momentum(
    accumulation: int, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    class EqualRewards(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            Later.paid = 1.0 if trainer.global_step else None

    class Later(echo):  # type: ignore[misc]
        paid: ClassVar[float | None] = None

        def begin(self, task: Task) -> str:
            self.reward = self.paid
            return str(super().begin(task))

    algorithm, data = make(model_folder, Later(), iterations=2)
    trainer = quiet_trainer(callbacks=[EqualRewards()], accumulate_grad_batches=accumulation)
    trainer.fit(algorithm, data)
    assert float(trainer.callback_metrics["train/grad_norm"]) == 0.0
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {trainer.global_step}


def test_the_numbers_of_an_update_leave_the_device_in_one_transfer() -> None:
    metrics = Metrics(["main"])
    with DeviceWaits() as device:
        values = torch.rand(3)
        device.place([values])
        for _ in range(4):
            metrics.add("train/entropy", values[0], 2.0)
            metrics.add("train/kl", values[0], (values > 0.5).sum())
            metrics.add_largest("main", {"ratio_deviation": values[1]})
            metrics.add_sum("train/loss", values[2])
        metrics.take_update()
    assert len(device.places) == 1
    assert device.places[0].startswith("tolist ")
