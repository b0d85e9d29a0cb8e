"""A decode step for the Llama family, without the overhead of modules and cache objects.

Against ``model.forward`` it fuses projections, writes keys and values in place, never repeats them for grouped queries
or for the rows of a shared context, computes logits at last positions only and needs no attention mask where the
contexts are equally long.
Precision follows ``torch.autocast``: projections in the compute dtype, residual stream and norms in the module's dtype.
All else is in the compute dtype, or on a CPU in at least float32, as attention is in the learner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mrlm_pl.engines.local.adapters import AdaptedWeights
from mrlm_pl.engines.local.decoder import Decoder, DecoderWeights, causal_attention, storage_of
from mrlm_pl.engines.local.generation import Context
from mrlm_pl.engines.local.llama_rows import ContextRows, DecoderRows
from mrlm_pl.policy.forward.products import LINEAR
from mrlm_pl.policy.lora import adapted_weight

# Context tokens fed at once. On a CPU a thousand are enough for full speed; a GPU needs taller matrix products.
_PREFILL_TOKENS_CPU = 1024
_PREFILL_TOKENS_ACCELERATOR = 8192
_ROTATION_SLACK = 1024
_PADDING_SHARE = 0.25

_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return why :class:`FusedDecoder` cannot hold ``model``, or None if it can.

    It holds the Llama, Qwen2, Qwen3 and Mistral families with dense ``nn.Linear`` projections, full attention, SiLU
    and rotary embeddings whose frequencies do not depend on the length.
    """
    config = model.config
    if config.model_type not in _FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not 'silu'"
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if window is not None and sliding and window < config.max_position_embeddings:
        return f"sliding window attention over {window} tokens"
    rotary = model.model.rotary_emb
    if rotary.rope_type not in _STATIC_ROTARY:
        return f"rotary embedding of type {rotary.rope_type!r}"
    if 2 * rotary.inv_freq.numel() != model.model.layers[0].self_attn.head_dim:
        return "rotary embedding of a part of the head"
    for name, module in model.named_modules():
        dense = name.endswith(("_proj", "lm_head"))
        if dense and type(module) not in LINEAR and adapted_weight(module) is None:
            return f"a projection of type {type(module).__name__} instead of Linear"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"parameters on several devices: {', '.join(sorted(map(str, devices)))}"
    return None


MakeRows = Callable[["FusedDecoder", Sequence[int], Sequence[int], int], ContextRows]
"""Makes rows of a decoder, from the lengths of contexts, the number of rows of each, and the most tokens to append."""


class FusedDecoder(Decoder):
    """Llama, Qwen2, Qwen3 and Mistral models, from :class:`~mrlm_pl.engines.local.decoder.DecoderWeights`.

    Args:
        model: a model for which :func:`unsupported_reason` is None.
        dtype: compute dtype.
        own: copy all weights, so that the module may change between two calls of :meth:`refresh`.
        base: weights below the adapters of the model, which other decoders read too; None adds adapters to a copy.

    Attributes:
        rows: makes the rows of a batch.
    """

    weights: DecoderWeights | AdaptedWeights

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        own: bool = False,
        base: DecoderWeights | None = None,
    ) -> None:
        self.weights = DecoderWeights(model, dtype, own) if base is None else AdaptedWeights(model, base)
        super().__init__(self.weights.device, dtype)
        self.rows: MakeRows = DecoderRows
        self._cos = self._sin = torch.empty(0)

    def refresh(self) -> None:
        """Read the current weights of the module, which are on the same device as before."""
        self.weights.read()

    def rotation(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines ``[>= length, head size]``; the first half of the sines is negated."""
        if len(self._cos) < length:
            scale, dtype = self.weights.rotary_scale, self.weights.embedding.dtype
            positions = torch.arange(length + _ROTATION_SLACK, device=self.device).float()
            angles = torch.outer(positions, self.weights.inverse_frequency)
            cos, sin = angles.cos().mul_(scale).to(dtype), angles.sin().mul_(scale).to(dtype)
            self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return self._cos, self._sin

    def addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of all weights that a step reads."""
        return tuple(map(storage_of, self.weights.tensors()))

    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, ContextRows]:
        """Return logits ``[U, V]`` after each context, and rows that continue them; see :class:`Backend`."""
        lengths = [len(context.token_ids) for context in contexts]
        rows = self.rows(self, lengths, [context.rows for context in contexts], reserve)
        return self.feed(contexts, rows.shared), rows

    def feed(self, contexts: Sequence[Context], shared: Tensor) -> Tensor:
        """Return logits ``[U, V]`` after each context; write its keys and values.

        Args:
            contexts: contexts of the rows.
            shared: receives the keys and values, left-aligned, ``[layers, 2, U, KV heads, T, head size]``.
        """
        logits: list[Tensor] = [torch.empty(0)] * len(contexts)
        lengths = [len(context.token_ids) for context in contexts]
        for chunk in _chunks(contexts, self.device):
            chunk_logits, states = self._prefill_chunk([contexts[j] for j in chunk])
            for u, j in enumerate(chunk):
                shared[:, :, j, :, : lengths[j]] = states[:, :, u, :, : lengths[j]]
                logits[j] = chunk_logits[u]
        return torch.stack(logits)

    def _prefill_chunk(self, contexts: Sequence[Context]) -> tuple[Tensor, Tensor]:
        """Return logits ``[u, V]``, and keys and values ``[layers, 2, u, KV heads, T, head size]``, left-aligned."""
        w, sizes = self.weights, self.weights.sizes
        offsets = [context.cached for context in contexts]
        new = [list(context.token_ids[context.cached :]) for context in contexts]
        width = self.rounded(max(map(len, new)))
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in new], device=self.device)
        capacity = max(offsets) + width
        shape = (len(w.layers), 2, len(contexts), sizes.kv_heads, capacity, sizes.head_dim)
        states = torch.zeros(shape, dtype=self.attention_dtype, device=self.device)
        for u, context in enumerate(contexts):
            if context.states is not None:
                context.states.copy_to(states[:, :, u, :, : context.cached])
        cos, sin = self.rotation(capacity)
        if max(offsets) == 0:
            x = self.hidden(ids, cos[:width, None], sin[:width, None], causal_attention(states, sizes.scale, None))
        else:
            positions = torch.tensor(offsets, device=self.device)[:, None] + torch.arange(width, device=self.device)
            attend = causal_attention(states, sizes.scale, positions)
            x = self.hidden(ids, cos[positions][:, :, None], sin[positions][:, :, None], attend)
        last = torch.tensor([len(tokens) - 1 for tokens in new], device=self.device)
        return self.logits(x[torch.arange(len(new), device=self.device), last]), states


def _chunks(contexts: Sequence[Context], device: torch.device) -> Iterator[list[int]]:
    """Yield indices of contexts to prefill together: fresh apart from resumed, similar in length, bounded in tokens."""
    most = _PREFILL_TOKENS_CPU if device.type == "cpu" else _PREFILL_TOKENS_ACCELERATOR
    new = [len(context.token_ids) - context.cached for context in contexts]
    order = sorted(range(len(contexts)), key=lambda j: (contexts[j].cached > 0, new[j]))
    chunk: list[int] = []
    for j in order:
        if chunk:
            full = (len(chunk) + 1) * new[j] > most
            padding = 1 - sum(new[c] for c in [*chunk, j]) / ((len(chunk) + 1) * new[j])
            kind = (contexts[chunk[0]].cached > 0) != (contexts[j].cached > 0)
            if full or kind or padding > _PADDING_SHARE:
                yield chunk
                chunk = []
        chunk.append(j)
    if chunk:
        yield chunk
