"""Detect the usable form of a model's cache by comparing short rows with and without it."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlm_pl.engines.local.generation import Context, Rows
from mrlm_pl.engines.local.transformers_model import CacheUse, GenericModel
from mrlm_pl.policy.forward.attention import exchanged

_log = logging.getLogger(__name__)

# Lengths of the contexts, the first with two rows; tokens fed to all; lengths of the next turn's additions.
_CONTEXTS = (9, 4, 6)
_STEPS = 3
_LATER = (5, 2)
# Window of sliding and chunked attention in the trial, shorter than its rows: a cache drops the tokens before its own.
_WINDOW = 6
_TOLERANCE = 1e-3
_ROUNDINGS = 8


class Checked(NamedTuple):
    """The result of :func:`cache_use`.

    Attributes:
        use: the fastest correct use of the cache.
        reason: why no faster use is possible; "" if there is none.
        leak: change of the logits after a token by later tokens, relative to their spread; 0 up to rounding.
    """

    use: CacheUse
    reason: str
    leak: float


def cache_use(model: GenericModel) -> Checked:
    """Return the fastest use of the model's cache that gives the logits of the model without a cache.

    Contexts of unequal length are fed, then a few tokens, while rows are copied and dropped. The logits must be those
    of each row alone, without cache and padding, up to rounding. Padded rows are tried first, then rows of equal
    length, both with the two methods by which a cache of transformers selects rows. If all fail, rows are recomputed.
    Windows of attention are shorter meanwhile, so that these rows reach beyond them.
    """
    config = model.model.config.get_text_config(decoder=True)
    long = [name for name in ("sliding_window", "attention_chunk_size") if (getattr(config, name, None) or 0) > _WINDOW]
    with exchanged([(config, name, _WINDOW) for name in long]):
        rows = _Rows(model)
        leak = rows.leak()
        if model.cache_name is None:
            return Checked(CacheUse(), "its forward takes no cache", leak)
        failures: list[str] = []
        for padded in (True, False):
            for select in ("batch_select_indices", "reorder_cache"):
                use = CacheUse(select, padded)
                failure = rows.failure(use)
                if failure is None:
                    sessions = use.padded and rows.failure(use._replace(sessions=True)) is None
                    return Checked(use._replace(sessions=sessions), "" if padded else failures[-1], leak)
                failures.append(f"{'padded rows' if padded else 'rows of equal length'}: {failure}")
        return Checked(CacheUse(), failures[-1], leak)


@functools.cache
def warn_of_cache(family: str, checked: Checked) -> None:
    """Warn, once for every family, of a cache without its fastest use and of missing causality."""
    use, reason, leak = checked
    if leak:
        _log.warning(
            "models of the family %r are not causal: tokens change the logits before them by %.0f%% of their spread, "
            "and the learner's log-probabilities are not the sampler's; train another model, or set `is_decoder: true` "
            "in its config if it has such a setting",
            family,
            100 * leak,
        )
    if not use.cached:
        cost = "every token recomputes its row, which is slow"
    elif not use.padded:
        cost = "rows are computed one length at a time, and each turn computes its whole context again"
    else:
        return
    _log.warning("models of the family %r are sampled without their full cache: %s (%s)", family, cost, reason)


class _Rows:
    """A few rows of random tokens and their logits without a cache.

    Args:
        model: the model.
    """

    def __init__(self, model: GenericModel) -> None:
        self._model = model
        named = model.model.config.get_text_config(decoder=True).to_dict().items()
        special = {value for name, value in named if name.endswith(("_id", "_index")) and isinstance(value, int)}
        embedding: Any = model.model.get_input_embeddings()
        vocabulary = len(embedding.weight)
        draw = random.Random(0)
        ordinary = [token for token in range(min(vocabulary, 4096)) if token not in special] or [0]
        self._contexts = [[draw.choice(ordinary) for _ in range(length)] for length in _CONTEXTS]
        self._tokens = [[draw.choice(ordinary) for _ in range(len(_CONTEXTS) + 1)] for _ in range(_STEPS)]
        self._later = [[draw.choice(ordinary) for _ in range(length)] for length in _LATER]
        self._tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(model.dtype).eps)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def failure(self, use: CacheUse) -> str | None:
        """Return why the cache cannot be used in this way; None if it can."""
        self._model.use = use
        try:
            return self._later_turn() if use.sessions else self._first_turn()[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a cache may fail in any way
            text = str(error).strip().splitlines()
            return f"{type(error).__name__}{': ' + text[0][:200] if text else ''}"

    def _first_turn(self) -> tuple[str | None, Rows, list[list[int]]]:
        """Feed the contexts and some tokens; the rows are those of contexts 0, 0, 1 and 2, then 0, 1 and 2."""
        contexts = [Context(tokens, 2 if u == 0 else 1) for u, tokens in enumerate(self._contexts)]
        logits, rows = self._model.prefill(contexts, _STEPS)
        failure = self._compare(self._contexts, logits)
        fed = [list(self._contexts[u]) for u in (0, 0, 1, 2)]
        for step, drawn in enumerate(self._tokens):
            if step == 1:
                rows.keep([1, 2, 3])
                fed = fed[1:]
            tokens = drawn[: len(fed)]
            for row, token in zip(fed, tokens, strict=True):
                row.append(token)
            logits = rows.step(torch.tensor(tokens, device=self._model.device))
            failure = failure or self._compare(fed, logits)
        return failure, rows, fed

    def _later_turn(self) -> str | None:
        """Continue two of the rows, of unequal length, in a batch with a new one."""
        _, rows, fed = self._first_turn()
        contexts = []
        for row, later in enumerate(self._later):
            states = rows.states(row, len(fed[row]))
            if states is None:
                return "its layers do not all hold keys and values"
            contexts.append(Context([*fed[row], *later], 1, states))
        contexts.append(Context(self._contexts[2], 1))
        logits, _ = self._model.prefill(contexts, 1)
        return self._compare([list(context.token_ids) for context in contexts], logits)

    def leak(self) -> float:
        """Return :attr:`Checked.leak`."""
        row, length = tuple(self._contexts[0]), len(self._contexts[1])
        if len(row) > self._model.boundary:
            return 0.0
        logits = self._model.logits(torch.tensor([row], device=self._model.device))[0, length - 1]
        error = _error(logits, self._expected_logits(row[:length]))
        return 0.0 if error <= self._tolerance else error

    def _compare(self, rows: Sequence[Sequence[int]], logits: Tensor) -> str | None:
        """Return the error of the logits [B, V] after these rows; None if they are right up to rounding."""
        for row, row_logits in zip(rows, logits, strict=True):
            error = _error(row_logits, self._expected_logits(tuple(row)))
            if not error <= self._tolerance:
                return f"its logits are off by {error:.1%} of their spread"
        return None

    def _expected_logits(self, row: tuple[int, ...]) -> Tensor:
        """Return the logits [V] after a row, from its tokens alone."""
        if row not in self._known:
            ids = torch.tensor([row], device=self._model.device)
            self._known[row] = self._model.logits(ids)[0, -1].float()
        return self._known[row]


def _error(computed: Tensor, expected: Tensor) -> float:
    """Return the distance of logits [V] from others, up to a constant, relative to the spread of the latter."""
    return float((computed.float() - expected).std() / expected.std().clamp(min=1e-30))
