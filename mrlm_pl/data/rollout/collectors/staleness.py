"""The lag of tokens: versions between the weights that sampled them and those that train on them."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence

from mrlm_pl.episode import Episode, Turn


class Lags:
    """Counts tokens by the number of versions between the weights that sampled them and those that learn from them.

    A version is published at the beginning of each iteration; turns record the optimizer step that it was made at.

    Args:
        bound: that no lag should exceed.
        policies: whose tokens count: those that are trained here.

    >>> lags = Lags(2, ["main"])
    >>> for iteration, step in enumerate((0, 4, 8)):
    ...     lags.published(iteration, step)
    >>> lags.of(iteration=2, version=4), lags.of(iteration=2, version=9)
    (1, 0)
    """

    def __init__(self, bound: int, policies: Sequence[str]) -> None:
        self.bound, self.policies = bound, frozenset(policies)
        self._iterations: list[int] = []
        self._versions: list[int] = []

    def published(self, iteration: int, version: int) -> None:
        """Note that the weights an iteration begins with are those of this optimizer step."""
        if self._iterations and self._iterations[-1] == iteration:
            return  # the iteration that a run was resumed in
        self._iterations.append(iteration)
        self._versions.append(version)
        keep = 2 * self.bound + 2
        self._iterations, self._versions = self._iterations[-keep:], self._versions[-keep:]

    def of(self, iteration: int, version: int) -> int:
        """Return the lag, in an iteration, of a token that weights of an optimizer step sampled."""
        place = bisect.bisect_right(self._versions, version) - 1
        # A version before the oldest one remembered is at least one older.
        sampled_in = self._iterations[place] if place >= 0 else self._iterations[0] - 1
        return iteration - sampled_in

    def largest(self, iteration: int, episodes: Sequence[Episode]) -> int:
        """The largest lag of a token of these episodes when an iteration learns from them; 0 without tokens."""
        return max(self._counts(iteration, episodes), default=0)

    def metrics(self, iteration: int, episodes: Sequence[Episode]) -> dict[str, tuple[float, float]]:
        """(sum, count) of the mean lag, of each lag's share of the tokens, and of the turns with several versions."""
        counts = self._counts(iteration, episodes)
        total = float(sum(counts.values()))
        turns = list(self._turns(episodes))
        found = {
            "async/lag": (float(sum(lag * tokens for lag, tokens in counts.items())), max(total, 1.0)),
            "async/mixed_turns": (float(sum(bool(turn.spans) for turn in turns)), max(float(len(turns)), 1.0)),
            "async/over_age_tokens": (float(sum(n for lag, n in counts.items() if lag > self.bound)), 1.0),
        }
        for lag in range(self.bound + 1):
            found[f"async/lag_{lag}"] = (float(counts[lag]), max(total, 1.0))
        return found

    def state(self) -> list[list[int]]:
        """Return the published versions as plain values."""
        return [self._iterations, self._versions]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Restore the value of :meth:`state`."""
        self._iterations, self._versions = list(state[0]), list(state[1])

    def _turns(self, episodes: Sequence[Episode]) -> Iterator[Turn]:
        for episode in episodes:
            for row in episode.rows():
                # A turn that other weights than the seat's decided is not of the policy's versions.
                yield from (turn for turn in row.turns if turn.policy == row.policy and turn.policy in self.policies)

    def _counts(self, iteration: int, episodes: Sequence[Episode]) -> Counter[int]:
        counts: Counter[int] = Counter()
        for turn in self._turns(episodes):
            for span in turn.token_spans():
                counts[self.of(iteration, span.version)] += span.tokens
        return counts
