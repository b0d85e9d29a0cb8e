"""The history of a run over its iterations: its totals, and the alarms that its latest iterations raise."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.data.rollout.metrics import AgentReturns
from mrlm_pl.engines import Sampling
from mrlm_pl.grouping import summed
from mrlm_pl.learner.contract import EQUAL_RETURNS
from mrlm_pl.reward_models.scorer import VERIFIER_SCORE
from mrlm_pl.rollout.play import TURN_STOP

logger = logging.getLogger(__name__)


class RunTotals:
    """Totals of a run over its iterations, continued from a checkpoint.

    Logged as ``progress/iteration``, ``progress/episodes``, ``progress/failed_episodes``, ``progress/decisions``,
    ``progress/generated_tokens`` and ``progress/seconds``: the costs at which runs are compared. Episodes that failed
    or were replaced count, as they were played.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self.load(None)

    def start(self) -> None:
        """Start the clock."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop the clock, if it runs, until another fit continues the run."""
        self._totals, self._since = self.state(), None

    def after(self, iteration: int, played: Mapping[str, float]) -> dict[str, float]:
        """Return the totals after an iteration.

        Args:
            iteration: number of collected iterations.
            played: numbers of episodes, failed episodes, decisions and generated tokens in this iteration.
        """
        self._totals = summed([*self._totals.items(), *played.items()])
        totals = {"iteration": float(iteration), **self.state()}
        return {f"progress/{name}": total for name, total in totals.items()}

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return {**self._totals, "seconds": self._totals["seconds"] + running}

    def load(self, state: Mapping[str, float] | None) -> None:
        """Restore the value of :meth:`state`; None is a checkpoint without totals."""
        names = ("episodes", "failed_episodes", "decisions", "generated_tokens", "seconds")
        self._totals = {**dict.fromkeys(names, 0.0), **(state or {})}
        if self._since is not None:
            self.start()


_ITERATIONS = 3
"""Iterations in a row without a signal before the warning."""

_DETERMINISTIC = 0.05
"""Entropy of a token in nats below which all episodes of a task are nearly the same."""

_WAIT_SECONDS = 0.5
"""Mean wait of an episode for its environment below which more threads help little: a fast one waits for the cores."""

WINDOW = 2
"""Iterations at each end of a run whose means :class:`VerifierWatch` compares."""

STANDARD_ERRORS = 2.0
LEAST_CHANGE = 0.05

Measured = Sequence[float]
"""Sum of scores, number of scores, sum of successes and number of episodes, of one or several iterations."""


class SignalCheck:
    """Warns, with a likely cause, of consecutive iterations without a signal, or in which every turn is truncated.

    It also warns when episodes wait longer for a thread than for their environments.

    Each warning is logged once. Turns of a single token are meant to end at their limit.

    Args:
        sampling: sampling settings of the training episodes.
        compares: whether the algorithm compares the episodes of a task, so that equal returns in each group carry no
            signal; otherwise only equal returns, agent by agent, in all episodes of these iterations carry none.
        no_signal_reason: explanation of groups without a signal; see
            :attr:`~mrlm_pl.learner.algorithm.Algorithm.no_signal_reason`.
    """

    def __init__(self, sampling: Sampling, compares: bool, no_signal_reason: str = EQUAL_RETURNS) -> None:
        self.compares, self.no_signal_reason = compares, no_signal_reason
        self.sample(sampling)
        self._warned: set[str] = set()
        self._flat = self._truncated = 0
        self._varied = False  # an earlier iteration had a signal
        self._queued = False
        self._returns: frozenset[AgentReturns] = frozenset()

    def sample(self, sampling: Sampling) -> None:
        """Change the sampling settings of the training episodes."""
        settings = [sampling, *(sampling.of(name) for name in sampling.policies)]
        self._greedy = not any(setting.temperature for setting in settings)
        self._one_token = all(setting.max_tokens == 1 for setting in settings)
        contexts = [f" or max_context {setting.max_context}" if setting.max_context else "" for setting in settings]
        limits = (f"{setting.max_tokens}{context}" for setting, context in zip(settings, contexts, strict=True))
        self._limits = ", ".join(dict.fromkeys(limits))

    def add(self, metrics: Mapping[str, float], returns: frozenset[AgentReturns]) -> None:
        """Add an iteration.

        Args:
            metrics: logged numbers of the iteration.
            returns: returns of the agents in its episodes, on all ranks.
        """
        before, self._returns = self._returns, returns
        if self.compares:
            flat = metrics.get("rollout/zero_variance_groups") == 1.0
        else:
            flat = len(returns) == 1
            self._flat *= before == returns
        truncated = metrics.get("rollout/truncated_turns") == 1.0
        self._varied = self._varied or not flat
        self._flat = self._flat + 1 if flat else 0
        self._truncated = self._truncated + 1 if truncated else 0
        queue, environment = (metrics.get(f"rollout/seconds/{phase}", 0.0) for phase in ("queue", "environment"))
        if queue > environment > _WAIT_SECONDS and not self._queued:
            self._queued = True
            logger.warning(
                "an episode waits %.1f s for a thread and %.1f s for its environment; raise data.workers, or "
                "data.processes if it is set, or write `async` methods",
                queue,
                environment,
            )
        if self._flat == _ITERATIONS:
            finding = self.no_signal_reason if self.compares else "the rewards of each agent are equal"
            cause = self._cause(metrics, truncated and not self._one_token)
            self._warn(f"{_ITERATIONS} iterations in a row have no learning signal: {finding}. Likely cause: {cause}")
        elif self._truncated == _ITERATIONS and not self._one_token:
            self._warn(
                f"every turn of {_ITERATIONS} iterations in a row is truncated at data.sampling.max_tokens "
                f"{self._limits}; raise it, or check that the model's chat template ends a reply with its "
                "end-of-sequence token"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _cause(self, metrics: Mapping[str, float], truncated: bool) -> str:
        if self._greedy:
            return "data.sampling.temperature is 0, so all episodes of a task are the same; set it to 1"
        if metrics.get("rollout/success") != 1.0 and metrics.get("rollout/entropy", 1.0) < _DETERMINISTIC:
            return (
                f"the policy is nearly deterministic (rollout/entropy below {_DETERMINISTIC}); lower the learning "
                "rate, or set model.entropy.coefficient"
            )
        if truncated:
            return f"every turn is truncated at data.sampling.max_tokens {self._limits}, before an answer; raise it"
        if metrics.get(f"rollout/stop/{TURN_STOP}") == 1.0:
            return (
                "every episode is truncated at data.max_turns; raise it, or check with `mrlm check-env` that the "
                "environment ends its episodes"
            )
        if self.no_signal_reason != EQUAL_RETURNS and "rollout/success" not in metrics:
            return "the environment does not say which episodes succeed; set its `success_at` where it has one"
        if self.no_signal_reason != EQUAL_RETURNS:
            return "the tasks are too hard for the model; use easier ones first"
        if metrics.get("rollout/success") == 1.0:
            return "every episode succeeds; use harder tasks"
        earned = {value for episode in self._returns for _, value in episode}
        rewards = f"{min(earned):g}" + (f" to {max(earned):g}" if len(earned) > 1 else "") if earned else ""
        if metrics.get("rollout/success") == 0.0 or not any(earned):
            fault = f"succeeds, and all of a group earn the same, {rewards}" if any(earned) else "earns anything"
            return (
                f"no episode {fault}: the tasks are too hard for the model, or its replies are not in the form that "
                "the environment reads; look at RUN/episodes, or `mrlm eval` with a few episodes"
            )
        if self._varied:
            return (
                f"the policy has converged: rewards differed before and are now {rewards}; use harder tasks if no "
                "reply earns more, otherwise sample more different replies (model.entropy.coefficient, data.group_size)"
            )
        return (
            f"the rewards are {rewards}: the policy solves or fails each task in every reply, or the reward does not "
            "depend on the reply; look at RUN/episodes"
        )


class VerifierWatch:
    """Warns when a verifier's mean score rises while the accuracy by the tasks' own labels falls, by environment.

    Both are compared between the first and the latest :data:`WINDOW` iterations. Each must change by more than
    :data:`STANDARD_ERRORS` standard errors, and the score by :data:`LEAST_CHANGE` or more. The standard error of a mean
    p of n values in [0, 1] is at most sqrt(p (1 - p) / n).
    """

    def __init__(self) -> None:
        self._first: dict[str, list[list[float]]] = {}
        self._latest: dict[str, list[list[float]]] = {}
        self._warned: list[str] = []

    def add(self, means: Mapping[str, tuple[float, float]]) -> str | None:
        """Add an iteration; return a warning with a line for each environment that has none yet, or None.

        Args:
            means: sum and count of the iteration's logged means, by name.
        """
        lines: list[str] = []
        for name, (total, count) in means.items():
            environment = name.removeprefix("rollout/").removesuffix(f"/{VERIFIER_SCORE}")
            right = means.get(f"rollout/{environment}/accuracy")
            if name != f"rollout/{environment}/{VERIFIER_SCORE}" or right is None:
                continue
            first = self._first.setdefault(environment, [])
            latest = self._latest.setdefault(environment, [])
            (first if len(first) < WINDOW else latest).append([total, count, *right])
            del latest[:-WINDOW]
            if len(latest) < WINDOW or environment in self._warned:
                continue
            before, after = _pool(first), _pool(latest)
            if diverged(before, after):
                self._warned.append(environment)
                lines.append(
                    f"{environment}: the verifier's score has risen from {before[0] / before[1]:.3f} to "
                    f"{after[0] / after[1]:.3f} while the accuracy has fallen from {before[2] / before[3]:.3f} to "
                    f"{after[2] / after[3]:.3f}: the policy learns to please the verifier. Stop the run at its best "
                    "accuracy; train the verifier on answers of this policy, or raise model.kl.coefficient"
                )
        return "\n".join(lines) or None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"first": self._first, "latest": self._latest, "warned": self._warned}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the value of :meth:`state`; None is a checkpoint without it."""
        if state is not None:
            self._first, self._latest, self._warned = state["first"], state["latest"], state["warned"]


def diverged(before: Measured, after: Measured) -> bool:
    """Return True if the score has risen and the accuracy has fallen, beyond chance.

    >>> diverged((24, 100, 7, 100), (72, 100, 0, 100)), diverged((24, 100, 7, 100), (72, 100, 7, 100))
    (True, False)
    """
    rise, fall = _change(before[:2], after[:2]), _change(after[2:], before[2:])
    return rise[0] >= LEAST_CHANGE and all(change > STANDARD_ERRORS * error for change, error in (rise, fall))


def _change(before: Measured, after: Measured) -> tuple[float, float]:
    """Return the difference of two means of values in [0, 1], and its standard error."""
    shares = [(total / count, count) for total, count in (before, after)]
    error = math.sqrt(sum(max(share * (1 - share), 0.0) / count for share, count in shares))
    return shares[1][0] - shares[0][0], error


def _pool(iterations: Sequence[Measured]) -> list[float]:
    return [math.fsum(column) for column in zip(*iterations, strict=True)]
