"""The reference policy: the weights before the first update, or weights that move after the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policies.reference import KL
from mrlm_pl.losses import kl_k2
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.forward.packing import TokenRows


def rollouts(echo: Any, iterations: int, **options: Any) -> RolloutDataModule:
    return RolloutDataModule(
        echo(), groups=2, group_size=4, iterations=iterations, sampling=Sampling(max_tokens=5), **options
    )


def weights(algorithm: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in algorithm.named_parameters() if weight.requires_grad}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


def test_a_continued_run_compares_with_the_weights_before_the_first_update(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    def algorithm() -> GRPO:
        return GRPO({"main": Policy(str(model_folder), learning_rate=1e-2)}, kl={"coefficient": 0.5})

    whole, again = algorithm(), algorithm()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(whole, rollouts(echo, 4))
    quiet_trainer().fit(again, rollouts(echo, 4), ckpt_path=tmp_path / "step=2.ckpt")
    assert_same(weights(again), weights(whole))


def moving(folder: Path, lora: LoRA | None = None, **sync: Any) -> GRPO:
    policy = Policy(str(folder), learning_rate=1e-2, lora=lora)
    return GRPO({"main": policy}, kl={"coefficient": 0.5}, reference_sync=sync)


class Weights(Callback):
    """One weight of the policy and of its reference after each update, beginning with those before the first."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []

    def on_train_start(self, trainer: Any, algorithm: Any) -> None:
        self.take(algorithm)

    def on_train_batch_end(self, trainer: Any, algorithm: Any, *_: Any) -> None:
        self.take(algorithm)

    def take(self, algorithm: Any) -> None:
        policy = algorithm.policy("main")
        name = "model.layers.0.self_attn.q_proj." + ("weight" if policy.lora is None else "lora_B.default.weight")
        states = (policy.network.state_dict(), policy.reference.state_dict())
        self.found.append((states[0][name].clone(), states[1][name].clone()))


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
@pytest.mark.long_after(1)
def test_a_reference_is_refreshed_every_n_steps(
    lora: LoRA | None, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    weights = Weights()
    quiet_trainer(callbacks=[weights]).fit(moving(model_folder, lora, every=2), rollouts(echo, 5))
    current, reference = zip(*weights.found, strict=True)
    assert len({tensor.sum().item() for tensor in current}) == 6, "every update moves the policy"
    for step, at in enumerate([0, 0, 2, 2, 4, 4]):
        assert torch.equal(reference[step], current[at]), step


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_a_reference_follows_as_an_exponential_average(
    lora: LoRA | None, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    weights = Weights()
    quiet_trainer(callbacks=[weights]).fit(moving(model_folder, lora, every=1, decay=0.75), rollouts(echo, 3))
    expected = weights.found[0][0]
    for current, reference in weights.found[1:]:
        expected = 0.75 * expected + 0.25 * current
        torch.testing.assert_close(reference, expected)


def test_an_adapter_and_its_moving_reference_share_the_base(model_folder: Path) -> None:
    algorithm = moving(model_folder, LoRA(rank=2), every=1)
    algorithm.configure_model()
    policy = algorithm.policy("main")
    layers = [network.model.layers[0].self_attn.q_proj for network in (policy.network, policy.reference)]
    assert layers[0].base_layer.weight is layers[1].base_layer.weight
    saved = {name for name in algorithm.state_dict() if algorithm.is_saved(name)}
    assert saved
    assert all("lora_" in name for name in saved)
    assert {name.split(".")[2] for name in saved} == {"model", "reference"}
    ids = torch.arange(8, 24)[None]
    rows = TokenRows(ids, torch.tensor([16]), torch.arange(16)[None] > 3)
    with torch.no_grad():
        layers[0].lora_B["default"].weight.fill_(0.5)
        before = policy.reference_logprobs(rows)
        policy.move_reference(0.0)
        assert not torch.allclose(before, policy(rows))
        torch.testing.assert_close(policy.reference_logprobs(rows), policy(rows))


@pytest.mark.parametrize("sync", [{"every": 2}, {"every": 1, "decay": 0.75}])
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
@pytest.mark.long_after(1)
def test_a_run_with_a_moving_reference_continues_bit_for_bit(
    lora: LoRA | None, sync: dict[str, Any], model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    whole, again = moving(model_folder, lora, **sync), moving(model_folder, lora, **sync)
    still = moving(model_folder, lora)
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(whole, rollouts(echo, 4))
    quiet_trainer().fit(again, rollouts(echo, 4), ckpt_path=tmp_path / "step=2.ckpt")
    quiet_trainer().fit(still, rollouts(echo, 4))
    assert_same(weights(again), weights(whole))
    states = [algorithm.policy("main").reference.state_dict() for algorithm in (again, whole)]
    assert_same(*states)
    name = next(iter(weights(whole)))
    assert not torch.equal(weights(whole)[name], weights(still)[name]), "the loss compares with the moved reference"


def test_an_average_of_half_precision_is_refused(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    policy.load(reference=True)
    policy.to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"reference_sync.decay is 0.999, but the weights are torch.bfloat16"):
        policy.move_reference(0.999)
    policy.move_reference(0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference_sync": {"every": 3}}, "reference_sync.every is 3, but without a kl.coefficient"),
        ({"kl": {"coefficient": 0.1}, "reference_sync": {"decay": 0.9}}, "but reference_sync.every is not set"),
        ({"kl": {"coefficient": 0.1}, "reference_sync": {"every": 1, "decay": 1.0}}, "ReferenceSync: decay is 1.0"),
        ({"kl": {"coefficient": 0.1}, "reference_sync": {"every": 0}}, "ReferenceSync: every is 0"),
    ],
)
def test_a_reference_that_cannot_move_is_an_error(options: dict[str, Any], message: str, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPO({"main": Policy(str(model_folder))}, **options)


def rows_of_two_tokens() -> PolicyBatch:
    """Return a trajectory of a prompt's token and two sampled ones, with log-probabilities -2 under the reference."""
    mask = torch.tensor([[False, True, True]])
    tokens, number, logp = torch.ones(1, 3, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.zeros(1, 3)
    return PolicyBatch(
        token_ids=tokens,
        lengths=number + 3,
        action_mask=mask,
        behavior_logp=logp,
        groups=number,
        comparisons=number,
        episode_tokens=number + 2,
        temperature=torch.ones(1),
        advantages=logp,
        ref_logp=logp - 2.0,
    )


def test_a_function_estimates_the_divergence_of_sampled_tokens() -> None:
    def absolute(logp: Tensor, ref_logp: Tensor, action_mask: Tensor) -> Tensor:
        return (logp - ref_logp).abs()

    estimates = KL(0.1, estimator=absolute).estimates(torch.tensor([[-9.0, -3.0, -1.5]]), rows_of_two_tokens())
    assert estimates.tolist() == [[0.0, 1.0, 0.5]]


def test_an_estimator_that_returns_no_number_for_each_token_is_named() -> None:
    def mean(logp: Tensor, ref_logp: Tensor, action_mask: Tensor) -> Tensor:
        return (logp - ref_logp).mean()

    with pytest.raises(ConfigurationError, match=r"function mean returned .* \[1, 3\]"):
        KL(0.1, estimator=mean).estimates(torch.zeros(1, 3), rows_of_two_tokens())


@pytest.mark.parametrize("estimator", ["k3_straight_through", kl_k2])
def test_an_estimator_without_effect_on_the_reward_is_refused(estimator: Any) -> None:
    with pytest.raises(ConfigurationError, match="the estimate is k1"):
        KL(0.1, estimator=estimator, placement="reward")


def test_an_unknown_estimator_is_refused() -> None:
    for unknown, fault in {"k4": "is 'k4'; choose from k3, ", None: "is None; give a value"}.items():
        with pytest.raises(ConfigurationError, match=f"KL: estimator {fault}"):
            KL(0.1, estimator=unknown)  # type: ignore[arg-type]
