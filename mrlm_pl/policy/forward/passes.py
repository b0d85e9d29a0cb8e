"""Forward passes for log-probabilities: planned in one place, run in the same process or in another.

A pass holds all about its rows, so that a copy of the model elsewhere computes the same numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mrlm_pl.policy.forward.attention import ATTENTION_NAME, PackedLayout, forward_switches
from mrlm_pl.policy.forward.devices import padded_tokens
from mrlm_pl.policy.forward.divergence import Teaching
from mrlm_pl.policy.forward.families import base_model, forward_path, rope_boundary
from mrlm_pl.policy.forward.head import chunked_log_probs, default_chunk_size, log_probs_from_logits
from mrlm_pl.policy.forward.packing import ForwardPass, RowPlan, TokenRows, padded_chunks
from mrlm_pl.policy.forward.tree_attention import has_kernel


def forward_passes(model: nn.Module, rows: TokenRows, max_tokens: int | None = None) -> list[ForwardPass]:
    """Return the passes of `token_logprobs` for these rows; its arguments and errors are those of that function."""
    rows.check()
    if not rows.action_mask.any():
        return []
    chunks = row_chunks(model, RowPlan(rows.token_ids, rows.action_mask, rows.prefix_groups), max_tokens)
    if rows.temperature is None:
        return chunks
    temperatures = rows.temperature.to("cpu", torch.float32).repeat_interleave(rows.token_ids.shape[1])
    return [replace(chunk, temperature=temperatures[chunk.destinations]) for chunk in chunks]


class PassRequest(NamedTuple):
    """The quantities that a forward pass computes for each token."""

    log_probs: bool
    entropy: bool
    value_head: nn.Module | None
    teaching: Teaching | None = None

    @property
    def num_outputs(self) -> int:
        """Number of requested quantities."""
        taught = 4 if self.teaching is not None else 0
        return int(self.log_probs) + int(self.entropy) + int(self.value_head is not None) + taught

    def stack(self, log_probs: Tensor | None, entropy: Tensor | None, hidden: Callable[[], Tensor]) -> Tensor:
        """Return the requested quantities of n tokens as rows [1 to 3, n], in at least float32."""
        rows = [row for row in (log_probs, entropy) if row is not None]
        if self.value_head is not None:
            values = self.value_head(hidden())
            rows.append(values.to(rows[0].dtype if rows else torch.promote_types(values.dtype, torch.float32)))
        return torch.stack(rows)


def pass_values(model: nn.Module, inputs: ForwardPass, request: PassRequest, seed: int | None) -> Tensor:
    """Return the requested values of n tokens, [1 to 7, n]; a seed lets the model have noise, which follows from it."""
    run = _model_logits if forward_path(model).name == "logits" else _chunked_logits
    return run(model, inputs, request, seed)


def model_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes."""
    return next(model.parameters()).device


def row_chunks(model: nn.Module, plan: RowPlan, max_tokens: int | None) -> list[ForwardPass]:
    """Return the inputs of every forward pass.

    A token with more tokens before it than the model's `rope_boundary` is predicted by another rotary embedding than
    the tokens before the boundary, as when it was sampled: each side has forward passes of its own.
    """
    base, path = base_model(model), forward_path(model)
    sides = plan.sides(rope_boundary(base.config))
    if path.name == "packed":
        device = model_device(model)
        return [inputs.padded(device, base.dtype) for side in sides for inputs in side.packed(max_tokens)]
    if path.name == "logits":
        bound = default_chunk_size(base.get_output_embeddings().weight.shape[0], model_device(model))
        max_tokens = bound if max_tokens is None else min(bound, max_tokens)
    return [side.pad(rows) for side in sides for rows in padded_chunks(side.fed_lengths, max_tokens)]


@contextmanager
def _noise(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from ``seed`` within the context; None leaves the generators unchanged."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def pass_states(model: nn.Module, inputs: ForwardPass) -> Tensor:
    """Return the model's last hidden states [n, hidden size] before the action tokens of a pass."""
    return _with_head(model, inputs.to(model_device(model)), lambda predicting: predicting, None)


def _chunked_logits(model: nn.Module, inputs: ForwardPass, request: PassRequest, seed: int | None) -> Tensor:
    """Return the requested values of n tokens, [1 to 7, n]; the output head is replaced by the chunked one."""
    head = base_model(model).get_output_embeddings()
    destinations, inputs = inputs.destinations, inputs.to(model_device(model))

    def forward(predicting: Tensor) -> Tensor:
        if not request.log_probs:
            return request.stack(None, None, lambda: predicting)
        teaching = request.teaching
        states, targets, temperature, count = predicting, inputs.targets, inputs.temperature, len(predicting)
        if padding := padded_tokens(count, states.device, head.weight.dtype) - count:
            states, targets = F.pad(states, (0, 0, 0, padding)), F.pad(targets, (0, padding))
            if temperature is not None:
                temperature = F.pad(temperature, (0, padding), value=1.0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not (teaching and teaching.alone)):
            log_probs, entropy = chunked_log_probs(
                states, head.weight, targets, bias=head.bias, temperature=temperature, with_entropy=request.entropy
            )
        log_probs, entropy = log_probs[:count], None if entropy is None else entropy[:count]
        values = request.stack(log_probs, entropy, lambda: predicting)
        if teaching is None:
            return values
        return torch.cat([values, teaching.divergences(predicting, head, inputs, destinations)])

    return _with_head(model, inputs, forward, seed)


def _with_head(model: nn.Module, inputs: ForwardPass, forward: Callable[[Tensor], Tensor], seed: int | None) -> Tensor:
    """Return ``forward`` of the hidden states [n, hidden size] before the action tokens, instead of the output head.

    The model is called as a whole, not its decoder and head one after the other, because sharding gathers the
    parameters of the outermost module in that call.
    """
    base = base_model(model)
    head = base.get_output_embeddings()

    def of_all(hidden: Tensor) -> Tensor:
        # No view: FSDP2 warns on every rank of a view that a model returns.
        return torch.stack([forward(selected(hidden.flatten(0, 1), inputs.predictors))])

    layout: dict[str, Any] = {}
    if inputs.segments is not None:
        device = inputs.input_ids.device
        in_one = has_kernel(base.config, base.dtype, device, dropout=seed is not None)
        layout["packed_layout"] = PackedLayout(inputs.segments, device, in_one)
    switches = forward_switches(base, ATTENTION_NAME if layout else None, noise=seed is not None)
    with switches, _noise(seed, inputs.input_ids.device), _replaced_forward(head, of_all):
        output = model(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **layout)
    return output.logits[0]


def selected(states: Tensor, rows: Tensor) -> Tensor:
    """Return these rows [n, size] of states [N, size], some of them several times.

    The gradients of a row that is there several times have one order of sums: on a GPU that of an index has none.
    """
    return F.embedding(rows, states) if states.device.type == "cuda" else states.index_select(0, rows)


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the ``forward`` of a module within the context; its hooks still run."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _model_logits(model: nn.Module, inputs: ForwardPass, request: PassRequest, seed: int | None) -> Tensor:
    """Return the requested values of n tokens, [1 to 3, n], from the model's own logits."""
    width = inputs.input_ids.shape[1]
    base = base_model(model)
    first = int((inputs.predictors % width).min())
    inputs = inputs.to(model_device(model))
    keep: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        keep["logits_to_keep"] = width - first
    states: list[Tensor] = []
    noted = base.get_output_embeddings().register_forward_pre_hook(lambda _, given: states.append(given[0]))
    assert inputs.attention_mask is not None
    switches = forward_switches(base, None, noise=seed is not None)
    with switches, noted, _noise(seed, inputs.input_ids.device):
        output = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask.long(), use_cache=False, **keep)

    B, columns, _ = output.logits.shape
    places = inputs.predictors - (inputs.predictors // width + 1) * (width - columns)  # all rows lack their beginning

    def hidden() -> Tensor:
        streams = states[-1].reshape(B, -1, columns, states[-1].shape[-1])
        return selected(streams[:, 0].flatten(0, 1), places)  # the other streams of ProphetNet predict later tokens

    if not request.log_probs:
        return request.stack(None, None, hidden)
    log_probs, entropy = log_probs_from_logits(
        output.logits.flatten(0, 1).index_select(0, places),
        inputs.targets,
        temperature=inputs.temperature,
        with_entropy=request.entropy,
    )
    return request.stack(log_probs, entropy, hidden)
