"""Cross-entropy against torch's own implementation."""

import torch

from mrlm_pl.losses import cross_entropy_loss, reduce_tokens


def test_equals_torch_cross_entropy_over_action_tokens() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 4, 0], [2, 2, 3]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    logp = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
    expected = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    torch.testing.assert_close(reduce_tokens(cross_entropy_loss(logp, mask), mask, "token_mean"), expected)


def test_an_empty_action_is_skipped() -> None:
    logp = torch.full((1, 2), float("-inf"), requires_grad=True)
    mask = torch.zeros(1, 2, dtype=torch.bool)
    loss = reduce_tokens(cross_entropy_loss(logp, mask), mask, "token_mean")
    loss.backward()
    assert loss.item() == 0.0
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, 0.0]]
