"""The scalar head of a critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mrlm_pl.advantages import Moments
from mrlm_pl.policy.pretrained import reading_weights
from mrlm_pl.policy.sharding import whole

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Expected return from a hidden state: one linear map, computed in at least float32 at any precision.

    Its weights start at 0, and so do its estimates. A normalized head estimates ``mean + deviation * linear(hidden)``
    with the mean and the standard deviation of all observed returns.

    Args:
        hidden_size: hidden size of the model.

    >>> ValueHead(4)(torch.ones(3, 4)).tolist()
    [0.0, 0.0, 0.0]
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.utils.skip_init(nn.Linear, hidden_size, 1, dtype=torch.float32)  # draws no numbers
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.moments: Tensor  # count, mean and squared sum of the returns, and their deviation
        self.register_buffer("moments", torch.tensor([0, 0, 0, 1], dtype=torch.float32), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ValueHead:
        moments = self.moments  # in float32 at any precision
        super()._apply(fn, recurse)
        self.moments = moments.to(self.moments.device)
        return self

    @torch.no_grad()
    def observe(self, returns: Moments) -> None:
        """Add the returns of a rollout to those that a normalized head has observed; its estimates move with them."""
        total = Moments(*self.moments[:3].tolist()) + returns
        self.moments.copy_(torch.tensor([*astuple(total), total.std or 1.0], dtype=torch.float64))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [...] of hidden states [..., hidden size]."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight, bias = self.linear.weight.to(wide), self.linear.bias.to(wide)
        with torch.autocast(hidden.device.type, enabled=False):
            values = nn.functional.linear(hidden.to(wide), weight, bias).squeeze(-1)
        return values * self.moments[3] + self.moments[1]

    def save(self, folder: str | Path, *, write: bool = True) -> None:
        """Write the weights to ``value_head.safetensors`` in a model's folder; all ranks call it, and one writes."""
        weights = {name: whole(value.detach()).cpu().contiguous() for name, value in self.state_dict().items()}
        if write:
            save_file(weights, Path(folder) / VALUE_HEAD_FILE)

    def read(self, folder: str | Path) -> None:
        """Read the weights from a folder, if it has any.

        Raises:
            PolicyError: the file is damaged.
            RuntimeError: the weights have another hidden size.
        """
        path = Path(folder) / VALUE_HEAD_FILE
        if path.is_file():
            with reading_weights(folder):
                weights = load_file(path)
            self.register_buffer("moments", self.moments, persistent="moments" in weights)
            self.load_state_dict(weights)
