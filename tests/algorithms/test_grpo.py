from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.algorithms import GRPO, IPPO, MAPPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, NonFiniteError
from mrlm_pl.learner.batch import Batch, PolicyBatch, collate_rows
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.credit.returns import returns_of
from mrlm_pl.losses import Entropy, batch_totals, token_weights
from mrlm_pl.policy import Policy

IDS = (8, 9, 10, 11, 12, 13)


def episode(number: int, group: str, rewards: dict[str, float], error: str | None = None) -> Episode:
    def row(agent: str, reward: float) -> Trajectory:
        turn = Turn(agent, 0, 3, 6, reward, {"r": reward}, "stop", agent, 0, "e")
        ids = (*IDS[:5], 20 + number)
        return Trajectory(agent, agent, ids, (False,) * 3 + (True,) * 3, (0.0,) * 3 + (-1.0,) * 3, (turn,))

    trajectories = {} if error else {agent: (row(agent, reward),) for agent, reward in rewards.items()}
    return Episode(str(number), Task("t", "train", 0), group, 0, 0, trajectories, "end", error=error)


def loaded(model_folder: Path, **options: Any) -> GRPO:
    algorithm = GRPO({"main": Policy(str(model_folder))}, **options)
    algorithm.configure_model()
    algorithm.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return algorithm


def rows(algorithm: GRPO, advantages: list[float], lengths: list[int]) -> PolicyBatch:
    """Rows of three observed and ``length`` sampled tokens, with the learner's own numbers as the sampler's."""
    made = [
        Trajectory("a", "main", tuple(range(8, 11 + n)), (False,) * 3 + (True,) * n, (0.0,) * (3 + n), ())
        for n in lengths
    ]
    labels = list(range(len(made)))
    batch = collate_rows(made, labels, labels, labels, advantages=advantages)
    with torch.no_grad():
        batch.behavior_logp = algorithm.policy("main")(batch.inputs())
    return batch


def test_advantages_compare_an_agent_with_itself_in_the_groups_other_episodes() -> None:
    table = [(0, "g", 1.0, 5.0), (1, "g", 1.0, 5.0), (2, "g", 1.0, 5.0), (3, "g", 0.0, 5.0)]
    episodes = [episode(n, group, {"x": first, "y": second}) for n, group, first, second in table]
    returns = returns_of(episodes)
    batches = returns.rows(group_normalized_advantages(returns.reward, returns.comparison))
    assert set(batches) == {"x", "y"}
    # The reference values of [1, 1, 1, 0]; equal rewards give exactly 0.
    expected = [0.499999, 0.499999, 0.499999, -1.499997]
    assert batches["x"].advantages[:, -1].tolist() == pytest.approx(expected, abs=1e-4)
    assert batches["x"].advantages[:, :3].abs().sum() == 0, "observed tokens have no advantage"
    assert batches["y"].advantages.abs().sum() == 0


def test_a_failed_episode_shrinks_its_group() -> None:
    episodes = [episode(0, "g", {"x": 1.0}), episode(1, "g", {"x": 0.0}), episode(2, "g", {}, error="away")]
    returns = returns_of(episodes)
    batch = returns.rows(group_normalized_advantages(returns.reward, returns.comparison))["x"]
    # two episodes: (1 - 0.5) / sqrt(0.5)
    assert batch.advantages[:, -1].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_a_frozen_partners_returns_are_no_signal() -> None:
    algorithm = GRPO({"x": Policy(), "y": Policy(trained=False)})
    group = [episode(0, "g", {"x": 1.0, "y": 0.0}), episode(1, "g", {"x": 1.0, "y": 5.0})]
    assert algorithm.lacks_signal(group)
    assert not algorithm.lacks_signal([*group, episode(2, "g", {"x": 0.0, "y": 0.0})])


@pytest.mark.parametrize(("algorithm", "settings"), [(IPPO, {"reward": "team"}), (MAPPO, {})])
def test_a_frozen_partners_returns_are_a_teams_signal(algorithm: Any, settings: dict[str, Any]) -> None:
    group = [episode(number, "g", {"x": 1.0, "y": float(number)}) for number in range(2)]
    assert not algorithm({"x": Policy(), "y": Policy(trained=False)}, **settings).lacks_signal(group)


def test_only_action_tokens_have_a_gradient(model_folder: Path) -> None:
    """The numbers at padding and at observed positions change no gradient."""
    algorithm = loaded(model_folder)
    batch = rows(algorithm, [1.0, -1.0], [4, 2])
    totals = {"main": batch_totals(batch.action_mask)}
    loss = algorithm.policy_loss("main", batch, Batch({"main": batch}, totals))
    garbled = rows(algorithm, [1.0, -1.0], [4, 2])
    garbled.token_ids[1, 5:] = 77
    garbled.behavior_logp[:, :3] = float("nan")
    garbled.advantages[:, :3] = float("nan")
    again = algorithm.policy_loss("main", garbled, Batch({"main": garbled}, totals))
    weights = list(algorithm.policy("main").model.parameters())
    for first, second in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(again, weights), strict=True):
        assert torch.equal(first, second)


def test_the_gradient_is_the_policy_gradient_at_ratio_one(model_folder: Path) -> None:
    algorithm = loaded(model_folder)
    batch = rows(algorithm, [1.0, -0.5], [4, 2])
    policy = algorithm.policy("main")
    totals = {"main": batch_totals(batch.action_mask)}
    loss = algorithm.policy_loss("main", batch, Batch({"main": batch}, totals))
    logits = policy.model(batch.token_ids).logits[:, :-1].log_softmax(-1)
    chosen = logits.gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    by_hand = -(chosen[0, 2:6].sum() * 1.0 + chosen[1, 2:4].sum() * -0.5) / 6
    weights = list(policy.model.parameters())
    for ours, theirs in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(by_hand, weights), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_kl_to_the_reference_pulls_back(model_folder: Path) -> None:
    algorithm = loaded(model_folder, kl={"coefficient": 0.5})
    policy = algorithm.policy("main")
    batch = rows(algorithm, [0.0, 0.0], [3, 3])
    batch.ref_logp = policy.reference_logprobs(batch.inputs())
    totals = {"main": batch_totals(batch.action_mask)}
    assert algorithm.policy_loss("main", batch, Batch({"main": batch}, totals)).abs() < 1e-7
    with torch.no_grad():
        batch.ref_logp = torch.where(batch.action_mask, batch.ref_logp - 0.5, 0.0)
    # d = log pi - log ref = 0.5 on every token: e^-0.5 + 0.5 - 1 = 0.106531
    loss = algorithm.policy_loss("main", batch, Batch({"main": batch}, totals))
    assert loss.item() == pytest.approx(0.5 * 0.106531, abs=1e-5)


def test_the_entropy_bonus_is_the_mean_entropy_of_the_action_tokens(model_folder: Path) -> None:
    algorithm = loaded(model_folder, entropy={"coefficient": 0.5})
    batch = rows(algorithm, [0.0, 0.0], [4, 2])
    loss = algorithm.policy_loss("main", batch, Batch({"main": batch}, {"main": batch_totals(batch.action_mask)}))
    logp = algorithm.policy("main").model(batch.token_ids).logits[:, :-1].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    settings = (Entropy(), Entropy(0.1), Entropy(target=1.0))
    assert [loaded(model_folder, entropy=one).entropy.used for one in settings] == [False, True, True]
    assert loss.item() == pytest.approx(-0.5 * float((entropy[0, 2:6].sum() + entropy[1, 2:4].sum()) / 6), rel=1e-4)
    assert algorithm.rows_with_gradient(batch).tolist() == [0, 1]


def test_the_importance_weighted_kl_is_that_of_the_sampler(model_folder: Path) -> None:
    algorithm = loaded(
        model_folder, kl={"coefficient": 0.5, "estimator": "k3_importance_weighted"}, recompute_old_logp=True
    )
    batch = rows(algorithm, [0.0, 0.0], [3, 3])
    batch.proximal_logp = batch.behavior_logp.clone()
    batch.ref_logp = torch.where(batch.action_mask, batch.behavior_logp - 0.5, 0.0)
    batch.behavior_logp = torch.where(batch.action_mask, batch.behavior_logp - 0.25, 0.0)
    loss = algorithm.policy_loss("main", batch, Batch({"main": batch}, {"main": batch_totals(batch.action_mask)}))
    # e^0.25 (e^-0.5 + 0.5 - 1) on every token
    assert loss.item() == pytest.approx(0.5 * math.exp(0.25) * 0.106531, abs=1e-5)


def test_far_trajectories_with_a_negative_advantage_have_no_loss(model_folder: Path) -> None:
    algorithm = loaded(model_folder, off_policy_threshold=0.2, recompute_old_logp=True)
    batch = rows(algorithm, [-1.0, 1.0, -1.0], [4, 4, 2])
    # The sampler gave the tokens of the first two rows more probability: log mu - log pi = 0.3 and 0.3, then 0.1.
    batch.proximal_logp = batch.behavior_logp.clone()
    batch.behavior_logp = batch.behavior_logp + batch.action_mask * torch.tensor([[0.3], [0.3], [0.1]])
    loss = algorithm.policy_loss("main", batch, Batch({"main": batch}, {"main": batch_totals(batch.action_mask)}))
    # Ten tokens: four without loss, four of loss -1, two of loss 1.
    assert loss.item() == pytest.approx(-2 / 10, abs=1e-5)
    assert algorithm.metrics.take_update()["train/off_policy_masked"] == pytest.approx(4 / 10)


def test_tokens_with_low_entropy_have_no_advantage(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [episode(n, "g", {"main": float(n == 3)}) for n in range(4)]
    whole, top = loaded(model_folder), loaded(model_folder, top_entropy=0.25)
    for algorithm in (whole, top):
        algorithm.trainer = quiet_trainer()
    with torch.no_grad():
        every, batch = (algorithm.prepare(episodes, Sampling())["main"] for algorithm in (whole, top))
        logp = top.policy("main").model(batch.token_ids).logits[:, :-1].log_softmax(-1)
    entropy = torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), (1, 0))
    # Twelve tokens; the position, which all episodes share, decides about the entropy: four are in the top quarter.
    kept = batch.advantages != 0
    assert kept.sum() == 4
    assert entropy[kept].min() > entropy[batch.action_mask & ~kept].max()
    assert torch.equal(batch.advantages[kept], every.advantages[kept])
    assert batch_totals(batch.action_mask).tokens == 12
    threshold = top.metrics.take_rollout()["train/entropy_threshold"]
    assert entropy[batch.action_mask & ~kept].max() < threshold <= entropy[kept].min() + 1e-6


def test_a_penalty_in_the_reward_needs_rewards_of_tokens(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"kl\.placement is 'reward', but GRPO"):
        GRPO({"main": Policy(str(model_folder))}, kl={"coefficient": 0.1, "placement": "reward"})


def test_zero_variance_rows_need_no_forward_pass_and_may_leave_the_denominator(
    model_folder: Path, quiet_trainer: Any
) -> None:
    episodes = [episode(n, "even" if n < 2 else "odd", {"main": float(n == 3)}) for n in range(4)]
    for zero_variance, counted in (("keep", 12.0), ("exclude", 6.0)):
        algorithm = loaded(model_folder, zero_variance=zero_variance, recompute_old_logp=False)
        algorithm.trainer = quiet_trainer()
        batch = algorithm.prepare(episodes, Sampling())["main"]
        assert algorithm.rows_with_gradient(batch).tolist() == [2, 3]
        assert batch_totals(batch.action_mask).tokens == counted


def test_excluded_agents_do_not_count_in_an_episode_either(model_folder: Path, quiet_trainer: Any) -> None:
    """Agent y shares the policy of x, earns the same everywhere, and does not act in the last episode."""
    algorithm = loaded(model_folder, zero_variance="exclude", reduction="episode_mean")
    algorithm.trainer = quiet_trainer()
    episodes = [episode(0, "g", {"x": 1.0, "y": 5.0}), episode(1, "g", {"x": 1.0, "y": 5.0}), episode(2, "g", {"x": 0})]
    shared = [one.with_rows(lambda row: replace(row, policy="main")) for one in episodes]
    rows = algorithm.prepare(shared, Sampling())["main"]
    totals = batch_totals(rows.action_mask, rows.episode_tokens)
    assert (totals.tokens, totals.episodes) == (9, 3)
    weights = token_weights("episode_mean", rows.action_mask, totals, episode_tokens=rows.episode_tokens)
    assert weights.sum(1).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": {"low": 1.5}}, r"low is 1\.5"),
        ({"clip": {"dual": 0.5}}, r"dual is 0\.5"),
        ({"advantage": "best"}, "GRPO: advantage is 'best'; choose from group_normalized, "),
        ({"top_entropy": 0}, "top_entropy is 0"),
        ({"top_entropy": 1.5}, r"top_entropy is 1\.5"),
        ({"off_policy_threshold": 0.0}, r"off_policy_threshold is 0\.0"),
        ({"entropy": {"delta": 0.1}}, r"entropy\.delta is 0\.1"),
        ({"kl": {"estimator": "k4"}}, "KL: estimator is 'k4'; choose from k3, k3_straight_through"),
        ({"reduction": "constant_length"}, "max_length is None"),
        ({"seats": {"a": "other"}}, "names policy 'other'"),
    ],
)
def test_bad_settings_are_refused(model_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GRPO({"main": Policy(str(model_folder))}, **options)


def test_dropout_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\['main'\] have dropout"):
        GRPO({"main": Policy(str(model_folder), dropout=0.1)})


def test_nothing_to_train_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"give policies by name, as in \{'main': policy\}"):
        GRPO(Policy("builtin:tiny"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="none of the policies"):
        GRPO({"main": Policy(str(model_folder), trained=False)})
    with pytest.raises(ConfigurationError, match=r"none of the policies \[\]"):
        GRPO({})


def test_one_policy_under_two_names_is_refused(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    with pytest.raises(ConfigurationError, match="'solver' and 'judge' are one object"):
        GRPO({"solver": policy, "judge": policy}, {"agent": "solver"})


def test_a_loss_that_is_not_finite_stops_the_run(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    from mrlm_pl.data import RolloutDataModule

    class Broken(GRPO):
        def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> torch.Tensor:
            return super().policy_loss(name, rows, batch) * float("nan")

    algorithm = Broken({"main": Policy(str(model_folder))})
    data = RolloutDataModule(echo(), groups=2, group_size=2, sampling=Sampling(max_tokens=4))
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 0; lower the learning rate"):
        quiet_trainer().fit(algorithm, data)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (lambda rewards, groups: rewards[:-1], r"shape \[7\]"),
        (lambda rewards, groups: rewards[:, None] - rewards, r"shape \[8, 8\]"),
        (lambda rewards, groups: rewards * float("nan"), "a number that is NaN or infinite"),
        (lambda rewards, groups: 1.0, "a float"),
    ],
)
def test_a_rule_of_ones_own_returns_one_finite_number_for_each_return(
    rule: Any, fault: str, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    data = RolloutDataModule(echo(), groups=2, group_size=4, iterations=1, sampling=Sampling(max_tokens=3))
    message = rf"<lambda> returned {fault}; it must return .* of the 8 returns.* \(.*test_grpo\.py:\d+\)"
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer().fit(GRPO({"main": Policy(str(model_folder))}, advantage=rule), data)


def one_argument(rewards: torch.Tensor) -> torch.Tensor:
    return rewards


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (one_argument, r"one_argument\(rewards: .* is called with \(rewards, groups\): too many positional arguments"),
        (lambda rewards, groups, scale: rewards, r"<lambda>\(rewards, groups, scale\) .*: missing .*'scale'"),
    ],
)
def test_a_rule_of_ones_own_takes_rewards_and_groups(rule: Any, fault: str, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"{fault}; let it take these arguments \(.*test_grpo\.py:\d+\)"):
        GRPO({"main": Policy(str(model_folder))}, advantage=rule)
    GRPO({"main": Policy(str(model_folder))}, advantage=lambda rewards, groups, scale=2.0: rewards * scale)


def test_an_object_that_returns_a_number_for_no_return_is_named_by_its_class(model_folder: Path) -> None:
    class Halving:
        def __call__(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
            return rewards[::2]

    algorithm = GRPO({"main": Policy(str(model_folder))}, advantage=Halving())
    returns = SimpleNamespace(returns=torch.tensor([1.0, 3.0]), comparison=torch.tensor([0, 0]))
    with pytest.raises(ConfigurationError, match=r"Halving returned shape \[1\]; .* a tensor of shape \[2\]$"):
        algorithm.advantages(returns)


def test_a_subclass_of_ones_own_takes_returns_and_is_refused_before_the_first_rollout(model_folder: Path) -> None:
    class Two(GRPO):
        def advantages(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return rewards

    with pytest.raises(
        ConfigurationError, match=r"missing .*'groups'; let it take these arguments \(.*test_grpo\.py:\d+\)"
    ):
        Two({"main": Policy(str(model_folder))}).check_rollouts(RolloutFacts({"agent": None}, ["echo"]))


def test_advantages_that_are_set_on_an_object_are_those_that_train(model_folder: Path) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder))}, advantage=lambda rewards, groups: rewards)
    algorithm.advantages = lambda returns: 2 * returns.reward  # type: ignore[method-assign]
    returns = SimpleNamespace(reward=torch.tensor([1.0, 3.0]), comparison=torch.tensor([0, 0]))
    assert algorithm._with_advantages(returns)[1].tolist() == [2.0, 6.0]
