"""Games against opponents that never change, and an alarm for a learner that plays much worse than before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

from mrlm_callbacks.snapshot_pool import check_fit, weights_of
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.evaluation.elo import game_score
from mrlm_pl.evaluation.intervals import share_interval
from mrlm_pl.evaluation.summary import evaluation_specs
from mrlm_pl.policy import Policy
from mrlm_pl.settings import FractionAboveZero, PositiveInt, Settings, UnitInterval

Sides: TypeAlias = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""Agents of the learner and of the opponent, by environment."""


@dataclass(frozen=True)
class AnchorGames(Settings):
    """Schedule and opponents of a learner's evaluation.

    Args:
        every: iterations between two measurements; one is also made before the first and after the last iteration.
        games: episodes of each environment against each anchor; the same ones every time.
        split: split of their tasks.
        models: anchors in addition to the initial snapshot, by name: folders or hub ids of models of the same shape.
        sampling: sampling settings; None is the data module's ``validation_sampling``.

    Raises:
        ConfigurationError: a number is below 1, or an anchor is called ``initial``.
    """

    every: PositiveInt = 20
    games: PositiveInt = 128
    split: str = "validation"
    models: dict[str, str] = field(default_factory=dict)
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if "initial" in self.models:
            raise ConfigurationError("the anchors of SelfPlay: 'initial' is the initial snapshot; take another name")

    def read(self, opponent: Policy) -> dict[str, dict[str, Tensor]]:
        """Return weights of the further anchors, by name.

        Raises:
            ConfigurationError: a model is none that the opponent's seat can play with.
        """
        weights = {}
        for name, model in self.models.items():
            anchor = Policy(model, trained=False)
            check_language(opponent, anchor, f"the anchor {name!r}")
            anchor.load(name=name)
            weights[name] = weights_of(anchor)
            check_fit(opponent, weights[name], f"the anchor {name!r}")
        return weights

    def play(self, data: RolloutDataModule, sides: Sides) -> dict[str, float]:
        """Return the learner's results against the policy in the opponent's seat; every rank must call it.

        Args:
            data: data module with the environments.
            sides: agents of the learner and of the opponent, by environment.

        Returns:
            The mean :func:`game_score` as ``score`` with its 95 % Wilson interval ``low`` to ``high``; shares ``wins``
            and ``draws``; ``games`` without those that failed.

        Raises:
            RolloutError: every game failed.
        """
        scores: list[float] = []
        for name in sides:
            specs = evaluation_specs(data.environments[name], self.games, self.split, data.seed, name=name)
            episodes = data.play(specs, self.sampling or data.validation_sampling)
            scores += [game_score(episode, *sides[name]) for episode in episodes if not episode.failed]
        if not scores:
            raise RolloutError(f"all games against an anchor failed; try `mrlm check-env {next(iter(sides))}`")
        low, high = share_interval([(value, 1) for value in scores])
        return {
            "score": sum(scores) / len(scores),
            "low": low,
            "high": high,
            "wins": sum(value == 1 for value in scores) / len(scores),
            "draws": sum(value == 0.5 for value in scores) / len(scores),
            "games": float(len(scores)),
        }


@dataclass(frozen=True)
class CollapseAlarm(Settings):
    """The definition of a collapse, and the reaction to it.

    Args:
        margin: alarm when the score against an anchor is more than this below the best earlier one, also that
            before training. A score of n games has a standard error of up to ``0.5 / sqrt(n)``, so choose more than
            three times that.
        floor: alarm also when the score against an anchor is below this; None has no such bound.
        action: ``warn`` logs it; ``stop`` ends the run cleanly, with its export.

    Raises:
        ConfigurationError: a number is out of range.
    """

    margin: FractionAboveZero = 0.2
    floor: UnitInterval | None = None
    action: Literal["warn", "stop"] = "warn"

    def reason(self, score: float, best: float) -> str | None:
        """Return the reason why a score is alarming, or None.

        >>> alarm = CollapseAlarm(margin=0.25, floor=0.5)
        >>> alarm.reason(0.75, best=1.0), alarm.reason(0.5, best=0.5)
        (None, None)
        >>> alarm.reason(0.5, best=1.0)
        '0.500 is more than 0.25 below the best, 1.000'
        >>> alarm.reason(0.4, best=0.5)
        '0.400 is below 0.5'
        """
        if best - score > self.margin:
            return f"{score:.3f} is more than {self.margin:g} below the best, {best:.3f}"
        if self.floor is not None and score < self.floor:
            return f"{score:.3f} is below {self.floor:g}"
        return None


def check_language(policy: Policy, other: Policy, whose: str) -> None:
    """Check that two policies read the same tokens.

    Raises:
        ConfigurationError: their vocabularies or chat templates differ.
    """
    same = policy.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    if not same or policy.tokenizer.chat_template != other.tokenizer.chat_template:
        raise ConfigurationError(
            f"SelfPlay: {whose} ({other.name_or_path!r}) has another vocabulary or chat template than "
            f"{policy.name_or_path!r}; give both the same model and chat_template"
        )
