"""The learner's measures of individual tokens, from the first pass over a rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from mrlm_pl.episode import Episode, TurnKey
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.batch import PolicyBatch, not_none
from mrlm_pl.learner.credit.records import turn_keys

DECIMALS = 3
"""Decimals of a measure in the file."""

Span = tuple[TurnKey, int, int]
"""The key of a turn, and the start and stop of its tokens."""


class TokenMeasures:
    """Importance ratio, entropy and divergence from the reference of the tokens of a rollout, by turn.

    The measures are those that the first update on a token computes anyway: ``ratio`` is ``pi / pi_old``, ``entropy``
    in nats where it has a weight in the loss, ``kl`` is ``log pi - log pi_ref`` with a reference policy.

    Args:
        iteration: index of the rollout's iteration.
        spans: token spans of the turns of each row, by policy.
        found: measures of turns from before the resume.
    """

    def __init__(
        self,
        iteration: int,
        spans: Mapping[str, Sequence[Sequence[Span]]],
        found: Mapping[TurnKey, Mapping[str, Tensor]] = {},
    ) -> None:
        self.iteration, self.spans = iteration, spans
        self.found = {key: dict(measures) for key, measures in found.items()}

    @classmethod
    def of(cls, iteration: int, prepared: Sequence[Episode], batches: Mapping[str, PolicyBatch]) -> TokenMeasures:
        """Return the measures of a rollout without any yet; see :func:`~mrlm_pl.learner.credit.records.turn_keys`."""
        return cls(
            iteration,
            {
                name: [
                    [(key, turn.start, turn.stop) for key, turn in zip(of_row, row.turns, strict=True) if key]
                    for of_row, row in zip(keys, batches[name].trajectories, strict=True)
                ]
                for name, keys in turn_keys(prepared, batches).items()
            },
        )

    def add(self, policy: str, logp: Tensor, rows: PolicyBatch, entropy: Tensor | None = None) -> None:
        """Measure the turns of a micro-batch.

        Args:
            policy: name of the policy.
            logp: [B, T], log-probabilities of the current policy.
            rows: rows with the log-probabilities of the old and reference policies.
            entropy: [B, T], entropies of the current policy, or None.
        """
        measures = {"ratio": (logp - rows.old_logp).exp()}
        if entropy is not None:
            measures["entropy"] = entropy
        if rows.ref_logp is not None:
            measures["kl"] = logp - rows.ref_logp
        columns = dict(zip(measures, torch.stack([*measures.values()]).detach().float().cpu(), strict=True))
        for index, number in enumerate(not_none(rows.layout.numbers).tolist()):
            for key, start, stop in self.spans[policy][number]:
                if bool(rows.layout.action_mask[index, start:stop].all()):
                    self.found[key] = {name: values[index, start:stop].clone() for name, values in columns.items()}

    def lines(self) -> Iterator[str]:
        """Yield a line of JSON for each episode, or turn tree, with measures."""
        for of, turns in grouped((key[0], (key[1:], measures)) for key, measures in self.found.items()).items():
            record = {"of": of, "turns": {"/".join(map(str, key)): _round(measures) for key, measures in turns}}
            yield msgspec.json.encode(record).decode()

    def state(self) -> dict[str, Any]:
        """Return the constructor arguments that restore the measures."""
        return {"iteration": self.iteration, "spans": dict(self.spans), "found": self.found}


def _round(measures: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: torch.round(values.double(), decimals=DECIMALS).tolist() for name, values in measures.items()}
