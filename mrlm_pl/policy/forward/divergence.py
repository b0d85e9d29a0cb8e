"""Divergence of a student's next-token distributions from its teachers', without ever holding all the logits.

:class:`Teaching` adds them to the other numbers of the student's forward pass. Both heads' logits exist for one chunk
of tokens at a time. Since the weight of each token in the loss is known, the gradient is computed with the value, and
no logits are computed twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlm_pl.policy.forward.devices import on_device
from mrlm_pl.policy.forward.head import HeadGradients, compute_dtype_of, default_chunk_size
from mrlm_pl.policy.forward.packing import ForwardPass
from mrlm_pl.policy.forward.products import linear


def weighted_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    token_weights: Tensor,
    *,
    beta: float = 0.5,
    temperature: Tensor | None = None,
    top_k: int | None = None,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum (0-dim) of the tokens' generalized Jensen-Shannon divergences, and those [n], detached.

    Also the log-probabilities [2, n] of ``targets`` under student and teacher, detached; empty without targets.

    With ``p`` of the teacher, ``q`` of the student and ``m = beta p + (1 - beta) q``::

        D = beta KL(p || m) + (1 - beta) KL(q || m),   0 < beta < 1
        D = KL(p || q) for beta 0,   KL(q || p) for beta 1

    Differentiable once in ``hidden``, ``weight`` and ``bias``.

    Args:
        hidden: [n, hidden size] states of the student.
        weight: [V, hidden size] weight of the student's output head.
        teacher_hidden, teacher_weight: states and head of the teacher; its hidden size may differ, its vocabulary may
            not.
        token_weights: [n], weight of each token in the sum; a constant.
        beta: interpolation in [0, 1].
        temperature: [n] divisors of both models' logits; None divides by nothing.
        top_k: compare the teacher's k most probable tokens, and all others as one; None compares every token.
        targets: [n] token ids.
        bias, teacher_bias: [V] biases of the heads.

    Source: arXiv 2306.13649.

    >>> hidden, one = torch.zeros(1, 1), torch.tensor([1.0])
    >>> teacher = torch.ones(1, 1), torch.tensor([[0.0], [3.0]]).log1p()
    >>> loss, _, _ = weighted_divergence(hidden, torch.ones(2, 1), *teacher, one, beta=0.0)
    >>> round(loss.item(), 4)  # KL of (0.2, 0.8) from (0.5, 0.5)
    0.1927
    """
    heads = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
    compare = functools.partial(_divergence, beta=beta)
    if top_k is not None and top_k < weight.shape[0]:
        compare = functools.partial(_top_k_divergence, beta=beta, k=top_k)
    return _WeightedDivergence.apply(*heads, token_weights, compare, temperature, targets)


class _WeightedDivergence(torch.autograd.Function):
    """The function behind `weighted_divergence`: its forward pass leaves the gradient of a loss of 1 per weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        token_weights: Tensor,
        compare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        temperature: Tensor | None,
        targets: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = compute_dtype_of(hidden, weight)
        wide = torch.promote_types(compute, torch.float32)
        head, teacher_head = weight.to(compute), teacher_weight.to(compute)
        divergences = hidden.new_empty(hidden.shape[0], dtype=wide)
        logp = hidden.new_empty(2, 0 if targets is None else hidden.shape[0], dtype=wide)
        slopes = token_weights if temperature is None else token_weights / temperature
        gradients = HeadGradients(ctx.needs_input_grad[:3], hidden, weight, bias, wide)
        chunk_size = max(1, default_chunk_size(weight.shape[0], hidden.device) // 2)
        with torch.autocast(hidden.device.type, enabled=False):  # which would compute the sums of the divergences too
            for start in range(0, hidden.shape[0], chunk_size):
                rows = slice(start, start + chunk_size)
                states = hidden[rows].to(compute)
                divisor = None if temperature is None else temperature[rows, None]
                log_q = _log_probs(states, head, bias, divisor, wide)
                log_p = _log_probs(teacher_hidden[rows].to(compute), teacher_head, teacher_bias, divisor, wide)
                for place, table in () if targets is None else enumerate((log_q, log_p)):
                    logp[place, rows] = table.gather(-1, targets[rows, None]).squeeze(-1)  # type: ignore[index]
                divergences[rows], slope = compare(log_p, log_q)
                if any(ctx.needs_input_grad[:3]):
                    gradients.add(rows, slope.mul_(slopes[rows, None]), states, head)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.mark_non_differentiable(divergences, logp)
        return (divergences * token_weights).sum(), divergences, logp

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else gradient * grads[0].to(gradient.dtype) for gradient in ctx.saved_tensors
        ]
        return (*scaled, *([None] * 7))


def _log_probs(
    states: Tensor, head: Tensor, bias: Tensor | None, temperature: Tensor | None, wide: torch.dtype
) -> Tensor:
    logits = linear(states, head, None if bias is None else bias.to(states.dtype))
    scaled = logits if temperature is None else logits.to(wide) / temperature
    return torch.log_softmax(scaled, -1, dtype=wide)


def _divergence(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergences [n] and their slopes [n, V] in the student's logits; overwrites its arguments."""
    if beta == 0.0:
        p = log_p.exp()
        divergences = log_p.sub_(log_q).mul_(p).sum(-1)
        return divergences, log_q.exp_().sub_(p)
    q = log_q.exp()
    if beta == 1.0:
        excess = log_q.sub_(log_p)
        divergences = torch.einsum("nv,nv->n", q, excess)
        return divergences, excess.sub_(divergences[:, None]).mul_(q)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    excess = log_q.sub_(log_m)
    student_term = torch.einsum("nv,nv->n", q, excess)
    p = log_p.exp()
    teacher_term = torch.einsum("nv,nv->n", p, log_p.sub_(log_m))
    slope = excess.sub_(student_term[:, None]).mul_(q).mul_(1.0 - beta)
    return beta * teacher_term + (1.0 - beta) * student_term, slope


def _top_k_divergence(log_p: Tensor, log_q: Tensor, beta: float, k: int) -> tuple[Tensor, Tensor]:
    """Return :func:`_divergence` over the teacher's k most probable tokens and one bucket of the others."""
    top, ids = log_p.topk(k, -1)
    rest = [table.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True) for table in (log_p, log_q)]
    buckets = [torch.cat([top_k, tail], -1) for top_k, tail in zip((top, log_q.gather(-1, ids)), rest, strict=True)]
    divergences, slope = _divergence(buckets[0], buckets[1], beta)
    # Within the bucket, the student's tokens share the slope by their probabilities.
    return divergences, log_q.sub_(rest[1]).exp_().mul_(slope[:, -1:]).scatter_(-1, ids, slope[:, :-1])


class Lesson(NamedTuple):
    """A teacher's view of the action tokens of a batch [B, T].

    Attributes:
        states: [n, hidden size], the teacher's last hidden states before the tokens that it teaches, in their order.
        head: output head of the teacher.
        places: [B * T], index of each token in ``states``, on the host; -1 for tokens that it does not teach.
        weights: [B * T], weight of each token's divergence in the loss; a constant.
        factor: factor of the teacher's divergences.
    """

    states: Tensor
    head: Any
    places: Tensor
    weights: Tensor
    factor: float


class Teaching(NamedTuple):
    """Divergences from teachers, in addition to the other numbers of a forward pass.

    Attributes:
        lessons: lesson of each teacher.
        beta, top_k: see :func:`weighted_divergence`.
        alone: True if the loss consists of the divergences alone, so that the log-probabilities have no gradient.
    """

    lessons: tuple[Lesson, ...]
    beta: float
    top_k: int | None
    alone: bool

    def divergences(self, hidden: Tensor, head: Any, inputs: ForwardPass, destinations: Tensor) -> Tensor:
        """Return four numbers of each of n tokens, [4, n]: loss, divergence, overlap, and number of teachers.

        The loss is the sum over teachers of ``factor`` times the divergence. Its gradient is right only in the sum
        over the tokens with the lessons' ``weights``. The overlap is ``min(1, pi_teacher / pi)`` of the sampled token,
        whose expectation is 1 minus the total variation. ``destinations`` are those of the inputs, on the host.
        """
        totals = hidden.new_zeros(4, hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        for lesson in self.lessons:
            places = lesson.places[destinations]
            taught = (places >= 0).nonzero().flatten()
            if not taught.numel():
                continue
            chosen, scored = (on_device(index, hidden.device) for index in (taught, places[taught]))
            weights, temperature = lesson.weights[inputs.destinations[chosen]], inputs.temperature
            loss, divergences, logp = weighted_divergence(
                hidden[chosen],
                head.weight,
                lesson.states[scored],
                lesson.head.weight,
                weights,
                beta=self.beta,
                temperature=None if temperature is None else temperature[chosen],
                top_k=self.top_k,
                targets=inputs.targets[chosen],
                bias=head.bias,
                teacher_bias=lesson.head.bias,
            )
            carried = divergences + (loss - loss.detach()) * weights / weights.square().sum()
            overlap = (logp[1] - logp[0]).exp().clamp(max=1.0)
            table = torch.stack([lesson.factor * carried, divergences, overlap, torch.ones_like(overlap)])
            totals = totals.index_add(1, chosen, table.to(totals.dtype))
        return totals
