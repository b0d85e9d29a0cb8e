"""Teachers of a student's forward pass, for distillation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlm_pl.policy.forward.divergence import weighted_divergence
from mrlm_pl.policy.forward.packing import ForwardPass


class Lesson(NamedTuple):
    """A teacher's view of the action tokens of a batch [B, T].

    Attributes:
        states: [n, hidden size] its last hidden states before the tokens that it teaches, in their order.
        head: its output head.
        places: [B * T] place of each token in ``states``; -1 where it does not teach.
        weights: [B * T] weight of each token's divergence in the loss; a constant.
        factor: of its divergences.
    """

    states: Tensor
    head: Any
    places: Tensor
    weights: Tensor
    factor: float


class Teaching(NamedTuple):
    """Divergences from teachers, beside the other numbers of a forward pass.

    Attributes:
        lessons: of each teacher.
        beta, top_k: see :func:`~mrlm_pl.policy.forward.divergence.weighted_divergence`.
        alone: True if the loss is that of the divergences alone: the log-probabilities have no gradient.
    """

    lessons: tuple[Lesson, ...]
    beta: float
    top_k: int | None
    alone: bool

    def divergences(self, hidden: Tensor, head: Any, inputs: ForwardPass) -> Tensor:
        """Return four numbers of each of n tokens, [4, n]: loss, divergence, overlap, and number of teachers.

        The loss is the sum over teachers of ``factor`` times the divergence. Its gradient is right only in the sum
        over the tokens with the lessons' ``weights``. The overlap is ``min(1, pi_teacher / pi)`` of the sampled token,
        whose expectation is 1 less the total variation.
        """
        found = hidden.new_zeros(4, hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        for lesson in self.lessons:
            places = lesson.places[inputs.destinations]
            chosen = (places >= 0).nonzero().flatten()
            if not chosen.numel():
                continue
            weights, temperature = lesson.weights[inputs.destinations[chosen]], inputs.temperature
            loss, divergences, logp = weighted_divergence(
                hidden[chosen],
                head.weight,
                lesson.states[places[chosen]],
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
            found = found.index_add(1, chosen, table.to(found.dtype))
        return found
