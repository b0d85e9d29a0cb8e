"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen model."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy.forward.devices import drawn_on_host
from mrlm_pl.policy.forward.families import weights_beside_text
from mrlm_pl.policy.forward.int8 import Int8Linear
from mrlm_pl.policy.forward.products import LINEAR, body_layers
from mrlm_pl.policy.sharding import whole
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import PositiveFloat, PositiveInt, Settings

_KEY = ".lora_"


@dataclass(frozen=True)
class LoRA(Settings):
    """Adapters of the form ``W + alpha / rank B A``.

    Args:
        rank: rank of the product.
        alpha: weight of the product.
        target_modules: names of the linear layers with an adapter; None adapts all but the output head, layers that
            share their weights, which cannot have one, and those that texts do not reach, as in image encoders. Where
            not all of these can have one, as in most mixtures of experts, it adapts those of the attention.

    Raises:
        ConfigurationError: a value is out of range, or the names are one text.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    target_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.target_modules, str):
            raise ConfigurationError(
                f"lora.target_modules is {self.target_modules!r}; give a list of names, or None for all linear layers"
            )


class LayersError(ConfigurationError):
    """Some layers cannot have an adapter; ``others`` are the names of layers that can."""

    others: Sequence[str] = ()


def with_shared_weights(model: nn.Module) -> Any:
    """Return another module of the same structure over the same weights; adapters on one do not change the other."""
    memo = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, memo)


def add_adapter(model: PreTrainedModel, lora: LoRA, name: str, revision: str = "main") -> Any:
    """Return a PEFT model with fresh adapters on ``model``, which is changed; the rest is frozen.

    ``A`` is drawn from a seed that depends on ``name`` alone, ``B`` is 0: the model's outputs do not change. A saved
    adapter names the model's ``revision``, which PEFT then reads.

    Raises:
        LayersError: the model has no such layers, or they are not linear layers with their own weights.
    """
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    own = _own_weights(model) - weights_beside_text(model)
    linear = [key for key, layer in body_layers(model, _is_linear) if layer.weight in own]
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=cast(Any, lora.alpha),  # any number, despite the annotation
        target_modules=linear if lora.target_modules is None else list(lora.target_modules),
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    # Experts may take no adapter; the layers that are directly in the attention can.
    paths = [key.split(".") for key in linear]
    others = {path[-1] for path in paths if "att" not in "".join(path[-2:-1])}
    candidates = {path[-1] for path in paths} - others or others

    def refusal(fault: object) -> LayersError:
        names = sorted(name for name in candidates if f"'{name}'" not in str(fault))
        remedy = f"{'leave it out, or ' if lora.target_modules else ''}name the layers that get one, such as"
        error = LayersError(f"lora.target_modules {lora.target_modules}: {fault}; {remedy} [{', '.join(names)}]")
        error.others = names
        return error

    with drawn_on_host(derive_seed("lora", name)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks below raise errors instead
        try:
            adapted = get_peft_model(model, config, revision=revision)
        except ValueError as error:
            raise refusal(error) from error
        # By default PEFT would ask the hub for the vocabulary of the base.
        read: Any = set_peft_model_state_dict(adapted, get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if fault := _fault(adapted, config.target_parameters, read.missing_keys):
        raise refusal(fault)
    read_with_adapters(adapted)
    return adapted


def read_with_adapters(model: nn.Module) -> None:
    """Let ``weight`` of the layers with adapters, which is that of the base in PEFT, be the sum with the adapter.

    State-space models and their kernels multiply with the weight of a layer without calling the layer.
    """
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.__class__ = _with_sum(cast(Any, type(module)))


@functools.cache
def _with_sum(kind: Any) -> type[Any]:
    """Return the class of PEFT's layers ``kind`` with the adapter in ``weight``."""
    # No module has the class, so a copy is made by a function, its arguments and the contents.
    members = {"weight": property(_sum), "__reduce__": lambda layer: (_empty, (kind,), vars(layer))}
    return type(kind.__name__, (kind,), members)


def _empty(kind: Any) -> Any:
    return object.__new__(_with_sum(kind))


def _sum(layer: Any) -> Tensor | None:
    base = layer.disable_adapters or layer.merged or len(layer.lora_A) != 1
    return layer.base_layer.weight if base else adapted_weight(layer)


def _is_linear(layer: nn.Module) -> bool:
    """Return whether a layer's output is the product with its weight; routers derive from linear layers too."""
    return type(layer) in (*LINEAR, Conv1D) or type(layer).__name__ == "FalconLinear"


def _own_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of a model that a single layer has."""
    owners = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    return {weight for weight, count in owners.items() if count == 1}


def _fault(model: nn.Module, parameters: Collection[str] | None, unread: Sequence[str]) -> str | None:
    """Return why an adapter cannot be merged into its layer or read from a folder; None if all can.

    Args:
        model: model with the adapters.
        parameters: weights of experts that PEFT adapts instead of layers.
        unread: weights that PEFT would not find in the folder, including those of the base.
    """
    if parameters:
        return f"PEFT takes some of them for {sorted(parameters)} of experts; only linear layers can have an adapter"
    own = _own_weights(model)
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None:
            continue
        layer = name.removeprefix("base_model.model.")
        if not _is_linear(base):
            return f"{layer} is a layer of type {type(base).__name__}; only linear layers can have an adapter"
        if base.weight not in own:
            return f"{layer} shares its weight with another layer, so an adapter could not be merged into it"
        if any(key.startswith(name + _KEY) for key in unread):
            return f"{layer} has an adapter that PEFT would not find again in the exported folder"
    return None


def is_adapter(name: str) -> bool:
    """Return whether a weight of that name belongs to an adapter.

    >>> is_adapter("layers.0.q_proj.lora_A.default.weight"), is_adapter("layers.0.q_proj.base_layer.weight")
    (True, False)
    """
    return _KEY in name


def adapter_factors(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return ``A`` and ``alpha / rank B`` of a linear layer's adapter; None without an adapter."""
    if not hasattr(layer, "base_layer") or len(layer.lora_A) != 1:
        return None
    (name,) = layer.lora_A
    a, b = (whole(factor[name].weight) for factor in (layer.lora_A, layer.lora_B))
    return a, b * layer.scaling[name]


def adapted_weight(layer: Any) -> Tensor | None:
    """Return the weight of a linear layer with its adapter added, a new tensor; None without an adapter."""
    factors = adapter_factors(layer)
    if factors is None:
        return None
    a, b = factors
    weight, product = whole(layer.base_layer.weight), b @ a
    if isinstance(layer.base_layer, Conv1D):  # holds its weight as [inputs, outputs]
        product = product.T
    return weight + product.to(weight.dtype)


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model by the names of a plain model: adapters merged, int8 as the rounded weights."""
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if not is_adapter(name)}
    distinct = {id(value): value for value in state.values()}  # tied weights stay one tensor, which a folder has once
    tensors = {key: whole(value.detach()) for key, value in distinct.items()}
    merged = {name.replace(".base_layer.", "."): tensors[id(value)] for name, value in state.items()}
    for name, module in model.named_modules():
        weight = adapted_weight(module)
        if weight is not None:
            merged[f"{name}.weight"] = weight.cpu()  # all of them at once may be too many for a GPU
        if isinstance(module, Int8Linear):
            merged[f"{name}.weight"] = module.weight.cpu()
            del merged[f"{name}.rounded"], merged[f"{name}.scale"]
    return merged
