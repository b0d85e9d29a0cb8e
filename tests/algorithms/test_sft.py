"""SFT: what each objective learns from, and its numbers against the model's own cross-entropy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from mrlm_pl.algorithms import PPO, SFT
from mrlm_pl.data import RolloutDataModule, TrajectoryDataModule
from mrlm_pl.data.files.demonstrations import observation_mask
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.policy import Policy


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]}


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROWS = [chat("one", "two", "three", "four"), chat("a", "b")]


class Gradient(Callback):
    def __init__(self) -> None:
        self.loss = 0.0
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, algorithm: Any, optimizer: Any) -> None:
        model = algorithm.policy("main").model
        self.gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.loss = float(trainer.callback_metrics["train/loss"])


def fit(model_folder: Path, source: str, trainer: Any, objective: Any) -> tuple[SFT, TrajectoryDataModule]:
    algorithm = SFT({"main": Policy(str(model_folder), learning_rate=0.0)}, objective=objective)
    data = TrajectoryDataModule(source, batch_size=4)
    trainer.fit(algorithm, data)
    return algorithm, data


@pytest.mark.parametrize(
    ("objective", "weights"),
    [("behavioral_cloning", (1.0, 0.0)), ("world_model", (0.0, 1.0)), ("combined", (0.5, 0.5))],
)
def test_loss_and_gradient_are_those_of_the_models_own_cross_entropy(
    objective: str, weights: tuple[float, float], model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    seen = Gradient()
    algorithm, data = fit(model_folder, write(tmp_path, ROWS), quiet_trainer(callbacks=[seen]), objective)
    model = algorithm.policy("main").model
    model.zero_grad()
    model.eval()
    sums, counts = [torch.zeros(()), torch.zeros(())], [0, 0]
    for row in data.examples["train"]:
        ids = torch.tensor([row.token_ids])
        nll = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for kind, mask in enumerate((list(row.action_mask), observation_mask(row))):
            chosen = torch.tensor(mask[1:])
            sums[kind] = sums[kind] + nll[chosen].sum()
            counts[kind] += int(chosen.sum())
    assert counts[1] > 0
    expected = sum(weight * total / count for weight, total, count in zip(weights, sums, counts, strict=True))
    assert isinstance(expected, torch.Tensor)
    expected.backward()
    assert seen.loss == pytest.approx(expected.item(), rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(seen.gradients[name], weight.grad, rtol=1e-4, atol=1e-6)


def test_dropout_makes_updates_differ_and_leaves_validation_alone(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    """With a learning rate of 0 and all rows in each batch, nothing but dropout tells two updates apart."""
    rows = write(tmp_path, ROWS[:1])

    def fitted(dropout: float) -> tuple[list[float], float]:
        losses: list[float] = []

        class Losses(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                losses.append(float(trainer.callback_metrics["train/loss"]))

        algorithm = SFT({"main": Policy(str(model_folder), learning_rate=0.0, dropout=dropout)})
        trainer = quiet_trainer(callbacks=[Losses()], max_epochs=3, limit_val_batches=1)
        trainer.fit(algorithm, TrajectoryDataModule(rows, rows))
        return losses, float(trainer.callback_metrics["val/nll"])

    plain, noisy = fitted(0.0), fitted(0.3)
    assert len(set(plain[0])) == 1
    assert len(set(noisy[0])) == len(noisy[0]) == 3
    assert plain[1] == noisy[1]
    assert fitted(0.3) == noisy  # noise is a function of the update and its rows


def test_observations_are_all_that_follows_the_first_action_and_is_none() -> None:
    row = Trajectory("a", "main", tuple(range(6)), (False, True, True, False, False, True), (0.0,) * 6, ())
    assert observation_mask(row) == [False, False, False, True, True, False]


@pytest.mark.parametrize("objective", ["world_model", "combined"])
def test_a_world_model_needs_answers_of_the_environment(
    objective: str, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no row of the train data"):
        fit(model_folder, write(tmp_path, [chat("a", "b")]), quiet_trainer(), objective)


def test_an_unknown_objective_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="objective is 'distil'"):
        SFT({"main": Policy(str(model_folder))}, objective="distil")  # type: ignore[arg-type]


def test_episodes_are_demonstrations(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    turn = Turn("a", 0, 1, 2, 1.0, {"r": 1.0}, "stop", "other", 0, "e")
    messages = (Message("user", "2+2?"), Message("assistant", "4"))
    row = Trajectory("a", "other", (8, 9), (False, True), (0.0, -1.0), (turn,), messages)
    episode = Episode("0", Task("t", "train", 0), "g", 0, 0, {"a": (row,)}, "end")
    _, data = fit(model_folder, write(tmp_path, [episode.to_dict()]), quiet_trainer(), "behavioral_cloning")
    (made,) = data.examples["train"]
    assert made.policy == "main"
    assert made.messages == messages


def test_reinforcement_learning_starts_from_exactly_what_fine_tuning_left(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    algorithm = SFT({"main": Policy(str(model_folder), learning_rate=1e-3)})
    trainer = quiet_trainer()
    trainer.fit(algorithm, TrajectoryDataModule(write(tmp_path, ROWS), batch_size=2))
    left = {name: weight.clone() for name, weight in algorithm.policy("main").model.state_dict().items()}
    first: dict[str, torch.Tensor] = {}

    class Start(Callback):
        def on_train_start(self, trainer: Any, algorithm: Any) -> None:
            first.update({name: value.clone() for name, value in algorithm.policy("main").model.state_dict().items()})

    second = PPO({"main": Policy(str(Path(trainer.default_root_dir) / "policies" / "main"), learning_rate=1e-3)})
    data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=4))
    quiet_trainer(callbacks=[Start()]).fit(second, data)
    assert first.keys() == left.keys()
    assert all(torch.equal(first[name], left[name]) for name in left)
