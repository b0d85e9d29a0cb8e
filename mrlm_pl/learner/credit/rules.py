"""Advantage rules: the returns that they read, baselines of the known ones, and checks of those that users write."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, MutableSet
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mrlm_pl.advantages import (
    group_centered_advantages,
    group_max_advantages,
    group_means,
    group_normalized_advantages,
    leave_one_out_advantages,
)
from mrlm_pl.errors import ConfigurationError, name_and_place
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.ranks import sum_over_ranks

logger = logging.getLogger(__name__)


BASELINES: dict[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    group_normalized_advantages: group_means,
    group_centered_advantages: group_means,
    leave_one_out_advantages: partial(group_means, others=True),
    group_max_advantages: lambda rewards, groups: rewards - group_max_advantages(rewards, groups),
}
"""Functions that return the baselines [N] of returns [N] and group indices [N], by the advantage rule."""


class ComparedReturns(Protocol):
    """N returns as an advantage rule reads them.

    Implemented by :class:`~mrlm_pl.learner.credit.returns.Returns` of agents in episodes,
    :class:`~mrlm_pl.learner.credit.turns.TurnReturns` of turns, and
    :class:`~mrlm_pl.learner.credit.decisions.DecisionReturns` of decisions.

    The search for groups without a learning signal reads ``policies`` as well, the policy of each return.
    """

    @property
    def returns(self) -> Any:
        """Returns [N] fp64, a tensor."""

    @property
    def comparison(self) -> Tensor:
        """Numbers [N] int64, equal for returns that are compared with each other."""

    @property
    def baseline(self) -> Tensor | None:
        """Baselines [N] fp64 of the returns; None before the rule has set them, or if it has none."""

    def rows(self, advantages: Tensor) -> dict[str, PolicyBatch]:
        """Return the rows of every policy with these advantages [N]."""


R = TypeVar("R", bound=ComparedReturns)
"""The class of returns that a unit of credit compares."""


def check_takes(rule: Callable[..., Any], *arguments: str) -> None:
    """Validate that the user's rule can be called with these positional arguments.

    Raises:
        ConfigurationError: the rule takes another number of arguments.
    """
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):  # a function of a C extension without a signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name, place = name_and_place(rule)
        remedy = "let it take these arguments"
        parameters = [*inspect.signature(rule.__func__).parameters] if inspect.ismethod(rule) else []
        if len(parameters) == len(arguments) and parameters[0] != "self":
            remedy = f"as a method it receives `self` first: add that, or write `staticmethod({name})` in the class"
        raise ConfigurationError(
            f"{name}{signature} is called with ({', '.join(arguments)}): {error}; {remedy}{place}"
        ) from error


def same_numbers(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether numbers are equal, NaN to NaN."""
    if one is None or other is None:
        return one is other
    return torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)


def warn_of_absent_components(
    trainer: Any, option: str, weights: Collection[str], present: Collection[str], warned: MutableSet[Any]
) -> None:
    """Warn once of an option whose weights name components that no rank's rollout has; every rank calls this.

    Args:
        trainer: trainer of the run.
        option: name of the option.
        weights: names that the option gives weights.
        present: names of this rank's components.
        warned: names of earlier warnings; this adds to them.
    """
    if option in warned:
        return
    present_on_ranks = sum_over_ranks(trainer, dict.fromkeys(present, 1))
    absent = sorted(set(weights) - set(present_on_ranks))
    if absent:
        warned.add(option)
        logger.warning(
            "model.%s weighs %s, but the reward components of this rollout are %s; correct the name, unless such "
            "rewards are rare (warned of once)",
            option,
            ", ".join(absent),
            ", ".join(sorted(present_on_ranks)),
        )
