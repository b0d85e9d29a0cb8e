"""A policy's network at an earlier version, to generate with while the policy is trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy.lora import is_adapter
from mrlm_pl.policy.policy import Policy
from mrlm_pl.policy.sharding import all_tensors


class Snapshot:
    """A copy of a policy's network with its own weights; with LoRA it shares the policy's base.

    Args:
        policy: policy with loaded weights that are not split over processes.
        version: number of optimizer steps of its weights.
    """

    def __init__(self, policy: Policy, version: int) -> None:
        self.version = version
        self._adapter_only = policy.lora is not None
        copied, tensors = self._own(policy.network), all_tensors(policy.network)
        shared = {id(tensor): tensor for name, tensor in tensors.items() if name not in copied}
        self.network: Any = copy.deepcopy(policy.network, shared)

    @torch.no_grad()
    def take(self, policy: Policy, version: int) -> None:
        """Copy the policy's current weights."""
        self.version = version
        current = self._own(policy.network)
        for name, tensor in self._own(self.network).items():
            tensor.copy_(current[name])

    def state(self) -> dict[str, Any]:
        """Return version and own weights, copied to the CPU."""
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self._own(self.network).items()}
        return {"version": self.version, "weights": weights}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the value of :meth:`state`.

        Raises:
            ConfigurationError: the state is of a model of another shape.
        """
        weights, saved = self._own(self.network), state["weights"]
        shapes = [
            {(name, tensor.shape) for name, tensor in tensors_by_name.items()} for tensors_by_name in (weights, saved)
        ]
        wrong = {name for name, _ in shapes[0] ^ shapes[1]}
        if wrong:
            raise ConfigurationError(
                f"ckpt_path: its snapshots are of another model: {len(wrong)} weights, such as {min(wrong)!r}, are "
                "only in one of them or differ in shape; use the model and lora of its run"
            )
        self.version = state["version"]
        for name, tensor in weights.items():
            tensor.copy_(saved[name])

    def _own(self, network: Any) -> dict[str, Tensor]:
        """Return weights and buffers by name; with LoRA, those of adapters alone."""
        tensors = all_tensors(network).items()
        return {name: tensor for name, tensor in tensors if not self._adapter_only or is_adapter(name)}
