"""Log-probabilities of the sampled tokens under a policy: the forward pass of every learner in this package.

Three paths lead to the same numbers; `forward_path` chooses one, `forward_passes` plans its passes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mrlm_pl.policy.forward.devices import on_device
from mrlm_pl.policy.forward.divergence import Teaching
from mrlm_pl.policy.forward.families import base_model, forward_path, log_path
from mrlm_pl.policy.forward.packing import ForwardPass, RowPlan, TokenRows
from mrlm_pl.policy.forward.passes import (
    PassRequest,
    forward_passes,
    model_device,
    pass_states,
    pass_values,
    row_chunks,
)
from mrlm_pl.policy.forward.rematerialization import rematerialized
from mrlm_pl.policy.sharding import is_sharded, passes_on_all_ranks
from mrlm_pl.seeding import derive_seed


class TokenOutputs(NamedTuple):
    """Numbers of every action token, each [B, T] float32 and 0 elsewhere; None: not requested.

    ``taught`` are four, [4, B, T]; see :meth:`~mrlm_pl.policy.forward.divergence.Teaching.divergences`.
    """

    logp: Tensor
    entropy: Tensor | None
    values: Tensor | None
    taught: Tensor | None = None


def token_logprobs(
    model: nn.Module, rows: TokenRows, *, max_tokens: int | None = None, noise_seed: int | None = None
) -> Tensor:
    """Return the log-probability of every action token given the tokens before it, [B, T] float32; exactly 0 elsewhere.

    ``out[b, t] = log softmax(logits / temperature)[token t | tokens < t]`` where ``action_mask[b, t]``. Differentiable
    in the model's parameters. The model computes in evaluation mode: without dropout, and without other noise of
    training, such as that of a router. While it runs, no other thread may call the same module.

    Args:
        model: causal language model of transformers, or its PEFT wrapper; the result is on its device.
        rows: rows on the host.
        max_tokens: maximum number of tokens in one forward pass; its rows, with shared tokens counted for each, have at
            most ``row_tree.MOST_READ`` times as many. Several passes run one after the other and, for gradients, each
            is recomputed in the backward pass, so that memory is that of one pass. So is a pass that exceeds the bound
            beside others of the same backward pass (`bounded_together`). The ranks of a sharded model make equally many
            passes, some of them idle.
        noise_seed: seed of the dropout and other training noise, which also depend on the pass; the model then keeps
            its mode. None computes without noise.

    Raises:
        ValueError: shapes disagree, or an action token has no token before it or lies in the padding.
    """
    return token_outputs(model, rows, max_tokens=max_tokens, noise_seed=noise_seed).logp


def token_outputs(
    model: nn.Module,
    rows: TokenRows,
    *,
    with_entropy: bool = False,
    value_head: nn.Module | None = None,
    teaching: Teaching | None = None,
    max_tokens: int | None = None,
    noise_seed: int | None = None,
) -> TokenOutputs:
    """Return `token_logprobs`, and entropies and values of the action tokens, from the same forward pass.

    The entropy, in nats, is that of the whole vocabulary at the given temperature. The value of a token is
    ``value_head`` of the last hidden state before it: the expected return from the state before it. All three are
    differentiable. The other arguments and the errors are those of `token_logprobs`.

    Args:
        with_entropy: whether to compute the entropies.
        value_head: module that maps hidden states [n, hidden size] to values [n]; None computes no values.
        teaching: divergences from teachers; None computes none.
    """
    request = PassRequest(True, with_entropy, value_head, teaching)
    values = list(_evaluate(model, request, rows, max_tokens, noise_seed).unbind())
    return TokenOutputs(
        values.pop(0),
        values.pop(0) if with_entropy else None,
        values.pop(0) if value_head is not None else None,
        torch.stack(values) if teaching is not None else None,
    )


@torch.no_grad()
def token_states(model: nn.Module, rows: TokenRows, *, max_tokens: int | None = None) -> Tensor:
    """Return the last hidden states [n, hidden size] before the action tokens, row by row, without gradient.

    The model must not be of the ``logits`` path of :func:`~mrlm_pl.policy.forward.families.forward_path`. The arguments
    and the errors are those of `token_logprobs`.
    """
    planned = forward_passes(model, rows, max_tokens)
    order = torch.cat([inputs.destinations for inputs in planned]).argsort()
    return torch.cat([pass_states(model, inputs) for inputs in planned])[on_device(order, model_device(model))]


def token_values(
    model: nn.Module,
    value_head: nn.Module,
    rows: TokenRows,
    *,
    max_tokens: int | None = None,
    noise_seed: int | None = None,
) -> Tensor:
    """Return the values of `token_outputs` alone, [B, T] float32, without the language-model head if possible."""
    return _evaluate(model, PassRequest(False, False, value_head), rows, max_tokens, noise_seed)[0]


def _evaluate(
    model: nn.Module, request: PassRequest, rows: TokenRows, max_tokens: int | None, noise_seed: int | None
) -> Tensor:
    """Return the requested values of every token, [1 to 7, B, T]."""
    planned = forward_passes(model, rows, max_tokens)
    B, T = rows.token_ids.shape
    log_path(type(base_model(model)).__name__, forward_path(model))
    # every rank of a sharded model takes part in all forward passes, and in their gradient
    passes = passes_on_all_ranks(model, max(1, len(planned)))
    recompute = torch.is_grad_enabled() and passes > 1
    if planned and torch.is_grad_enabled() and passes == 1 and max_tokens is not None and not is_sharded(model):
        # the ranks of a sharded model must recompute alike
        recompute = not hold(planned[0].input_ids.numel(), max_tokens)

    def run(inputs: ForwardPass, request: PassRequest, seed: int | None) -> Tensor:
        compute = functools.partial(pass_values, model, inputs, request, seed)
        if recompute:
            return checkpoint(compute, use_reentrant=False, preserve_rng_state=False)
        with rematerialized():
            return compute()

    seeds = [None if noise_seed is None else derive_seed("noise", noise_seed, n) for n in range(len(planned))]
    results = [run(inputs, request, seed) for inputs, seed in zip(planned, seeds, strict=True)]
    values = (
        torch.cat(results, 1)
        if planned
        else torch.zeros(request.num_outputs, 1, dtype=torch.float32, device=model_device(model))
    )
    for _ in range(passes - len(planned)):  # their values depend on all weights
        shortest = RowPlan(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[False, True]]), None)
        values = values + 0.0 * run(row_chunks(model, shortest, None)[0], request._replace(teaching=None), None).sum()
    if not planned:
        return values[:, :, None].repeat(1, B, T)
    flat = values.new_zeros(values.shape[0], B * T)
    destinations = on_device(torch.cat([inputs.destinations for inputs in planned]), flat.device)
    return flat.index_copy(1, destinations, values).view(-1, B, T)


_HELD: ContextVar[list[int] | None] = ContextVar("held_tokens", default=None)


@contextmanager
def bounded_together() -> Iterator[None]:
    """Count the passes of all models within the context together towards their bounds.

    A team's policies and critics make one forward pass each and share a backward pass, with the memory of all passes.
    """
    token = _HELD.set([0])
    try:
        yield
    finally:
        _HELD.reset(token)


def hold(tokens: int, most: int) -> bool:
    """Return whether a pass of this many tokens may be held, and count it; the first always may.

    Outside of the context all passes may be held.

    >>> with bounded_together():
    ...     print(hold(700, 1000), hold(400, 1000), hold(300, 1000))
    True False True
    """
    held_tokens = _HELD.get()
    if held_tokens is None:
        return True
    if held_tokens[0] and held_tokens[0] + tokens > most:
        return False
    held_tokens[0] += tokens
    return True
