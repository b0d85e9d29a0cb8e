"""Lightning's hooks in a user's subclass of an algorithm: they are free, as in any LightningModule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from mrlm_pl.algorithms import DPO, GRPO
from mrlm_pl.errors import ConfigurationError, NonFiniteError
from mrlm_pl.learner.optimization import owned_groups
from mrlm_pl.policy import Policy
from tests.support.runs.short_fits import fingerprint, make


def run(cls: type[GRPO], model_folder: Path, echo: Any, quiet_trainer: Any, **options: Any) -> tuple[str, Any]:
    """Return a hash of the weights after two updates, and the trainer."""
    _, data = make(model_folder, echo(), iterations=2, validation_episodes=2)
    algorithm, trainer = cls({"main": Policy(str(model_folder), learning_rate=1e-3)}), quiet_trainer(**options)
    trainer.fit(algorithm, data)
    return fingerprint(algorithm), trainer


def trained(algorithm: GRPO) -> list[torch.nn.Parameter]:
    return [weight for weight in algorithm.parameters() if weight.requires_grad]


class OfGroups(GRPO):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=0.1)


class OfWeights(GRPO):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": trained(self), "lr": 1e-3}], lr=0.1)


class OfTwoGroups(GRPO):
    def configure_optimizers(self) -> Any:
        weights = trained(self)
        return torch.optim.SGD([{"params": weights[:2], "name": "first"}, {"params": weights[2:]}], lr=1e-3)


@pytest.mark.long_after(1)
def test_an_own_optimizer_needs_no_names_of_policies(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    """It was a `KeyError: 'policy'`, at the first update. The policy's rate is 1e-3 in each of the three."""
    runs = [run(cls, model_folder, echo, quiet_trainer) for cls in (OfGroups, OfWeights, OfTwoGroups)]
    assert len({weights for weights, _ in runs}) == 1
    whole, alone, two = ({name: float(value) for name, value in made.callback_metrics.items()} for _, made in runs)
    assert alone["train/grad_norm"] == whole["train/grad_norm"] > 0
    assert math.hypot(two["train/grad_norm_first"], two["train/grad_norm_1"]) == pytest.approx(whole["train/grad_norm"])
    assert two["train/learning_rate_first"] == two["train/learning_rate_1"] == pytest.approx(1e-3)


class Diverging(OfTwoGroups):
    def configure_optimizers(self) -> Any:
        trained(self)[3].register_hook(lambda gradient: gradient * math.nan)
        return super().configure_optimizers()


def test_a_gradient_that_is_not_finite_is_named(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    """The message called the name of a group a policy, and did not tell two groups apart."""
    with pytest.raises(NonFiniteError, match=r"^train/grad_norm_1 is nan at step 0; lower the learning rate or clip"):
        run(Diverging, model_folder, echo, quiet_trainer)


def test_a_group_has_one_policy() -> None:
    a, b, own = (torch.nn.Parameter(torch.ones(2)) for _ in "abc")
    ours = [{"params": [a], "policy": "a"}, {"params": [b], "policy": "b"}]
    groups = [{"params": [b]}, {"params": [own], "name": "head"}, {"params": [a], "policy": "a", "name": "a/value"}]
    found = [(policy, suffix) for _, policy, suffix in owned_groups(groups, lambda: ours)]
    assert found == [("b", "_0"), ("", "_head"), ("a", "_value")]
    with pytest.raises(
        ConfigurationError, match=r"group 0 has weights of the policies \['a', 'b'\].*parameter_groups\(\)"
    ):
        list(owned_groups([{"params": [a, b]}], lambda: ours))


class OwnHooks(GRPO):
    """Its hooks call no ``super()``, as Lightning's examples do not."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("own/step", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("own/validation", 2.0)

    def on_test_epoch_end(self) -> None:
        self.log("own/test", 3.0)


@pytest.mark.long_after(1)
def test_own_hooks_take_nothing_away(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    options = {"limit_val_batches": 1.0}
    weights, plain = run(GRPO, model_folder, echo, quiet_trainer, **options)
    same, hooked = run(OwnHooks, model_folder, echo, quiet_trainer, **options)
    assert same == weights
    assert hooked.callback_metrics.keys() - plain.callback_metrics.keys() == {"own/step", "own/validation"}
    for name in ("train/grad_norm", "train/loss", "val/reward"):
        assert hooked.callback_metrics[name] == plain.callback_metrics[name]
    (tested,), (plain_tested,) = (made.test(made.lightning_module, made.datamodule) for made in (hooked, plain))
    assert tested == {**plain_tested, "own/test": 3.0}
    assert "test/reward" in tested


def test_callbacks_of_a_subclass_are_added_to_those_of_the_algorithm(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    """A run without them was not resumed exactly, and wrote no metrics."""

    class Alone(GRPO):
        def configure_callbacks(self) -> list[Callback]:
            return [EarlyStopping("train/loss")]

    with pytest.raises(ConfigurationError, match=r"Alone\.configure_callbacks leaves out .*super\(\)"):
        run(Alone, model_folder, echo, quiet_trainer)
    _, data = make(model_folder, echo())
    with pytest.raises(ConfigurationError, match=r"Alone\.configure_callbacks"):  # its metrics were not logged
        quiet_trainer(limit_val_batches=1.0).validate(Alone({"main": Policy(str(model_folder))}), data)


def test_a_policy_whose_weights_are_all_frozen_is_named(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    """Torch complained of an empty list of tensors."""
    algorithm, data = make(model_folder, echo(), iterations=1)
    algorithm.read_weights()
    algorithm.freeze()
    with pytest.raises(ConfigurationError, match=r"policy 'main' is trained, but .* frozen all its weights"):
        quiet_trainer().fit(algorithm, data)


@pytest.mark.parametrize("cls", [GRPO, DPO])
def test_a_validation_on_foreign_batches_is_refused(cls: Any, model_folder: Path, quiet_trainer: Any) -> None:
    loader: Any = DataLoader(torch.arange(4))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"{cls.__name__} cannot evaluate a Tensor; give a data module"):
        quiet_trainer(limit_val_batches=1.0).validate(cls({"main": str(model_folder)}), loader)
