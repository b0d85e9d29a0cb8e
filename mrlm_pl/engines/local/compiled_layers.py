"""Compiled layers of the decode step, for rows and contexts of any number and length.

TorchInductor compiles a layer ahead of time (``torch.export``, AOTInductor), with its weights and states as arguments:
layers of one structure share their code, even across policies, and new weights need no new code. There are no
guards: the checks of ``torch.compile`` at each call of a small layer take longer than its kernels.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mrlm_pl.engines.local.decoder import Decoder, LayerWeights, through_layer
from mrlm_pl.engines.local.llama_rows import DecoderRows
from mrlm_pl.errors import EngineError
from mrlm_pl.policy.compilation import counted
from mrlm_pl.policy.forward.devices import on_device
from mrlm_pl.policy.forward.products import standing_for

Code = Callable[[list[Tensor]], list[Tensor]]
"""Takes the arguments of `_Layer.forward` in a list, which it empties, and returns the residual stream in a list."""

# Sizes that the code is made with, so that it never depends on a first batch: rows, contexts, rows of a context,
# tokens of a context, own tokens, room for them. All but the last are free in the code.
_ROWS, _CONTEXTS, _WIDTH, _LENGTH, _END, _CAPACITY = 32, 5, 8, 48, 20, 64

# Least numbers of a thread, as in PyTorch's element-wise operations: to wake a thread takes longer than a small loop.
_CONFIGURATION = {"cpp.min_chunk_size": 32768}

_codes: dict[Hashable, Code] = {}
_lock = threading.Lock()


def compiled_layers(decoder: Decoder) -> list[Code]:
    """Return the code of each layer of a decoder; compile what this process has not compiled yet.

    The code does not depend on the batches or weights that it is used with, so a resumed run computes the same numbers.

    Raises:
        EngineError: this version of PyTorch cannot compile a layer for any number of rows, or has no compiler.
    """
    codes = []
    for layer in decoder.weights.layers:
        key = _key(decoder, layer)
        with _lock:
            if key not in _codes:
                with counted():
                    _codes[key] = _compile(decoder, layer)
        codes.append(_codes[key])
    return codes


def _key(decoder: Decoder, layer: LayerWeights[Any]) -> Hashable:
    """Return all that the code of a layer depends on."""
    dtypes = (decoder.attention_dtype, decoder.rotation(1)[0].dtype)  # the last is that of the embeddings
    leaves, structure = _flat(layer)
    weights = tuple(leaf if leaf is None else (leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
    return decoder.weights.sizes, dtypes, str(structure), weights, torch.get_num_threads()


def _flat(layer: LayerWeights[Any]) -> tuple[list[Tensor | None], pytree.TreeSpec]:
    """Return the weights of a layer, as compiled code takes them, and their structure."""
    leaves, structure = pytree.tree_flatten(tuple(vars(layer).values()))
    return [leaf if leaf is None or not leaf.is_mkldnn else standing_for(leaf) for leaf in leaves], structure


def _weights(layer: LayerWeights[Any]) -> list[Tensor]:
    """Return the weights of a layer that are there."""
    return [leaf for leaf in _flat(layer)[0] if leaf is not None]


class _Layer(nn.Module):
    """A layer of the decode step as a function of tensors.

    Args:
        decoder: gives the sizes.
        layer: gives the structure of the weights.
    """

    def __init__(self, decoder: Decoder, layer: LayerWeights[Any]) -> None:
        super().__init__()
        self._sizes, self._between = decoder.weights.sizes, decoder.attention_dtype
        leaves, self._structure = _flat(layer)
        self._present = [leaf is not None for leaf in leaves]

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        table: Tensor,
        place: Tensor,
        mask: Tensor,
        keys: Tensor,
        values: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Return the residual stream after the layer, ``[B, hidden size]``; write the last column of keys and values.

        Args:
            x: residual stream ``[B, hidden size]``.
            cos: cosines of the positions, ``[B, 1, head size]``.
            sin: signed sines of the positions, ``[B, 1, head size]``.
            table: row at each place of each context, ``[U, W]``.
            place: place of each row in the table, ``[B]``.
            mask: added to the attention scores of the contexts, ``[U, 1, T]``.
            keys: keys of the rows' own tokens, ``[KV heads * B, E, head size]``.
            values: values of the rows' own tokens, of the same shape.
            context_keys: keys of the contexts, ``[KV heads * U, T, head size]``.
            context_values: values of the contexts, of the same shape.
            weights: weights of the layer.
        """
        w = self._sizes
        kv_heads, group = w.kv_heads, w.heads // w.kv_heads
        given = iter(weights)
        leaves = [next(given) if present else None for present in self._present]
        layer: LayerWeights[Any] = LayerWeights(*pytree.tree_unflatten(leaves, self._structure))

        def by_context(x: Tensor) -> Tensor:
            return x[:, table].flatten(2, 3).flatten(0, 1)

        def by_row(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, group)).unflatten(0, (kv_heads, -1)).flatten(1, 2)[:, place].flatten(0, 1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[:, -1].copy_(k.transpose(0, 1).flatten(0, 1))
            values[:, -1].copy_(v.transpose(0, 1).flatten(0, 1))
            grouped = q.unflatten(1, (kv_heads, group)).transpose(0, 1) * w.scale
            of_context = torch.bmm(by_context(grouped), context_keys.transpose(1, 2))
            of_context = (of_context.unflatten(0, (kv_heads, -1)) + mask).flatten(0, 1)
            of_own = torch.bmm(grouped.flatten(0, 1), keys.transpose(1, 2))
            shares = torch.cat((by_row(of_context), of_own), -1).softmax(-1)
            # PyTorch 2.11 cannot compile slices here
            of_context, of_own = shares.split([mask.shape[2], keys.shape[1]], -1)
            of_context = torch.bmm(by_context(of_context.unflatten(0, (kv_heads, -1))), context_values)
            mixed = torch.bmm(of_own, values) + by_row(of_context)
            return mixed.unflatten(0, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)

        x = through_layer(w, self._between, layer, x, (-1,), cos, sin, attend)
        return x.contiguous()  # as the next layer reads it


def _compile(decoder: Decoder, layer: LayerWeights[Any]) -> Code:
    """Return the code of layers like this one."""
    shapes: Any = importlib.import_module("torch.fx.experimental._config")
    if not hasattr(shapes, "backed_size_oblivious"):
        raise EngineError(
            f"PyTorch {torch.__version__} cannot compile the decode step; take 2.8 or later, or leave compile out"
        )
    from torch._inductor.exc import InductorError  # of seconds, and only where something is compiled

    w, dtype = decoder.weights.sizes, decoder.attention_dtype
    zeros, x = torch.zeros, decoder.weights.embed(torch.zeros(_ROWS, dtype=torch.long))
    own_states = [zeros(w.kv_heads * _ROWS, _CAPACITY, w.head_dim, dtype=dtype)[:, :_END] for _ in range(2)]
    context = [zeros(w.kv_heads * _CONTEXTS, _LENGTH, w.head_dim, dtype=dtype) for _ in range(2)]
    rotation = [zeros(_ROWS, 1, w.head_dim, dtype=x.dtype) for _ in range(2)]
    table, place = zeros(_CONTEXTS, _WIDTH, dtype=torch.long), zeros(_ROWS, dtype=torch.long)
    mask = zeros(_CONTEXTS, 1, _LENGTH, dtype=dtype)
    arguments = (x, *rotation, table, place, mask, *own_states, *context, *_weights(layer))
    free = torch.export.Dim.DYNAMIC
    rows, both = {0: free}, {0: free, 1: free}
    states: tuple[Any, ...] = (rows, rows, rows, both, rows, {0: free, 2: free}, both, both, both, both)
    free_sizes = (*states, tuple(None for _ in _weights(layer)))
    with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch about itself
        # without it code for two or more rows, contexts or tokens would not be valid for one
        with shapes.patch(backed_size_oblivious=True):
            program = torch.export.export(_Layer(decoder, layer), arguments, dynamic_shapes=free_sizes, strict=False)
            path = str(Path(folder) / "layer.pt2")
            try:
                torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=_CONFIGURATION)
            except InductorError as error:
                raise EngineError(f"the decode step cannot be compiled: {error}; leave compile out") from error
        return torch._inductor.aoti_load_package(path).loader.boxed_run


class CompiledRows(DecoderRows):
    """Rows whose layers are compiled.

    Args:
        codes: compiled code of each layer.
        decoder: the weights and the arithmetic.
        lengths: number of tokens of each context.
        rows: number of rows of each context.
        reserve: maximum number of tokens to append.
    """

    def __init__(
        self, codes: Sequence[Code], decoder: Decoder, lengths: Sequence[int], rows: Sequence[int], reserve: int
    ) -> None:
        self._layers = [(code, _weights(layer)) for code, layer in zip(codes, decoder.weights.layers, strict=True)]
        super().__init__(decoder, lengths, rows, reserve)

    def _arrange(self) -> None:
        super()._arrange()
        rows, contexts = len(self._contexts), len(self._lengths)
        device, width = self.shared.device, self._width
        table_index = on_device(list(range(rows)), device) if self._places is None else self._places
        table = table_index.new_zeros(contexts * width).index_copy_(
            0, table_index, on_device(list(range(rows)), device)
        )
        mask = self.shared.new_zeros(contexts, 1, self.shared.shape[4]) if self._mask is None else self._mask[:, 0]
        self._arranged = [table.view(contexts, width), table_index, mask]
        self._context_states = [layer.unbind() for layer in self.shared.transpose(2, 3).flatten(2, 3)]

    def _hidden(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads = len(self._contexts), self._decoder.weights.sizes.head_dim
        rotation = [numbers.expand(rows, 1, heads).contiguous() for numbers in (cos, sin)]
        x = self._decoder.weights.embed(tokens)
        own_states = self._own.transpose(2, 3)[..., : self._fed + 1, :].flatten(2, 3).flatten(0, 1).unbind()
        for i, (code, weights) in enumerate(self._layers):
            (x,) = code(
                [x, *rotation, *self._arranged, *own_states[2 * i : 2 * i + 2], *self._context_states[i], *weights]
            )
        return x
