"""The options of the algorithms: one quantity has one name, and one name means one quantity."""

from __future__ import annotations

import inspect
from collections import defaultdict
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from mrlm_pl import algorithms
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy

QUANTITIES = {
    "clip": "clipping range",
    "clip.dual": "bound of the clipped loss at negative advantages",
    "clip.high": "upper end of the clipping range",
    "clip.low": "lower end of the clipping range",
    "correction.cap": "bound of a truncated correction",
    "correction.high": "upper end of a masked correction's range",
    "correction.kind": "form of the correction",
    "correction.level": "unit of the correction's ratio",
    "correction.low": "lower end of a masked correction's range",
    "normalize_values": "unit of the values: the deviation of the returns",
    "kl": "penalty for the divergence from the reference",
    "kl.coefficient": "weight of the divergence from the reference",
    "kl.estimator": "estimator of the divergence from the reference in the loss",
    "kl.horizon": "episodes in which the KL coefficient changes by at most a fifth",
    "kl.placement": "whether the divergence from the reference is in the reward or in the loss",
    "kl.target": "divergence from the reference towards which its coefficient is steered",
    "optimization": "optimizer and schedule",
    "optimization.betas": "decay rates of AdamW",
    "optimization.schedule": "course of the learning rates",
    "optimization.warmup_steps": "steps over which the learning rates rise",
    "stop_at_kl": "divergence from the old policy that ends the updates on a rollout",
    "advantage": "how the returns of a group become advantages",
    "agent_critics": "a critic for each agent",
    "alternatives": "samples in the place of a message",
    "messages": "messages of an episode that are branched",
    "rest": "the decisions after an alternative",
    "rounds": "rounds in which trees are expanded",
    "nodes": "states of a tree that are expanded in a round",
    "alpha0": "incentive for an own change while the others were wrong",
    "alpha1": "incentive for an own change while the others were right",
    "baseline": "number subtracted from a return",
    "baseline_decay": "weight of the past in a running baseline",
    "beta": "scale of the implicit reward of an answer: the pull to the reference",
    "beta0": "incentive for a change of the others after a wrong answer",
    "beta1": "incentive for a change of the others after a right answer",
    "correction": "weights for the mismatch of sampler and learner",
    "critic": "the centralized critic",
    "critic_reads": "input of a critic of a discussion",
    "critics": "a critic for each policy",
    "cross_reduction": "mean or sum of a decision's joint actions",
    "desirable_weight": "weight of desirable answers",
    "discount_unit": "unit of the discount factor",
    "distillation": "teachers, and the loss of the divergence from them",
    "gain_weight": "weight of information gains",
    "answer_key": "field of a task with the reference answer",
    "answer_form": "form of the reference answer as a reply",
    "entropy": "entropy bonus",
    "entropy.coefficient": "weight of the entropy bonus",
    "entropy.delta": "change of the weight of the entropy bonus",
    "entropy.target": "entropy towards which the weight of its bonus is steered",
    "top_entropy": "fraction of tokens with an advantage, by entropy",
    "off_policy_threshold": "divergence from the sampler above which negative advantages do not count",
    "reference_sync": "how the reference policy moves",
    "reference_sync.decay": "weight of the reference in its average with the policy",
    "reference_sync.every": "steps between two moves of the reference",
    "gamma": "discount factor",
    "horizon": "which later scores reward an answer",
    "joint_mode": "how decisions are combined to joint actions",
    "length_normalized": "means over an answer's tokens instead of sums",
    "sft_weight": "weight of the likelihood of the chosen answer",
    "centering": "weight of a pair's squared sum of scores",
    "label_smoothing": "assumed rate of swapped labels",
    "lam": "GAE's lambda",
    "loss": "form of the loss",
    "loss_settings": "extra arguments of the loss",
    "margin": "how far the chosen answer must win",
    "max_length": "longest response, for the reduction by a constant",
    "normalize": "division by the standard deviation of a comparison",
    "planner": "agent that calls sub-agents",
    "calls_per_group": "trajectories of each sub-agent in a group",
    "absent": "messages of an absent agent",
    "orders": "sampled orders of agents for Shapley values",
    "team_weight": "weight of the team's return",
    "marginal_weight": "weight of an agent's marginal contribution",
    "process": "weights of an agent's own components",
    "objective": "which tokens SFT is trained on",
    "odds_weight": "weight of the odds ratio",
    "overlong_buffer": "width of the slope of the length penalty",
    "policies": "the weights",
    "credit": "whether an episode or a turn has an advantage",
    "turn_baseline": "the comparison of a turn",
    "state_weight": "weight of the comparison within states",
    "state_key": "text that is equal for equal states",
    "weights": "weights of the reward components",
    "recompute_old_logp": "whose log-probabilities the old policy's are",
    "reduction": "how token losses become one number",
    "reference_free": "a preference loss without reference",
    "reward": "whose reward counts: the team's or the agent's own",
    "score_tokens": "tokens at which a verifier is trained",
    "seats": "which policy plays each agent",
    "stop_above": "mean reward above which a turn tree ends",
    "targets": "targets of a centralized critic",
    "task_normalization": "scale of the advantages of each environment",
    "turn_iterations": "rollouts for each entry of the turn schedule",
    "turn_schedule": "which turns are trained together",
    "undesirable_weight": "weight of undesirable answers",
    "value_clip": "how far a value may move",
    "value_coefficient": "weight of the value loss",
    "value_learning_rate": "learning rate of value heads",
    "weighting": "weight of a state's decisions",
    "whiten_advantages": "whether advantages are whitened",
    "whiten_over": "whose advantages are whitened together",
    "zero_variance": "whether tokens without advantage count in the reduction",
}
OWN_CHOICES = {"baseline", "loss", "margin", "reduction"}
"""Options whose values differ between algorithms: the baselines of REINFORCE are others than those of MAREMAX, a loss
is of tokens or of pairs, and a reduction may be that of the loss."""


@pytest.fixture(scope="module")
def options() -> dict[str, dict[str, str]]:
    """The type of each option, by option and algorithm."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in algorithms.__all__:
        parser = ArgumentParser()
        parser.add_class_arguments(getattr(algorithms, name), "model")
        for action in parser._actions:
            prefix, _, option = action.dest.partition(".")
            if prefix == "model" and option and not option.endswith(".help"):
                found[option][name] = str(getattr(action, "_typehint", action.type))
    return found


@pytest.mark.parametrize("name", algorithms.__all__)
def test_a_signature_names_the_policies_and_seats(name: str) -> None:
    cls = getattr(algorithms, name)
    parameters = inspect.signature(cls).parameters
    assert not [item.name for item in parameters.values() if item.kind is item.VAR_POSITIONAL]
    assert list(parameters)[:2] == ["policies", "seats"] or not issubclass(cls, PolicyGradient)
    assert next(iter(parameters)) == "policies"


@pytest.mark.long
def test_one_quantity_has_one_name(options: dict[str, dict[str, str]]) -> None:
    assert set(options) == set(QUANTITIES), "a new option: is there a name for its quantity already?"
    assert len(set(QUANTITIES.values())) == len(QUANTITIES)


def test_an_option_takes_the_same_values_everywhere(options: dict[str, dict[str, str]]) -> None:
    different = {option for option, types in options.items() if len(set(types.values())) > 1}
    assert different == OWN_CHOICES


def test_a_discount_out_of_range_is_refused_by_the_algorithm() -> None:
    classes = [getattr(algorithms, name) for name in algorithms.__all__]
    discounted = [
        (cls, option) for cls in classes for option in {"gamma", "lam"} & {*inspect.signature(cls).parameters}
    ]
    assert len(discounted) > 12
    for cls, option in discounted:
        with pytest.raises(ConfigurationError, match=rf"^{cls.__name__}: {option} is 1\.5; it must be from 0 to 1"):
            cls({"main": Policy()}, **{option: 1.5})


def test_every_option_is_documented(options: dict[str, dict[str, str]]) -> None:
    pages = Path(__file__).parents[2] / "docs" / "algorithms"
    shared = (pages / "options.md").read_text()
    for option, algorithms_of_it in options.items():
        documented = f"`{option}`" in shared or f"`{option}." in shared  # or by its fields
        for name in [] if documented else algorithms_of_it:
            page = pages / f"{getattr(algorithms, name).__module__.rpartition('.')[2]}.md"
            assert f"`{option}: " in page.read_text(), f"{page.name} does not have {option}"
