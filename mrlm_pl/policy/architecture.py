"""A model without its weights: enough to build the same modules in another process or next to the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from mrlm_pl.policy.forward.int8 import int8_layers, to_int8
from mrlm_pl.policy.lora import read_with_adapters
from mrlm_pl.policy.sharding import all_tensors


@dataclass(frozen=True)
class Architecture:
    """The class, configuration and adapters of a model; two are equal if the weights of one fit into the other.

    Args:
        cls: class of the model, without the part that sharding (FSDP2) adds.
        config: copy of the model's configuration.
        adapters: PEFT configurations by adapter name.
        tensors: shape, dtype and ``requires_grad`` of each parameter and buffer. Engines recognize trained weights by
            the last.
        int8: names of the linear layers in int8.
    """

    cls: type[PreTrainedModel]
    config: Any
    adapters: Mapping[str, Any]
    tensors: Mapping[str, tuple[torch.Size, torch.dtype, bool]]
    int8: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Architecture:
        """Return the architecture of a model; for a sharded model, that of the unsharded model."""
        plain: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
        tensors = {
            name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in all_tensors(model).items()
        }
        adapters: dict[str, Any] = getattr(model, "peft_config", {})
        return cls(plain, copy.deepcopy(model.config), copy.deepcopy(adapters), tensors, tuple(int8_layers(model)))

    def build(self, device: torch.device) -> PreTrainedModel:
        """Return a new model in evaluation mode whose parameters and buffers are uninitialized memory."""
        from peft import inject_adapter_in_model

        with torch.device("meta"):
            model = self.cls._from_config(copy.deepcopy(self.config), dtype=torch.float32)
            for name, adapter in self.adapters.items():
                inject_adapter_in_model(adapter, model, name)
            read_with_adapters(model)
            if self.int8:
                to_int8(model, self.int8)
        for name, tensor in all_tensors(model).items():
            _, dtype, trained = self.tensors[name]
            tensor.data = tensor.data.to(dtype)
            tensor.requires_grad_(trained)
        model.to_empty(device=device)
        model.tie_weights()
        return model.eval()
