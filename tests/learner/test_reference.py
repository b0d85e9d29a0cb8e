"""A reference outside of the learner: runs end with the weights of those that hold it themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from mrlm_pl.algorithms import GRPO, PPO, REINFORCEPlusPlus
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import PoolDeadlines, RayReference, Sampling
from mrlm_pl.engines.ray import group as worker_group
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import LoRA, Policy
from tests.support.pool_parts import FakeCluster


@pytest.fixture
def make_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], RayReference]]:
    """A factory of reference pools whose worker is a thread."""
    made: list[RayReference] = []
    monkeypatch.setattr(worker_group, "RayCluster", lambda *arguments: FakeCluster())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # workers set it for their process, which here is this one

    def make() -> RayReference:
        made.append(RayReference(1, deadlines=PoolDeadlines(10, 10, 3, 1)))
        return made[-1]

    yield make
    for reference in made:
        reference.close()


def rollouts(echo: Any, iterations: int, **options: Any) -> RolloutDataModule:
    return RolloutDataModule(
        echo(), groups=2, group_size=4, iterations=iterations, sampling=Sampling(max_tokens=5), **options
    )


def weights(algorithm: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in algorithm.named_parameters() if weight.requires_grad}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (GRPO, {}),
        (GRPO, {"lora": LoRA(rank=2)}),
        (REINFORCEPlusPlus, {}),
        (PPO, {}),
    ],
)
def test_a_run_ends_with_the_same_weights(
    cls: Any, options: dict[str, Any], make_reference: Any, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    found = {}
    for place in ("here", "pool", "without"):
        policy = Policy(str(model_folder), learning_rate=1e-2, **options)
        coefficient = 0.0 if place == "without" else 0.5
        reference = make_reference() if place == "pool" else None
        algorithm = cls({"main": policy}, kl={"coefficient": coefficient}, reference=reference)
        quiet_trainer().fit(algorithm, rollouts(echo, 3))
        found[place] = weights(algorithm)
        if place == "pool":
            assert policy.reference is None
            assert len(algorithm.networks()) == (2 if cls is PPO else 1), "the model, and PPO's value head"
    assert_same(found["pool"], found["here"])
    name = next(iter(found["here"]))
    assert not torch.equal(found["here"][name], found["without"][name]), "the reference matters"


def test_a_continued_run_compares_with_the_weights_before_the_first_update(
    make_reference: Any, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    def algorithm() -> GRPO:
        policy = Policy(str(model_folder), learning_rate=1e-2)
        return GRPO({"main": policy}, kl={"coefficient": 0.5}, reference=make_reference())

    whole, again = algorithm(), algorithm()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(whole, rollouts(echo, 4))
    quiet_trainer().fit(again, rollouts(echo, 4), ckpt_path=tmp_path / "step=2.ckpt")
    assert_same(weights(again), weights(whole))


def test_an_asynchronous_run_asks_its_reference(
    make_reference: Any, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    reference = make_reference()
    policy = Policy(str(model_folder), learning_rate=1e-2)
    algorithm = GRPO({"main": policy}, kl={"coefficient": 0.5}, reference=reference)
    trainer = quiet_trainer()
    trainer.fit(algorithm, rollouts(echo, 3, mode="async", max_lag=1))
    assert float(trainer.callback_metrics["train/kl"]) > 1e-3, "the weights moved, the reference did not"
    assert reference._group.workers[0].actor.calls.count("logprobs") == 3


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_a_reference_that_nobody_asks_is_refused(cls: Any, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"model.reference is RayReference, but without a kl.coefficient"):
        cls({"main": Policy(str(model_folder))}, reference=RayReference())
