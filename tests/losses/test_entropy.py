"""Tokens of high entropy and the controller of the entropy bonus."""

import pytest
import torch

from mrlm_pl.losses import EntropyController, top_entropy_mask


def test_the_fifth_with_the_highest_entropy_is_kept() -> None:
    entropy = torch.arange(20.0).reshape(4, 5)
    mask = torch.ones(4, 5, dtype=torch.bool)
    assert entropy[top_entropy_mask(entropy, mask, 0.2)].tolist() == [16.0, 17.0, 18.0, 19.0]
    mask[3] = False
    assert entropy[top_entropy_mask(entropy, mask, 0.2)].tolist() == [12.0, 13.0, 14.0]
    assert top_entropy_mask(entropy, mask, 1.0).tolist() == mask.tolist()
    assert not top_entropy_mask(entropy, torch.zeros_like(mask), 0.2).any()


def test_the_coefficient_follows_the_entropy() -> None:
    controller = EntropyController(target=1.0, delta=0.25)
    assert [controller.update(entropy) for entropy in (0.5, 0.9, 1.5, 1.0, 2.0, 2.0, 2.0)] == pytest.approx(
        [0.25, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    )
