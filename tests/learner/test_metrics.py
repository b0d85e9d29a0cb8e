"""The metrics of an update: means over all its tokens, however they are divided into micro-batches and ranks."""

from __future__ import annotations

import csv
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from mrlm_pl.algorithms import GRPO, PPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.stream import GroupPart, micro_batches
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner import metrics as metric_log
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.logprobs import TokenOutputs
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.value_head import ValueHead
from mrlm_pl.runs import LastCheckpoint
from mrlm_pl.runs.metrics_file import MetricsFile

TOTALS = BatchTotals(10.0, 4.0, 4.0)


def rows_of(log_ratios: list[list[float]], advantages: list[float], groups: list[int] | None = None) -> PolicyBatch:
    """Rows of one context token and as many action tokens as there are log-ratios, of old policy over sampler."""
    width = 1 + max(map(len, log_ratios))
    mask = torch.tensor([[0 < t <= len(row) for t in range(width)] for row in log_ratios])
    behavior = torch.zeros(mask.shape)
    for number, row in enumerate(log_ratios):
        behavior[number, 1 : 1 + len(row)] = -1.0 - torch.tensor(row)
    places = torch.tensor(groups or list(range(len(log_ratios))))
    return PolicyBatch(
        token_ids=torch.full(mask.shape, 9),
        lengths=mask.sum(1) + 1,
        action_mask=mask,
        behavior_logp=behavior,
        groups=places,
        comparisons=places,
        episode_tokens=mask.sum(1),
        temperature=torch.ones(len(mask)),
        advantages=torch.tensor(advantages)[:, None] * mask,
        proximal_logp=-1.0 * mask,
        values=torch.zeros(mask.shape),
        returns=torch.zeros(mask.shape),
    )


def rank(cls: type[Algorithm], model_folder: Path, moved: float) -> Any:
    """An algorithm whose policy gives every token ``-1 + moved``, where the old policy gave -1."""
    algorithm: Any = cls({"main": Policy(str(model_folder))}, clip={"high": 0.05})  # type: ignore[call-arg]

    def forward(rows: TokenRows) -> Tensor:
        return ((-1.0 + moved) * rows.action_mask).requires_grad_()

    def outputs(rows: TokenRows, **_: Any) -> TokenOutputs:
        logp = forward(rows)
        return TokenOutputs(logp, None, 0.0 * logp)

    algorithm.policies["main"].forward = forward
    algorithm.policies["main"].outputs = outputs
    algorithm.policies["main"].value_head = ValueHead(1)
    return algorithm


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_means_are_over_the_tokens_of_all_micro_batches_and_ranks(
    cls: type[Algorithm], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = 0.1
    first, second = rank(cls, model_folder, moved), rank(cls, model_folder, moved)
    # Ten tokens in four rows: rank 0 has micro-batches of 5 and 1 tokens, rank 1 one of 4 and an empty one. A ratio of
    # e^0.1 is clipped where the advantage is positive: 5 + 1 of 10 tokens.
    parts = [
        (first, rows_of([[1.0] * 2, [0.0] * 3], [1.0, 2.0])),
        (first, rows_of([[2.0]], [1.0])),
        (second, rows_of([[0.0, 0.0, 0.0, 1.0]], [-1.0])),
    ]
    for algorithm, rows in parts:
        algorithm.policy_loss("main", rows, Batch({"main": rows}, {"main": TOTALS}, micro_batches=4))
    shares = [first.metrics.own_update(), second.metrics.own_update()]
    monkeypatch.setattr(metric_log, "gather_ranks", lambda trainer, own: shares)
    found = first.metrics.take_update()
    k3 = math.exp(moved) - 1 - moved
    assert found["train/approx_kl"] == pytest.approx(k3, rel=1e-4)
    assert found["train/clip_fraction"] == pytest.approx(6 / 10)
    assert found["train/ratio_deviation"] == pytest.approx(math.exp(moved) - 1, rel=1e-4)
    # log(pi_old / sampler) is 1 for three tokens, 2 for one and 0 for six.
    assert found["train/mismatch_k1"] == pytest.approx(-5 / 10)
    mean, square = (3 * math.e + math.e**2 + 6) / 10, (3 * math.e**2 + math.e**4 + 6) / 10
    assert found["train/mismatch_mean_ratio"] == pytest.approx(mean, rel=1e-5)
    assert found["train/mismatch_chi_square"] == pytest.approx(square - 1, rel=1e-5)
    assert found["train/mismatch_effective_share"] == pytest.approx(mean**2 / square, rel=1e-5)
    assert found["train/mismatch_max_ratio"] == pytest.approx(math.e**2, rel=1e-5)
    assert first.metrics.own_update() == ({}, {}, {}), "the next update begins with empty sums"


@pytest.mark.parametrize("on_policy", [True, False])
def test_rows_without_a_gradient_count(on_policy: bool, model_folder: Path, quiet_trainer: Any) -> None:
    moved = 0.0 if on_policy else 0.1
    algorithm = rank(GRPO, model_folder, moved)
    algorithm.trainer = quiet_trainer()
    evaluated: list[int] = []
    forward = algorithm.policies["main"].forward
    algorithm.policies["main"].forward = lambda given: evaluated.append(len(given.lengths)) or forward(given)
    # Two tokens are trained on, eight are not: all advantages of their group are 0.
    rows = rows_of([[1.0, 1.0], [0.0] * 5, [3.0] * 3], [1.0, 0.0, 0.0])
    (batch,) = micro_batches(algorithm, {"main": rows}, [GroupPart(torch.arange(3))], lambda sizes: sizes)
    batch.on_policy = on_policy
    assert [len(batch.policies["main"]), len(batch.without_gradient["main"])] == [1, 2]
    algorithm.training_step(batch, 0)
    assert evaluated == ([1] if on_policy else [1, 2]), "the old policy is known where it is the current one"
    found = algorithm.metrics.take_update()
    assert found["train/clip_fraction"] == pytest.approx(0.0 if on_policy else 2 / 10)
    assert found["train/mismatch_k1"] == pytest.approx(-(2 * 1 + 3 * 3) / 10)
    assert found["train/approx_kl"] == pytest.approx(math.exp(moved) - 1 - moved, rel=1e-4, abs=1e-9)
    assert found["train/loss"] == pytest.approx(-2 / 10 * (1 if on_policy else 1.05), rel=1e-5)


class Logged(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, algorithm: Any, *args: Any) -> None:
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_accumulation_does_not_change_what_is_logged(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    found = []
    for accumulation in (1, 4):
        logged = Logged()
        trainer = quiet_trainer(callbacks=[logged], accumulate_grad_batches=accumulation)
        data = RolloutDataModule(
            echo(turns=2), groups=4, group_size=4, iterations=2, passes=2, sampling=Sampling(max_tokens=6)
        )
        trainer.fit(GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}), data)
        found.append(logged.steps)
    whole, divided = found
    assert len(whole) == len(divided) == 4
    for one, other in zip(whole, divided, strict=True):
        names = [name for name in one if name.startswith("train/")]
        assert {"train/loss", "train/approx_kl", "train/clip_fraction", "train/mismatch_k3"} <= set(names)
        for name in names:
            assert other[name] == pytest.approx(one[name], rel=2e-3, abs=1e-6), name


def test_one_gather_an_update(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr(metric_log, "gather_ranks", lambda trainer, own: gathered.append(own) or [own])
    trainer = quiet_trainer(accumulate_grad_batches=4)
    data = RolloutDataModule(echo(), groups=4, group_size=4, iterations=3, sampling=Sampling(max_tokens=6))
    trainer.fit(GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}), data)
    assert len(gathered) == 3, "one for each of three updates of four micro-batches"


def test_the_target_is_compared_with_the_logged_divergence(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    logged = Logged()
    trainer = quiet_trainer(callbacks=[logged], accumulate_grad_batches=2)
    # Truncated sampling: the sampler's numbers are far from the learner's, the old policy's are not.
    data = RolloutDataModule(
        echo(), groups=4, group_size=4, iterations=2, passes=4, sampling=Sampling(max_tokens=6, top_k=5)
    )
    target = 1e-3
    trainer.fit(PPO({"main": Policy(str(model_folder), learning_rate=3e-3)}, stop_at_kl=target), data)
    assert logged.steps[0]["train/approx_kl"] < 1e-6, "the old policy is the learner's"
    assert logged.steps[0]["train/mismatch_k3"] > 10 * target
    # Updates after the one that ends a rollout have no rows and log nothing new of the divergence.
    ends = [step for step in logged.steps if step["train/early_stop"]]
    assert ends
    assert all(step["train/approx_kl"] > target for step in ends)
    first = next(place for place, step in enumerate(logged.steps) if step["train/early_stop"])
    assert all(step["train/approx_kl"] <= target for step in logged.steps[:first])


class Rows(Logger):
    """Keeps the metrics of the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name, version = "rows", ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


@pytest.mark.parametrize(("every", "steps", "with_rollout"), [(1, [0, 1, 2, 3], [0, 2]), (2, [1, 3], [1, 3])])
def test_an_update_of_several_micro_batches_writes_one_row(
    model_folder: Path, echo: Any, quiet_trainer: Any, every: int, steps: list[int], with_rollout: list[int]
) -> None:
    sampling = Sampling(max_tokens=3)
    data = RolloutDataModule(echo(), groups=4, group_size=2, iterations=2, minibatches=2, sampling=sampling)
    rows = Rows()
    trainer = quiet_trainer(logger=rows, log_every_n_steps=every, accumulate_grad_batches=2)
    trainer.fit(GRPO({"main": Policy(str(model_folder))}), data)
    assert [step for step, _ in rows.rows] == steps
    assert [step for step, row in rows.rows if "rollout/reward" in row] == with_rollout
    assert all({"train/loss", "train/grad_norm", "epoch"} <= set(row) for _, row in rows.rows)
    last, reward = rows.rows[-1][1], [row["rollout/reward"] for _, row in rows.rows if "rollout/reward" in row][-1]
    assert float(trainer.callback_metrics["train/loss"]) == last["train/loss"] == trainer.logged_metrics["train/loss"]
    assert trainer.progress_bar_metrics["rollout/reward"] == reward
    assert isinstance(trainer.logged_metrics["train/loss"], Tensor)
    assert [row["epoch"] for _, row in rows.rows] == [0] * len(steps)


def test_the_numbers_of_a_rollout_take_the_place_of_those_of_the_one_before() -> None:
    """With ``log_every_n_steps`` above 1 a row may come after several rollouts, in which other agents act."""
    learner: Any = SimpleNamespace(_trainer=SimpleNamespace(callback_metrics={}, progress_bar_metrics={}))
    metrics = metric_log.Metrics(["main"], learner)
    metrics.log({"rollout/reward": 1.0, "rollout/judge/reward": 1.0})
    for values in ({"train/loss": 0.5}, {"rollout/reward": 3.0}, {"train/kl": 0.1}):
        metrics.log(values)
    assert metrics.unwritten == {"rollout/reward": 3.0, "train/loss": 0.5, "train/kl": 0.1}


def test_the_bar_shows_a_divergence_once_there_is_one() -> None:
    several = {"train/approx_kl": 0.01, "train/loss": 1.0}
    assert [name for name in several if metric_log.on_update_bar(name, several)] == ["train/approx_kl"]
    assert not metric_log.on_update_bar("train/approx_kl", {"train/approx_kl": 0.0})


class Shown(GRPO):
    def advantages(self, returns: Any) -> Tensor:
        self.metrics.rollout["train/spread"] = 0.25
        return super().advantages(returns)

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = super().token_losses(logp, old_logp, rows)
        return losses, metrics | {"capped": torch.tensor(0.5), "other": torch.tensor(0.125)}


def test_the_bar_shows_own_numbers(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    class Logging(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.log("lab/number", 3.0, prog_bar=True)

    _, data = short(model_folder, echo)
    algorithm = Shown({"main": Policy(str(model_folder))})
    algorithm.metrics.shown |= {"capped", "spread"}
    trainer = quiet_trainer(callbacks=[Logging()])
    trainer.fit(algorithm, data)
    shown = trainer.progress_bar_metrics
    assert {"train/capped": 0.5, "train/spread": 0.25, "lab/number": 3.0}.items() <= shown.items()
    assert "train/other" not in shown


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3]), (2, [1, 3])])
def test_numbers_that_a_callback_logs_are_in_the_row_of_their_update(
    every: int, steps: list[int], model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    class Logging(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            pl_module.log("lab/updates", float(trainer.global_step), prog_bar=True)
            if trainer.global_step < 2:
                pl_module.log("lab/early", float(trainer.global_step))

    sampling = Sampling(max_tokens=3)
    data = RolloutDataModule(echo(), groups=4, group_size=2, iterations=2, minibatches=2, sampling=sampling)
    rows = Rows()
    options = {"log_every_n_steps": every, "accumulate_grad_batches": 2}
    trainer = quiet_trainer(logger=rows, callbacks=[Logging()], **options)
    trainer.fit(GRPO({"main": Policy(str(model_folder))}), data)
    assert [step for step, _ in rows.rows] == steps
    assert [row["lab/updates"] for _, row in rows.rows] == [step + 1 for step in steps]
    assert [row.get("lab/early") for _, row in rows.rows] == ([1, 1, None, None] if every == 1 else [1, None])
    assert all("train/loss" in row for _, row in rows.rows)
    for shown in (trainer.callback_metrics, trainer.progress_bar_metrics):
        assert float(shown["lab/updates"]) == 4


class Own(GRPO):
    def on_train_batch_end(self, *_: Any) -> None:
        """Do nothing."""


def short(model_folder: Path, echo: Any) -> tuple[GRPO, RolloutDataModule]:
    """Return what two iterations of three updates need."""
    sampling = Sampling(max_tokens=3)
    data = RolloutDataModule(echo(), groups=3, group_size=2, iterations=2, minibatches=3, sampling=sampling)
    return Own({"main": Policy(str(model_folder))}), data


@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.long_after(1)
def test_a_resumed_run_writes_the_rows_of_an_uninterrupted_one(
    step: int, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    whole, rest = Rows(), Rows()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    trainer = quiet_trainer(logger=whole, callbacks=[keep], enable_checkpointing=True, log_every_n_steps=2)
    trainer.fit(*short(model_folder, echo))
    path = tmp_path / f"step={step}.ckpt"
    quiet_trainer(logger=rest, log_every_n_steps=2).fit(*short(model_folder, echo), ckpt_path=path)
    assert [at for at, _ in whole.rows] == [1, 3, 5]
    expected = [(at, sorted(row)) for at, row in whole.rows if at is not None and at >= step]
    assert [(at, sorted(row)) for at, row in rest.rows] == expected


def test_the_last_row_is_written_before_the_checkpoint_of_the_last_update(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """A signal may end the run after it, and a resumed run has no update to log."""
    rows, keep = Rows(), ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=6)
    trainer = quiet_trainer(logger=rows, callbacks=[keep], enable_checkpointing=True, log_every_n_steps=4)
    trainer.fit(*short(model_folder, echo))
    assert [(step, row["epoch"]) for step, row in rows.rows] == [(3, 0), (5, 0)]
    assert torch.load(tmp_path / "last.ckpt")["callbacks"]["UpdateRows"]["row"] == {}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start"])
@pytest.mark.parametrize(("interval", "accumulated"), [(3, 1), (1, 2)])
@pytest.mark.long_after(1)
def test_the_row_of_an_update_stands_between_those_of_the_validations_around_it(
    interval: int, accumulated: int, hook: str, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """A signal in another callback ends the run between the update and its row, or that row and the validation's."""

    def end(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            raise SIGTERMException

    ending = Callback()
    setattr(ending, hook, end)
    found = []
    for folder, ends in ((tmp_path / "whole", []), (tmp_path / "ended", [ending])):
        last = LastCheckpoint()
        last.dirpath = str(folder)
        options = {"log_every_n_steps": 1, "limit_val_batches": 1.0, "val_check_interval": interval}
        options["accumulate_grad_batches"] = accumulated
        logger = MetricsFile(folder)
        trainer = quiet_trainer(callbacks=[*ends, last], enable_checkpointing=True, logger=logger, **options)
        with pytest.raises(SIGTERMException) if ends else nullcontext():
            trainer.fit(*short(model_folder, echo))
        if ends:
            trainer = quiet_trainer(logger=MetricsFile(folder), **options)
            trainer.fit(*short(model_folder, echo), ckpt_path=folder / "last.ckpt")
        with logger.path.open() as file:
            found.append([(row["step"], bool(row["train/loss"])) for row in csv.DictReader(file)])
    assert found[1] == found[0]
    assert len(found[0]) == 6 + 6 * accumulated // interval


def test_the_numbers_of_a_fit_are_in_its_rows(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    rows = Rows()
    algorithm, data = short(model_folder, echo)
    quiet_trainer(logger=rows, log_every_n_steps=4).fit(algorithm, data)
    assert [(step, "train/loss" in row) for step, row in rows.rows] == [(3, True), (5, True)]
    assert algorithm.metrics.unwritten == {}
    algorithm.metrics.unwritten = {"left": 1.0}  # by a fit that was interrupted
    _, data = short(model_folder, echo)
    quiet_trainer(logger=rows, log_every_n_steps=4).fit(algorithm, data)
    assert not any("left" in row for _, row in rows.rows)


def test_a_mean_of_an_evaluation_that_is_not_finite_is_logged_as_it_is(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    """A loss that is NaN was left out of the mean: the epoch had that of the other batches."""
    trainer, algorithm = quiet_trainer(max_steps=1), GRPO({"main": Policy(str(model_folder))})
    trainer.fit(algorithm, RolloutDataModule(echo(), groups=1, group_size=2, sampling=Sampling(max_tokens=2)))
    for loss in (1.0, math.nan):
        algorithm.metrics.add_evaluation("val", {"loss": (loss, 2.0), "unseen": (math.nan, 0.0), "kl": (loss, 0.0)})
    algorithm.metrics.add_evaluation("val", {"unseen": (3.0, 1.0)})
    found = algorithm.metrics.take_evaluation("val")
    assert math.isnan(found["val/loss"])
    assert math.isnan(found["val/kl"])  # no batch has a weight
    assert found["val/unseen"] == 3.0


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("train/mine", torch.ones(2), r"'train/mine' has shape \[2\]"),
        ("train/mine", None, "'train/mine' is None"),
        ("train/loss", 1.0, "'train/loss' has the name of one that is logged already"),
        ("train/main/kl", 1.0, "'train/main/kl' has the name of one that is logged already"),
    ],
)
def test_a_metric_of_a_rollout_is_one_number_with_a_name_of_its_own(name: str, value: Any, fault: str) -> None:
    metrics = Metrics(["main", "other"])
    metrics.rollout = {"train/fine": torch.tensor(2.0), "kl": 0.0, "train/row/kl": 0.0, name: value}  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match=rf"the metric {fault}; give it its own name and one number"):
        metrics.take_rollout()
