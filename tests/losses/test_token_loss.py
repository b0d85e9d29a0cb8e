"""Token losses by name: their reductions, settings, weights and errors."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import LOSSES, Clip, LossName, token_loss

NAN = float("nan")
MASK = torch.tensor([[True, True, False], [True, True, False]])


def weights(name: Any, ratios: list[list[float]], advantages: list[float], **options: Any) -> list[list[float]]:
    logp = torch.tensor(ratios, dtype=torch.float64).log()
    spread = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(logp)
    mask = torch.ones_like(logp, dtype=torch.bool)
    found: list[list[float]] = token_loss(name, **options).with_weights(logp, 0 * logp, spread, mask)[1].tolist()
    return found


def test_the_names_are_those_of_the_signature() -> None:
    assert list(LOSSES) == list(get_args(LossName))


def test_the_reductions_are_those_of_the_papers() -> None:
    reductions = {name: token_loss(name).reduction for name in LOSSES}
    assert reductions == {
        "reinforce": "token_mean",
        "ppo": "token_mean",
        "gspo": "sequence_mean",
        "luspo": "sequence_sum",
        "gmpo": "sequence_mean",
        "cispo": "token_mean",
        "sapo": "sequence_mean",
        "vespo": "token_mean",
        "dppo": "token_mean",
    }


def test_ppo_gives_no_weight_to_clipped_tokens() -> None:
    """Ratios 1.3, 1.3, 0.7, 1.1 with A = 1, -1, -1, 1: the first and third are clipped."""
    logp = torch.tensor([[1.3, 1.3, 1.0], [0.7, 1.1, 9.0]]).log()
    advantages = torch.tensor([[1.0, -1.0, NAN], [-1.0, 1.0, NAN]])
    old = torch.zeros(2, 3)
    expected = {Clip(): [0, 1.3, 0, 1.1], Clip(high=0.05): [0, 1.3, 0, 0], Clip(low=0.4): [0, 1.3, 0.7, 1.1]}
    for clip, wanted in expected.items():
        found = token_loss("ppo", clip).with_weights(logp, old, advantages, MASK)[1]
        assert found[MASK].tolist() == pytest.approx(wanted)
        assert not found[~MASK].any()
    assert not found.requires_grad


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_weight_is_one_on_policy(name: LossName) -> None:
    assert weights(name, [[1.0, 1.0], [1.0, 1.0]], [2.0, -0.5]) == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", list(LOSSES))
def test_rows_are_independent_tokens_have_no_order_and_the_scale_of_advantages_is_that_of_the_loss(
    name: LossName,
) -> None:
    numbers = torch.randn(3, 5, 4, dtype=torch.float64)
    logp, old, advantages = -numbers[0].abs(), -numbers[1].abs(), numbers[2]
    inputs = (logp, old, advantages, torch.rand(5, 4) < 0.7)
    losses = LOSSES[name](*inputs)
    rows, tokens = torch.randperm(5)[:3], torch.randperm(4)
    found = LOSSES[name](*(part[rows][:, tokens] for part in inputs))
    torch.testing.assert_close(found, losses[rows][:, tokens])
    torch.testing.assert_close(LOSSES[name](logp, old, 4 * advantages, inputs[-1]), 4 * losses)


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_token_without_advantage_counts_as_one(name: LossName) -> None:
    assert weights(name, [[1.5, 0.5]], [0.0]) == [[1.0, 1.0]]


def test_the_weights_off_policy() -> None:
    """Ratios 1.5 and 1.2: their product is 1.8, their geometric mean sqrt(1.8)."""
    gate = [4 * s * (1 - s) for s in (1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-0.2)))]
    expected = {
        "ppo": [0.0, 1.2],
        "gspo": [0.0, 0.0],
        "luspo": [0.0, 0.0],
        "cispo": [1.5, 1.2],
        "sapo": [gate[0] * 1.5, gate[1] * 1.2],
        "vespo": [math.exp(3) * 1.8**2 * math.exp(-3 * 1.8)] * 2,
        "gmpo": [0.0, math.sqrt(1.2 * math.exp(0.4))],
        "reinforce": [1.0, 1.0],
    }
    for name, wanted in expected.items():
        clip = Clip(high=0.3) if name == "ppo" else Clip()
        assert weights(name, [[1.5, 1.2]], [1.0], clip=clip)[0] == pytest.approx(wanted, abs=1e-12), name
    assert weights("gspo", [[1.5, 1.2]], [-1.0])[0] == pytest.approx([math.sqrt(1.8)] * 2)
    assert weights("cispo", [[1.5, 1.2]], [1.0], clip=Clip(high=0.3))[0] == pytest.approx([1.3, 1.2])


def test_dppo_looks_at_the_probability() -> None:
    """From 0.01 to 0.05 is a ratio of 5 and allowed, from 0.5 to 0.8 a ratio of 1.6 and too far."""
    old, new = torch.tensor([[0.01, 0.5]]).log(), torch.tensor([[0.05, 0.8]]).log()
    found = token_loss("dppo").with_weights(new, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))[1]
    assert found[0].tolist() == pytest.approx([5.0, 0.0], rel=1e-5)


def test_a_setting_reaches_the_loss() -> None:
    sharp = token_loss("sapo", settings={"positive_temperature": 3.0})
    ratio, mask = torch.tensor([[1.5]]), torch.tensor([[True]])
    loss = sharp(ratio.log(), torch.zeros(1, 1), torch.ones(1, 1), mask).item()
    assert loss == pytest.approx(-4 / 3 / (1 + math.exp(-3 * 0.5)))


def squared(logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor, power: float = 2.0) -> Tensor:
    return (-advantages * (logp - old_logp).exp() ** power).masked_fill(~action_mask, 0.0)


def test_a_function_is_a_loss() -> None:
    found = token_loss(squared, settings={"power": 3.0})
    assert (found.reduction, found.uses_ratio) == ("token_mean", True)
    assert weights(squared, [[1.5]], [1.0])[0] == pytest.approx([2 * 1.5**2])


def constant(logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    return advantages.sum(-1)


def scaled(logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor, scale: float) -> Tensor:
    return scale * advantages * logp


def test_a_setting_of_an_own_loss_may_be_negative() -> None:
    mask, logp = torch.tensor([[True]]), torch.tensor([[-3.0]])
    assert token_loss(scaled, settings={"scale": -1.0})(logp, logp, torch.tensor([[2.0]]), mask).item() == 6.0


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("sapoo", {}, "loss is 'sapoo'; did you mean 'sapo'?"),
        (
            "sapo",
            {"settings": {"positive_temprature": 1.0}},
            "no such setting; did you mean 'positive_temperature'? It accepts: positive_temperature, negative_",
        ),
        ("ppo", {"settings": {"clip": 1.0}}, "loss_settings.clip: loss ppo has no such setting; it accepts: none"),
        (
            "sapo",
            {"settings": {"positive_temperature": 0.0}},
            "loss_settings.positive_temperature is 0.0; it must be above 0",
        ),
        ("dppo", {"settings": {"largest_ratio": -1.0}}, "loss_settings.largest_ratio is -1.0; it must be above 0"),
        ("vespo", {"settings": {"positive_shape": [1.0]}}, "loss vespo with the settings"),
        ("sapo", {"clip": Clip(high=0.3)}, "clip is {'high': 0.3}, but loss sapo has no clipping range"),
        ("reinforce", {"clip": Clip(high=0.3)}, "loss reinforce has no clipping range"),
        ("cispo", {"clip": Clip(dual=3.0)}, "clip.dual is 3.0, but this loss bounds the weight"),
        ("gmpo", {"clip": Clip(dual=3.0)}, "clip.dual is 3.0"),
        (constant, {}, "loss constant with the settings {} returned tensor([1.]) for one token"),
        (scaled, {"settings": {"scale": math.nan}}, "loss scaled with the settings {'scale': nan} returned"),
        (len, {}, "loss len with the settings {}"),
    ],
)
def test_a_mistake_is_an_error(loss: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        token_loss(loss, **options)


@pytest.mark.parametrize("loss", [constant, lambda logp: logp])
def test_a_mistake_in_an_own_loss_is_named_with_its_line(loss: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"test_token_loss\.py:{loss.__code__.co_firstlineno}\)$"):
        token_loss(loss)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_loss_is_chosen_where_gradients_are_off(mode: Any) -> None:
    with mode():
        assert token_loss("ppo").reduction == LOSSES["ppo"].reduction
