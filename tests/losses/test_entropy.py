"""Tokens of high entropy, and the weight of the entropy bonus."""

import pytest
import torch

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import Entropy, top_entropy_threshold


def test_the_fifth_with_the_highest_entropy_reaches_the_threshold() -> None:
    entropy = torch.arange(20.0)
    assert entropy[entropy >= top_entropy_threshold(entropy, 0.2)].tolist() == [16.0, 17.0, 18.0, 19.0]
    assert entropy[:15][entropy[:15] >= top_entropy_threshold(entropy[:15], 0.2)].tolist() == [12.0, 13.0, 14.0]
    assert top_entropy_threshold(entropy, 1.0) == 0.0


def test_the_coefficient_follows_the_entropy() -> None:
    settings, coefficient, weights = Entropy(target=1.0, delta=0.25), 0.0, []
    for entropy in (0.5, 0.9, 1.0, 1.5, 2.0, 2.0, 0.9):
        coefficient, weight = settings.adapted(coefficient, entropy)
        weights.append(weight)
    assert weights == pytest.approx([0.25, 0.5, 0.25, 0.0, 0.0, 0.0, 0.25])


def test_without_a_target_the_coefficient_stays() -> None:
    assert Entropy(0.01).adapted(0.01, 0.0) == (0.01, 0.01)


def test_a_mistake_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"Entropy: coefficient is -1"):
        Entropy(-1)
    with pytest.raises(ConfigurationError, match=r"entropy.delta is 0.1, but there is no entropy.target"):
        Entropy(0.01, delta=0.1)
