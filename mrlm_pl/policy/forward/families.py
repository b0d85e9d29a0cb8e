"""The path to a model's log-probabilities, from its configuration.

``packed``
    the common beginnings of rows with the same label are computed once, without padding (`packing`, `row_tree`,
    `attention`), and logits exist for one chunk of action tokens at a time (`head`);
``padded``
    the rows are padded, the logits are chunked;
``logits``
    the rows are padded and the model computes its own logits, for few rows at a time.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

# Families of transformers whose logits are exactly `lm_head(hidden states)`; the tests compare each with its own
# forward pass. The first set also passes unknown keyword arguments to the attention function.
_PACKED = "ernie4_5 gemma glm4 llama mistral mixtral olmo2 phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 starcoder2"
PACKED_FAMILIES = frozenset(_PACKED.split())
PADDED_FAMILIES = frozenset({"gpt2", "gpt_neox", "stablelm"})
# Rotary embeddings that depend on the position alone, "longrope" on either side of its boundary; others depend on the
# longest row of the batch.
_POSITIONAL_ROPE = frozenset({"default", "linear", "llama3", "yarn", "longrope"})


class ForwardPath(NamedTuple):
    """The path to a model's log-probabilities, and the property of the model that decides it."""

    name: Literal["packed", "padded", "logits"]
    reason: str


def forward_path(model: nn.Module) -> ForwardPath:
    """Return the path that `token_logprobs.token_logprobs` takes for this model, with the reason.

    Args:
        model: model of transformers, or its PEFT wrapper with an adapter that puts no virtual tokens before the prompt.
    """
    base = base_model(model)
    config = base.config
    family = config.model_type
    head = base.get_output_embeddings()
    if type(base).forward.__module__.partition(".models.")[0] != "transformers":
        return ForwardPath("logits", f"{type(base).__name__} is not a class of transformers")
    if family not in PACKED_FAMILIES | PADDED_FAMILIES:
        return ForwardPath("logits", f"family {family!r} may change its logits after the output head")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return ForwardPath("logits", f"the output head {type(head).__name__} is not a plain linear layer")
    if family not in PACKED_FAMILIES:
        return ForwardPath("padded", f"family {family!r} has no packed attention")
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if window is not None or layer_types - {"full_attention"}:
        return ForwardPath("padded", f"attention is not full (sliding_window={window}, layers {sorted(layer_types)})")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _POSITIONAL_ROPE:
        return ForwardPath("padded", f"rotary embedding {rope!r} depends on the length of the batch")
    return ForwardPath("packed", f"family {family!r} with full attention")


def rope_boundary(config: Any) -> int | None:
    """Return the longest row for the short factors of a ``longrope`` rotary embedding; None for other models.

    One longer row switches the whole batch to the long factors.
    """
    config = config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            return int(parameters["original_max_position_embeddings"])
    return None


def base_model(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT wrapper, or ``model`` itself."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(model, "get_base_model") else model


def weights_beside_text(model: PreTrainedModel) -> set[Tensor]:
    """Return the weights of a multimodal model that texts do not reach, such as those of its image encoder."""
    base: Any = model.base_model
    return {*base.parameters()}.difference(base.get_decoder().parameters())


@functools.cache
def log_path(model: str, path: ForwardPath) -> None:
    """Log the path, once for every model class and reason."""
    _log.info("log-probabilities of %s take the %s path: %s", model, path.name, path.reason)
