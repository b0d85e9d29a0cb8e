"""Log-probabilities and entropies of target tokens from hidden states, without holding all logits.

The language-model head turns ``[n, hidden]`` into ``[n, V]``; at a vocabulary of 152k those logits and their softmax
are the largest tensors of a training step. Here they exist for one chunk of tokens at a time: the forward pass keeps
the log-normalizer of every token and the backward pass computes the chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlm_pl.policy.forward.products import linear, multiply

# Logits held at once. On a CPU 16M elements (64 MB) are enough for full speed; a GPU needs taller matrix products.
_CHUNK_ELEMENTS_CPU = 2**24
_CHUNK_ELEMENTS_ACCELERATOR = 2**27


def default_chunk_size(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens whose logits are held at once for a vocabulary of this size; at least 1.

    A model without memory (``meta``), which plans for one elsewhere, has the CPU's.

    >>> default_chunk_size(32768, torch.device("cpu"))
    512
    """
    elements = _CHUNK_ELEMENTS_CPU if device.type in ("cpu", "meta") else _CHUNK_ELEMENTS_ACCELERATOR
    return max(1, elements // vocabulary)


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: Tensor | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each target token, [n], and the entropy of each distribution, [n] or None.

    The distribution of token i is ``softmax((hidden[i] @ weight.T + bias) / temperature[i])``. The matrix products run
    in the autocast dtype where autocast is on and in ``hidden``'s dtype otherwise; the softmax and both results are
    float32 (float64 for float64 inputs). Differentiable in ``hidden``, ``weight`` and ``bias``, through both results.

    Args:
        hidden: [n, hidden size] states that predict the targets.
        weight: [V, hidden size] weight of the output head.
        targets: [n] token ids.
        bias: [V] bias of the output head.
        temperature: [n] positive divisors of the logits; None divides by nothing.
        with_entropy: also return the entropies (in nats).

    >>> hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0], [0.0], [0.0]])
    >>> log_probs, entropy = chunked_log_probs(hidden, weight, torch.tensor([2]), with_entropy=True)
    >>> round(log_probs.item(), 4), round(entropy.item(), 4)  # four equal choices: -log 4 and log 4
    (-1.3863, 1.3863)
    """
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, temperature, with_entropy)


def compute_dtype_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the product of hidden states with a head's weight: that of autocast where it is on."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else torch.promote_types(hidden.dtype, weight.dtype)


def log_probs_from_logits(
    logits: Tensor, targets: Tensor, *, temperature: Tensor | None = None, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each target, [n], and the entropies, [n] or None, from logits [n, V].

    >>> log_probs, _ = log_probs_from_logits(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
    >>> round(log_probs.item(), 4)
    -0.6931
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is not None:
        scaled = scaled / temperature.unsqueeze(-1)
    all_log_probs = F.log_softmax(scaled, dim=-1)
    log_probs = all_log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1) if with_entropy else None
    return log_probs, entropy


class _ChunkedLogProbs(torch.autograd.Function):
    """The function behind `chunked_log_probs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        compute_dtype = compute_dtype_of(hidden, weight)
        head = _Head(hidden, weight, bias, temperature, compute_dtype)
        log_probs = hidden.new_empty(hidden.shape[0], dtype=head.softmax_dtype)
        normalizers = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if with_entropy else None
        for rows in head.chunks():
            logits = head.scaled_logits(rows)
            largest = logits.amax(-1, keepdim=True)
            # log-sum-exp by hand: torch.logsumexp allocates a second chunk and is 2.5 times slower on a CPU
            differences = logits.sub_(largest)  # a sum with large logits, as at a low temperature, would lose digits
            target_differences = differences.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
            exponentials = differences.exp() if with_entropy else differences.exp_()
            total = exponentials.sum(-1)
            normalizers[rows] = (log_total := total.log()) + largest.squeeze(-1)
            log_probs[rows] = target_differences - log_total
            if entropy is not None:
                entropy[rows] = log_total - exponentials.mul_(differences).sum(-1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, normalizers, entropy)
        ctx.compute_dtype = compute_dtype
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, bias, targets, temperature, normalizers, entropy = ctx.saved_tensors
        compute_dtype = ctx.compute_dtype
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        head = _Head(hidden, weight, bias, temperature, compute_dtype)
        gradients = HeadGradients(ctx.needs_input_grad[:3], hidden, weight, bias, head.softmax_dtype)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(normalizers)
        if temperature is not None:
            grad_log_probs = grad_log_probs / temperature
            grad_entropy = None if grad_entropy is None else grad_entropy / temperature
        for rows in head.chunks():
            log_p = head.scaled_logits(rows).sub_(normalizers[rows].unsqueeze(-1))
            grad_target = grad_log_probs[rows].unsqueeze(-1)
            # d log p[y] / d z = onehot(y) - p and d H / d z = -p (log p + H), z the scaled logits
            if grad_entropy is None:
                grad_logits = log_p.exp_().mul_(-grad_target)
            else:
                p = log_p.exp()
                slope = log_p.add_(entropy[rows].unsqueeze(-1)).mul_(grad_entropy[rows].unsqueeze(-1))
                grad_logits = p.mul_(slope.add_(grad_target)).neg_()
            grad_logits.scatter_add_(-1, targets[rows].unsqueeze(-1), grad_target)
            gradients.add(rows, grad_logits, head.hidden[rows], head.weight)
        grad_weight = None if gradients.weight is None else gradients.weight.to(weight.dtype)
        grad_bias = None if gradients.bias is None else gradients.bias.to(bias.dtype)
        return gradients.hidden, grad_weight, grad_bias, None, None, None


class HeadGradients:
    """Gradients of hidden states, weight and bias of a head, added up chunk by chunk; None: not needed.

    Args:
        needed: whether each gradient is needed.
        hidden, weight, bias: inputs of the head.
        wide: dtype of the sums over tokens.
    """

    def __init__(
        self, needed: Sequence[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype
    ) -> None:
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if needed[2] and bias is not None else None

    def add(self, rows: slice, slope: Tensor, states: Tensor, head: Tensor) -> None:
        """Add the gradients of some tokens, given that of their logits, their states and the weight to compute with."""
        if self.bias is not None:
            self.bias += slope.sum(0)
        slope = slope.to(states.dtype)
        if self.hidden is not None:
            self.hidden[rows] = linear(slope, head.t())
        if self.weight is not None and self.weight.dtype == states.dtype:
            multiply(slope.t(), states, self.weight, add=True)
        elif self.weight is not None:
            self.weight += slope.t() @ states


class _Head:
    """The head's inputs in the compute dtype, and one buffer for its logits, chunk after chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor | None,
        compute_dtype: torch.dtype,
    ) -> None:
        self.hidden = hidden.to(compute_dtype)
        self.weight = weight.to(compute_dtype)
        self.bias = None if bias is None else bias.to(compute_dtype)
        self.temperature = temperature
        self.chunk_size = default_chunk_size(weight.shape[0], hidden.device)
        self.softmax_dtype = torch.promote_types(compute_dtype, torch.float32)
        shape = (min(self.chunk_size, hidden.shape[0]), weight.shape[0])
        self._product = self.hidden.new_empty(shape)
        wide = compute_dtype == self.softmax_dtype
        self._logits = self._product if wide else self._product.new_empty(shape, dtype=self.softmax_dtype)

    def chunks(self) -> list[slice]:
        """Return slices of at most ``chunk_size`` tokens that cover all tokens in order."""
        tokens = self.hidden.shape[0]
        return [slice(i, min(i + self.chunk_size, tokens)) for i in range(0, tokens, self.chunk_size)]

    def scaled_logits(self, rows: slice) -> Tensor:
        """Return logits over temperature of these tokens, [rows, V], in the softmax dtype, until the next call."""
        tokens = rows.stop - rows.start
        product, logits = self._product[:tokens], self._logits[:tokens]
        multiply(self.hidden[rows], self.weight.t(), product)
        if self.bias is not None:
            product += self.bias
        if logits.dtype != product.dtype:
            logits.copy_(product)
        if self.temperature is not None:
            logits.div_(self.temperature[rows].unsqueeze(-1))
        return logits
