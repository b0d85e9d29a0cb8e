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
        token_ids: all its tokens, at least one.
        rows: number of rows that continue it; they share its computation.
        states: keys and values of its first tokens from an earlier turn, shape ``[layers, 2, KV heads, T, head size]``
            with T below ``len(token_ids)``; None computes all tokens.
    """

    token_ids: Sequence[int]
    rows: int
    states: Tensor | None = None

    @property
    def cached(self) -> int:
        """Number of tokens with given keys and values."""
        return 0 if self.states is None else self.states.shape[3]


class Rows(ABC):
    """Rows in generation, with their keys and values."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` of the next token after one more token per row, ``tokens`` ``[B]``."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but ``rows`` (ascending indices into the current ones, at least one)."""

    @abstractmethod
    def states(self, row: int, length: int) -> Tensor | None:
        """Return a copy of keys and values of a row's first ``length`` tokens; None if the model has no such form."""


class Backend(ABC):
    """The generation loop's view of a model.

    Attributes:
        device: of its tensors.
    """

    device: torch.device

    @abstractmethod
    def refresh(self) -> None:
        """Read the current weights of the module."""

    @abstractmethod
    def prefill(self, contexts: Sequence[Context], reserve: int) -> tuple[Tensor, Rows]:
        """Return logits ``[U, V]`` after each of the U contexts, and rows that continue them.

        The rows are in the order of the contexts: first ``contexts[0].rows`` rows, and so on. ``reserve`` is the
        expected number of further tokens of a row; it sizes the first allocation and is no limit.
        """
