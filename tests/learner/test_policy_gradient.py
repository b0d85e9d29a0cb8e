"""A subclass of the policy gradient that lacks a part, or leaves an option without effect, is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.algorithms import GDPO, GRPO, IGPO, MAPPO, MGRPO, PPO, GiGPO, REINFORCEPlusPlus, TreeGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Origin
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.credit.branches import AlternativeCredit
from mrlm_pl.learner.credit.decisions import TreeCredit
from mrlm_pl.learner.credit.marginal import Coalitions
from mrlm_pl.learner.credit.returns import EpisodeCredit, Returns
from mrlm_pl.learner.credit.tokens import TokenCredit
from mrlm_pl.learner.credit.turns import TurnCredit, turn_returns_of
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import Clip
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.branches import Alternatives
from tests.support.runs.turn_episodes import beside_partner
from tests.support.runs.turn_episodes import episode as turn_episode


class Bare(PolicyGradient):
    pass


class BareWithOption(PolicyGradient):
    def __init__(self, *args: Any, blame: float = 1.0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.blame = blame


class Attribute(PolicyGradient):
    default_loss = "gspo"
    advantage = staticmethod(group_centered_advantages)


class Method(PolicyGradient):
    def advantages(self, returns: Any) -> Tensor:
        return returns.reward


class Baseline(PolicyGradient):
    def with_baselines(self, returns: Any) -> Any:
        return replace(returns, baseline=returns.reward / 2)


class BaselineOfReturns(PolicyGradient):
    def returns(self, episodes: Any, bonus: Any, greedy: Any) -> Any:
        found = super().returns(episodes, bonus, greedy)
        return replace(found, baseline=found.reward / 2)


class StackedReturns(PolicyGradient):
    def returns(self, episodes: Any, bonus: Any, greedy: Any) -> Any:
        found = super().returns(episodes, bonus, greedy)
        return replace(found, reward=torch.stack([2 * reward for reward in found.reward]))


class FirstTurns(EpisodeCredit):
    """The reward of an agent's first turn alone."""

    def returns(self, episodes: Any, bonus: Any, greedy: Any) -> Any:
        first = [e.trajectories[agent][0].turns[0].reward for e in episodes for agent in e.trajectories]
        return replace(super().returns(episodes, bonus, greedy), reward=torch.tensor(first, dtype=torch.float64))


class Opposite(EpisodeCredit):
    """A rule of its own."""

    def advantages(self, returns: Any) -> Any:
        return -returns.reward


class OwnUnit(PolicyGradient):
    advantage = staticmethod(group_centered_advantages)

    def __init__(self, *arguments: Any, unit: EpisodeCredit = FirstTurns(), **settings: Any) -> None:  # noqa: B008
        super().__init__(*arguments, **settings)
        self.unit = unit


class NoBaseline(PolicyGradient):
    def with_baselines(self, returns: Any) -> Any:
        return returns


class NoReturns(PolicyGradient):
    def with_baselines(self, returns: Any) -> Any:
        return returns.reward / 2


class Bound(PolicyGradient):
    advantage = group_centered_advantages


class OtherArguments(PolicyGradient):
    def advantages(self, rewards: Tensor, groups: Tensor) -> Tensor:  # type: ignore[override]
        raise NotImplementedError


class OwnCredit(OtherArguments):
    def credit(self, episodes: Any, sampling: Any, greedy: Any) -> Any:
        raise NotImplementedError


ROLLOUTS = RolloutFacts({"agent": None}, ["echo"])


def test_advantages_of_other_arguments_are_refused_unless_the_class_calls_them_itself(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"OtherArguments.advantages\(rewards: .* is called with \(returns\)"):
        OtherArguments({"main": str(model_folder)})
    OwnCredit({"main": str(model_folder)})


def test_a_function_that_became_a_method_is_told_to_be_static(model_folder: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"as a method it receives `self` first: .*`staticmethod\(group_center"
    ):
        Bound({"main": str(model_folder)})


class WithoutReturns(PolicyGradient):
    def advantages(self) -> Any:  # type: ignore[override]
        raise NotImplementedError


def test_a_method_with_self_is_told_to_take_the_returns(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is called with \(returns\): .*; let it take these arguments"):
        WithoutReturns({"main": str(model_folder)})


class TwoArguments(Attribute):
    def returns(self, episodes: Any, bonus: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


def test_own_returns_of_other_arguments_are_refused_before_the_first_rollout(model_folder: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"TwoArguments\.returns\(episodes.* is called with \(episodes, bonus, greedy\): .*"
    ):
        TwoArguments({"main": str(model_folder)})


class Counting(GRPO):
    """Fails after it has prepared a rollout, whose number it counts."""

    count = 0

    def prepare(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        super().prepare(*arguments, **options)
        raise RemoteError("the verifier is away")

    def progress(self) -> dict[str, Any]:
        return {**super().progress(), "count": self.count}

    def load_progress(self, progress: Any) -> None:
        super().load_progress(progress)
        self.count = progress.get("count", 0)


def test_a_rollout_that_fails_while_it_is_prepared_leaves_no_progress(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm = Counting({"main": Policy(str(model_folder))})
    data = RolloutDataModule(echo(), groups=1, group_size=2, iterations=1, sampling=Sampling(max_tokens=2))
    with pytest.raises(RemoteError, match="the verifier is away"):
        quiet_trainer().fit(algorithm, data)
    assert algorithm.count == 0, "a resumed run prepares it again"


@pytest.mark.parametrize("cls", [Bare, PolicyGradient])
def test_a_class_without_advantages_is_refused_when_it_is_made(cls: Any, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{cls.__name__} has no rule of advantages; override `advantages"):
        cls({"main": str(model_folder)})


def test_a_class_whose_constructor_does_not_set_them_either_is_refused_before_the_first_rollout(
    model_folder: Path,
) -> None:
    algorithm = BareWithOption({"main": str(model_folder)})
    with pytest.raises(ConfigurationError, match="BareWithOption has no rule of advantages"):
        algorithm.check_rollouts(ROLLOUTS)


@pytest.mark.parametrize(("cls", "expected"), [(Attribute, [-1.0, 1.0]), (Method, [1.0, 3.0]), (Baseline, [0.5, 1.5])])
def test_each_way_to_have_advantages_gives_them(cls: Any, expected: list[float], model_folder: Path) -> None:
    algorithm = cls({"main": str(model_folder)})
    algorithm.check_rollouts(ROLLOUTS)
    assert algorithm._with_advantages(two_returns())[1].tolist() == expected


def two_returns() -> Returns:
    reward, number = torch.tensor([1.0, 3.0]).double(), torch.tensor([0, 0])
    names = {"environment": ("echo",) * 2, "agent": ("agent",) * 2, "episode": ()}
    group = {"comparison": number, "group": number, "turns": number + 1}
    return Returns(reward=reward, bonus=0 * reward, greedy=reward * torch.nan, **names, **group)


def test_baselines_in_place_of_the_returns_with_them_are_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"NoReturns\.with_baselines returned a Tensor; .*replace"):
        NoReturns({"main": str(model_folder)})._with_advantages(two_returns())


def test_returns_with_baselines_are_a_rule_and_those_without_are_refused(model_folder: Path) -> None:
    algorithm = BaselineOfReturns({"main": str(model_folder)})
    returns = replace(two_returns(), baseline=torch.tensor([1.0, 1.0]))
    assert algorithm._with_advantages(returns)[1].tolist() == [0.0, 2.0]
    with pytest.raises(ConfigurationError, match="NoBaseline has no rule of advantages; override `advantages"):
        NoBaseline({"main": str(model_folder)})._with_advantages(two_returns())


class TurnsToGo(PolicyGradient):
    """Turns by their returns-to-go, without a unit of credit."""

    def returns(self, episodes: Any, bonus: Any, greedy: Any) -> Any:
        return turn_returns_of(episodes, bonus)


class TurnsLessOne(TurnsToGo):
    def with_baselines(self, returns: Any) -> Any:
        return replace(returns, baseline=torch.ones_like(returns.returns))


class CenteredTurns(TurnsToGo):
    advantage = staticmethod(group_centered_advantages)


@pytest.mark.parametrize(
    ("cls", "baseline", "expected"), [(TurnsLessOne, [1.0] * 3, [4.0, 3.0, 0.0]), (CenteredTurns, [10 / 3] * 3, None)]
)
def test_turns_are_compared_by_their_returns_to_go(cls: Any, baseline: list[float], expected: Any) -> None:
    """Rewards 1 and 4 in one episode, 1 in the other: returns 5, 4 and 1, whose mean is 10 / 3."""
    learner = cls({"main": Policy()})
    learner._check_credit()
    group = [turn_episode(0, "g", {"a": [("s", 1.0), ("s", 4.0)]}), turn_episode(1, "g", {"a": [("s", 1.0)]})]
    compared, advantages = learner._with_advantages(learner.returns(group, None, ()))
    assert compared.baseline.tolist() == pytest.approx(baseline)
    expected = expected or [5 - 10 / 3, 4 - 10 / 3, 1 - 10 / 3]
    assert advantages.tolist() == pytest.approx(expected)


def test_equal_rewards_of_unequal_numbers_of_turns_are_a_signal() -> None:
    learner = CenteredTurns({"main": Policy()})
    group = [turn_episode(n, "g", {"a": [("s", 1.0)] * (n + 1)}) for n in range(2)]
    assert not learner.lacks_signal(group), "the returns are 1, 2 and 1"


class OwnTurns(PolicyGradient):
    """Sets the field ``own`` of the turns."""

    def __init__(self, *arguments: Any, own: str, then: bool) -> None:
        super().__init__(*arguments)
        self.unit, self.own, self.then = TurnCredit(gamma=0.5), own, then

    def with_baselines(self, returns: Any) -> Any:
        changed = replace(returns, **{self.own: returns.reward + 1})
        return super().with_baselines(changed) if self.then else changed


@pytest.mark.parametrize("own", ["reward", "baseline"])
def test_baselines_that_the_rule_of_the_unit_ignores_are_refused(own: str) -> None:
    group = [turn_episode(n, "g", {"a": [("s", 1.0), ("s", 3.0 * n)]}) for n in range(2)]
    learner = OwnTurns({"main": Policy()}, own=own, then=False)
    with pytest.raises(ConfigurationError, match=r"OwnTurns\.with_baselines sets returns or baselines that TurnCredit"):
        learner._with_advantages(learner.returns(group, None, ()))
    learner.then = True
    compared, advantages = learner._with_advantages(learner.returns(group, None, ()))
    returns = {"reward": [2 + 0.5 * 1, 1.0, 2 + 0.5 * 4, 4.0], "baseline": [1.0, 0.0, 1 + 0.5 * 3, 3.0]}
    assert compared.returns.tolist() == returns[own]
    assert advantages.tolist()[0] < 0 < advantages.tolist()[2]


class KnownBaselines(EpisodeCredit):
    """Credits agents with a baseline."""

    def advantages(self, returns: Any) -> Tensor:
        return (returns.returns - returns.baseline).nan_to_num()


class FirstAlone(PolicyGradient):
    def with_baselines(self, returns: Any) -> Any:
        return replace(returns, baseline=torch.tensor([1.0, torch.nan], dtype=torch.float64))


def test_baselines_that_are_unknown_may_be_nan(model_folder: Path) -> None:
    learner = FirstAlone({"main": str(model_folder)})
    learner.unit = KnownBaselines()
    returns = two_returns()
    compared, advantages = learner._with_advantages(returns)
    assert advantages.tolist() == [returns.reward[0].item() - 1.0, 0.0]
    assert compared.baseline.isnan().tolist() == [False, True]


def test_a_rule_that_the_unit_of_credit_never_calls_is_refused() -> None:
    class Centered(PPO):
        def advantages(self, returns: Any) -> Tensor:
            return returns.reward - returns.reward.mean()

    with pytest.raises(ConfigurationError, match=r"Centered has advantages, which TokenCredit never calls; set `self"):
        Centered()._check_credit()


def test_an_unknown_reduction_is_refused_before_a_rollout(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"reduction is 'mean'; did you mean 'token_mean'\? Choose from "):
        PPO({"main": str(model_folder)}, reduction="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [PPO, MAPPO, REINFORCEPlusPlus])
def test_equal_returns_are_not_excluded_where_no_episodes_are_compared(cls: Any, model_folder: Path) -> None:
    algorithm = cls({"main": str(model_folder)}, zero_variance="exclude")
    with pytest.raises(ConfigurationError, match=f"zero_variance is exclude, but {cls.__name__} does not compare"):
        algorithm.check_rollouts(ROLLOUTS)


class OwnLoss(Attribute):
    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -rows.advantages * logp, {}


class WrappedLoss(OwnLoss):
    uses_loss = True

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return PolicyGradient.token_losses(self, logp, old_logp, rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "ppo"}, "loss"),
        ({"clip": {"high": 0.28}}, "clip"),
        ({"loss": "sapo", "loss_settings": {"positive_temperature": 2.0}}, "loss, loss_settings"),
    ],
)
def test_options_of_the_loss_beside_own_token_losses_are_refused(
    options: dict[str, Any], named: str, model_folder: Path
) -> None:
    policies = {"main": str(model_folder)}
    with pytest.raises(ConfigurationError, match=rf"^OwnLoss does not use {named}: .*leave the option out"):
        OwnLoss(policies, **options)
    OwnLoss(policies, loss=None, loss_settings={}, clip=Clip())  # the defaults, as a saved configuration gives them
    assert WrappedLoss(policies, **options).loss != WrappedLoss(policies).loss
    Attribute(policies, **options)


def no_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros_like(rewards)


def likelihood(logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    return -logp


class Cloning(PolicyGradient):
    advantage = staticmethod(no_advantages)

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -logp, {}


@pytest.mark.parametrize("algorithm", [Cloning, partial(GRPO, advantage=no_advantages, loss=likelihood)])
def test_an_own_loss_trains_where_advantages_are_0(
    algorithm: Callable[..., Any], model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    """The loss of the update is the entropy that the sampler measured: the mean of -log pi over the same tokens."""
    data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=3))
    trainer = quiet_trainer()
    trainer.fit(algorithm({"main": str(model_folder)}), data)
    logged = trainer.callback_metrics
    assert logged["train/loss"].item() == pytest.approx(logged["rollout/entropy"].item(), rel=1e-4)
    assert logged["train/grad_norm"] > 0


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO,
        partial(GRPO, credit="turn"),
        GiGPO,
        GDPO,
        IGPO,
        MGRPO,
        TreeGRPO,
        BaselineOfReturns,
    ],
)
def test_returns_of_a_frozen_partner_are_no_signal(algorithm: Callable[..., Any]) -> None:
    learner = algorithm({"main": Policy(), "partner": Policy(trained=False)})
    group = [turn_episode(n, "g", {"a": [("s", 1.0)], "b": [("s", float(n))]}) for n in range(2)]
    assert not learner.lacks_signal(group)
    assert learner.lacks_signal(beside_partner(group, "b"))
    assert not learner.lacks_signal(beside_partner(group, "a"))


def test_an_own_unit_of_credit_has_returns_a_signal_and_rows() -> None:
    learner = OwnUnit({"main": Policy()})
    learner._check_credit()
    learner.trainer = Trainer(logger=False, accelerator="cpu")
    group = [turn_episode(n, "g", {"a": [("s", float(n)), ("s", 3.0 - n)]}) for n in range(2)]
    assert not learner.lacks_signal(group), "the sums are equal, the first turns are not"
    rows = learner.credit(group, Sampling(), ())["main"]
    assert [set(row[mask].tolist()) for row, mask in zip(rows.advantages, rows.action_mask, strict=True)] == [
        {-0.5},
        {0.5},
    ]
    assert [[*turns] for turns in rows.turn_baselines] == [[(0.0, 0.5)] * 2, [(1.0, 0.5)] * 2]


def test_the_rule_of_a_unit_replaces_the_algorithms() -> None:
    learner = OwnUnit({"main": Policy()}, unit=Opposite())
    group = [turn_episode(n, "g", {"a": [("s", 2.0)]}) for n in range(2)]
    assert learner.advantages(learner.with_baselines(learner.returns(group, None, ()))).tolist() == [-2.0, -2.0]
    assert not learner.lacks_signal(group), "equal returns have an advantage all the same"


def test_tokens_are_a_unit_of_credit_without_a_critic_too() -> None:
    """The second turn earns 4, half of which the first has at gamma 0.5; equal episodes carry a signal."""
    learner = OwnUnit({"main": Policy()}, unit=TokenCredit(gamma=0.5, whiten=None))
    learner._check_credit()
    group = [turn_episode(n, "g", {"a": [("s", 1.0), ("s", 4.0)]}) for n in range(2)]
    rows = learner.credit(group, Sampling(), ())["main"]
    assert [row[mask].unique().tolist() for row, mask in zip(rows.advantages, rows.action_mask, strict=True)] == [
        [3.0, 4.0]
    ] * 2
    learner.zero_variance = "exclude"
    with pytest.raises(ConfigurationError, match="zero_variance is exclude, but OwnUnit does not compare"):
        learner._check_credit()


def test_branch_episodes_are_those_of_the_unit() -> None:
    unit = Coalitions("marginal")
    assert OwnUnit({"main": Policy()}, unit=unit).unit.branch_rule is unit


def test_decisions_without_a_rule_are_refused_before_the_first_rollout() -> None:
    learner = OwnUnit({"main": Policy()}, unit=TreeCredit())
    learner._check_credit()
    learner.advantage = None
    with pytest.raises(ConfigurationError, match="OwnUnit"):
        learner._check_credit()
    learner.unit = TreeCredit(counterfactual=True)
    learner._check_credit()


def test_the_unit_that_algorithms_share_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        Attribute({"main": Policy()}).unit.branching = TreeCredit().branching  # type: ignore[misc]


def test_messages_with_a_team_reward_of_constant_sum_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    learner = OwnUnit({"main": Policy()}, unit=AlternativeCredit(Alternatives(1, None, "play", ("main",)), "team"))
    group = [turn_episode(n, "g", {"a": [("s", float(n))], "b": [("s", -float(n))]}) for n in range(2)]
    group.append(replace(group[1], id="branch", origin=Origin(group[0].id, ("a",), 0)))
    learner.trainer = Trainer(logger=False, accelerator="cpu")
    learner.credit(group, Sampling(), ())
    assert "zero-sum" in caplog.text


def test_own_returns_are_asked_for_episodes_alone() -> None:
    learner = StackedReturns({"main": Policy()})
    assert learner.lacks_signal(()), "a run asks this before its first rollout"
    group = [turn_episode(n, "g", {"a": [("s", float(n))]}) for n in range(2)]
    assert not learner.lacks_signal(group)
