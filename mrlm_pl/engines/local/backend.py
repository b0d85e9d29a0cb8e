"""The generation loop's interface to a model: feed contexts, then one token per row at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """A distinct context of a batch.

    Args:
        token_ids: all of it, at least one token.
        rows: number of rows that continue it; it is computed once for all of them.
        states: keys and values of its first tokens from an earlier turn, shape ``[layers, 2, KV heads, T, head size]``
            with T below ``len(token_ids)``; None computes all of it.
    """

    token_ids: Sequence[int]
    rows: int
    states: Tensor | None = None

    @property
    def cached(self) -> int:
        """Number of tokens whose keys and values are given."""
        return 0 if self.states is None else self.states.shape[3]


class Rows(ABC):
    """The rows that are being generated, with their keys and values."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the next token after one more token per row, ``tokens`` ``[B]``."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows`` (ascending indices into the current ones, at least one)."""

    @abstractmethod
    def states(self, row: int, length: int) -> Tensor | None:
        """A copy of the keys and values of a row's first ``length`` tokens; None where the model has no such form."""


class Backend(ABC):
    """A model as the generation loop sees it.

    Args:
        device: where its tensors are.
    """

    device: torch.device

    @abstractmethod
    def refresh(self) -> None:
        """Take over the current weights of the module."""

    @abstractmethod
    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, Rows]:
        """Logits ``[U, V]`` after each of the U contexts, and rows that continue them.

        The rows are in the order of the contexts: first ``contexts[0].rows`` rows, and so on. ``reserve`` is the
        number of tokens that a row may be fed later; it sizes the first allocation and is no limit.
        """
