"""The critic-free policy gradients: each one's credit and loss on the reference's numbers, and how they differ."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrlm_pl import algorithms
from mrlm_pl.algorithms import (
    C3,
    CISPO,
    COMA,
    GDPO,
    GRPO,
    GSPO,
    MAGRPO,
    MAREINFORCE,
    MAREMAX,
    MARLOO,
    RAE,
    REINFORCE,
    RLOO,
    OnPolicyDistillation,
    REINFORCEPlusPlus,
    REINFORCEPlusPlusBaseline,
    ReMax,
)
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Task, Trajectory, Turn
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch, collate_rows
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import Correction, batch_totals
from mrlm_pl.policy import Policy
from tests.support.runs.logs import logged_here

RATIO_FREE = [RAE, REINFORCE, RLOO, ReMax, MAGRPO, MARLOO, MAREINFORCE, MAREMAX, COMA]
FAMILY = [CISPO, GRPO, GSPO, RAE, REINFORCE, RLOO, REINFORCEPlusPlus, REINFORCEPlusPlusBaseline, ReMax]


def episode(number: int, reward: float, group: str = "g", tokens: int = 2, error: str | None = None) -> Episode:
    turn = Turn("a", 0, 2, 2 + tokens, reward, {"r": reward}, "stop", "main", 0, "e")
    length = 2 + tokens
    row = Trajectory(
        "a",
        "main",
        (8, 9, *range(10, 8 + length)),
        (False,) * 2 + (True,) * tokens,
        (0.0,) * 2 + (-1.0,) * tokens,
        (turn,),
    )
    rows = {} if error else {"a": (row,)}
    return Episode(str(number), Task("t", "train", 0), group, 0, 0, rows, "end", error=error)


def prepared(
    cls: type[PolicyGradient],
    model_folder: Path,
    trainer: Any,
    episodes: list[Episode],
    greedy: list[Episode] | None = None,
    **options: Any,
) -> tuple[Any, Tensor]:
    """The algorithm and the advantage of each row's first action token."""
    algorithm = cls({"main": Policy(str(model_folder))}, **options)
    algorithm.configure_model()
    algorithm.trainer = trainer
    with torch.no_grad():
        rows = algorithm.prepare(episodes, Sampling(max_tokens=8), greedy or [])["main"]
    return algorithm, rows.advantages[:, 2]


REWARDS = [1.0, 2.0, 4.0, 9.0]


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (REINFORCE, [-3, -2, 0, 5]),
        (RLOO, [-4, -2.6667, 0, 6.6667]),
        (GRPO, [-0.8429, -0.5620, 0, 1.4049]),
        (GSPO, [-0.8429, -0.5620, 0, 1.4049]),
        (CISPO, [-0.8429, -0.5620, 0, 1.4049]),
    ],
)
def test_advantages_equal_the_reference_numbers(
    cls: Any, expected: list[float], model_folder: Path, quiet_trainer: Any
) -> None:
    episodes = [episode(n, reward) for n, reward in enumerate(REWARDS)]
    _, advantages = prepared(cls, model_folder, quiet_trainer(), episodes)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)


def test_remax_compares_with_the_greedy_episode_and_leaves_out_groups_without_one(
    model_folder: Path, quiet_trainer: Any
) -> None:
    episodes = [episode(n, reward, group) for n, (reward, group) in enumerate([(1, "g"), (0, "g"), (1, "h"), (1, "k")])]
    greedy = [episode(10, 0.25, "g"), episode(11, 0.0, "h", error="away"), episode(12, 4.0, "k")]
    algorithm, advantages = prepared(ReMax, model_folder, quiet_trainer(), episodes, greedy)
    assert advantages.tolist() == [0.75, -0.25, -3.0]
    assert algorithm.metrics.take_rollout() == {"train/greedy_reward": 2.125, "train/missing_baselines": 1.0}


def test_the_baseline_of_an_agent_that_did_not_act_greedily_is_0(model_folder: Path, quiet_trainer: Any) -> None:
    def played(number: int, **rewards: float) -> Episode:
        rows = {agent: episode(number, reward).trajectories["a"] for agent, reward in rewards.items()}
        return dataclasses.replace(episode(number, 0.0), trajectories=rows)

    _, advantages = prepared(
        ReMax, model_folder, quiet_trainer(), [played(0, a=1.0, b=3.0), played(1, a=0.0)], [played(2, a=0.25)]
    )
    assert advantages.tolist() == [0.75, 3.0, -0.25]


def test_the_divergence_is_steered_by_the_episodes_that_are_trained_on(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [episode(n, 1.0, f"g{n}") for n in range(4)]
    greedy = [episode(10 + n, 0.0, f"g{n}", error="away" if n == 0 else None) for n in range(4)]
    kl = {"coefficient": 0.1, "target": 1e-6, "horizon": 30}
    algorithm, _ = prepared(ReMax, model_folder, quiet_trainer(), episodes, greedy, kl=kl)
    # The divergence is far from the target: a fifth up or down, of 3 episodes in 30.
    assert abs(algorithm.kl.coefficients["main"] / 0.1 - 1) == pytest.approx(0.2 * 3 / 30)


def test_reinforce_plus_plus_whitens_what_the_others_leave(model_folder: Path, quiet_trainer: Any) -> None:
    # Two groups with returns 1, 0 and 8, 6; two tokens each: means 0.5 and 7, so +-0.5 and +-1.
    episodes = [episode(n, reward, group) for n, (reward, group) in enumerate([(1, "g"), (0, "g"), (8, "h"), (6, "h")])]
    _, whitened = prepared(REINFORCEPlusPlus, model_folder, quiet_trainer(), episodes)
    # Eight tokens 1, 1, 0, 0, 8, 8, 6, 6: mean 3.75, sum of squares 2 (7.5625 + 14.0625 + 18.0625 + 5.0625) = 89.5.
    deviation = math.sqrt(89.5 / 7)
    assert whitened.tolist() == pytest.approx([(r - 3.75) / deviation for r in (1, 0, 8, 6)], abs=1e-5)
    _, with_baseline = prepared(REINFORCEPlusPlusBaseline, model_folder, quiet_trainer(), episodes)
    deviation = math.sqrt(2 * 2 * (0.25 + 1.0) / 7)
    assert with_baseline.tolist() == pytest.approx([r / deviation for r in (0.5, -0.5, 1, -1)], abs=1e-5)


@pytest.mark.parametrize("cls", [REINFORCEPlusPlusBaseline, GDPO])
def test_groups_without_a_signal_are_excluded_before_whitening(
    cls: type[PolicyGradient], model_folder: Path, quiet_trainer: Any
) -> None:
    """Of h the episodes have two and four tokens: the mean over tokens is not that over episodes."""
    episodes = [episode(n, 1.0) for n in (0, 1)] + [episode(2, 1.0, "h"), episode(3, 0.0, "h", tokens=4)]
    algorithm, found = prepared(cls, model_folder, quiet_trainer(), episodes, zero_variance="exclude")
    # Six tokens x, x, -x, -x, -x, -x: mean -x / 3, sum of squares x^2 (2 * 16 + 4 * 4) / 9 = 16 x^2 / 3.
    deviation = math.sqrt(16 / 3 / 5)
    assert found.tolist() == pytest.approx([0, 0, 4 / 3 / deviation, -2 / 3 / deviation], abs=1e-4)
    assert algorithm.metrics.take_rollout()["train/filtered_agents"] == 0.5


def test_reinforce_plus_plus_charges_the_divergence_to_each_token(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [episode(0, 1.0), episode(1, 0.0)]
    algorithm = REINFORCEPlusPlus({"main": Policy(str(model_folder))}, kl={"coefficient": 0.5}, gamma=0.5)
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    algorithm.unit = dataclasses.replace(algorithm.unit, whiten=None)
    with torch.no_grad():
        rows = algorithm.prepare(episodes, Sampling())["main"]
    assert rows.ref_logp is not None
    for row, reward in enumerate((1.0, 0.0)):
        first, second = [-0.5 * (-1.0 - value) for value in rows.ref_logp[row, 2:].tolist()]
        assert rows.advantages[row, 2:].tolist() == pytest.approx(
            [first + 0.5 * (second + reward), second + reward], abs=1e-5
        )
    # It is not charged a second time in the loss.
    losses, _ = algorithm.token_losses(rows.behavior_logp, rows.behavior_logp, rows)
    batch = Batch({"main": rows}, {"main": batch_totals(rows.action_mask)})
    algorithm.policies["main"].forward = lambda inputs: rows.behavior_logp.clone()
    assert float(algorithm.policy_loss("main", rows, batch)) == pytest.approx(float(losses.sum()) / 4)


@pytest.mark.parametrize("baseline", ["mean", "none"])
def test_a_mean_over_a_single_return_is_warned_of_once(
    baseline: str, model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm, advantages = prepared(REINFORCE, model_folder, quiet_trainer(), [episode(0, 3.0)], baseline=baseline)
    algorithm.prepare([episode(1, 5.0)], Sampling(max_tokens=8))
    warnings = [text for text in map(str, caplog.messages) if "single return of policy 'main'" in text]
    assert (advantages.tolist(), len(warnings)) == (([0.0], 1) if baseline == "mean" else ([3.0], 0))


def test_the_running_baseline_ends_with_the_collection_before(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = REINFORCE({"main": Policy(str(model_folder))}, baseline="running", baseline_decay=0.75)
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    levels = []
    for reward in (4.0, 8.0, 8.0):
        algorithm.prepare([episode(0, reward)], Sampling())
        levels.append(algorithm.metrics.take_rollout()["train/baseline"])
    assert levels == [4.0, 4.0, 5.0], ".75 * 4 + .25 * 8"
    other = REINFORCE({"main": Policy(str(model_folder))}, baseline="running")
    other.load_progress(algorithm.progress())
    assert other._running == {"main": 5.75}


def losses_of(algorithm: Any, log_ratios: list[float], advantage: float) -> list[float]:
    """Token losses of one row with these ratios, the sampler's log-probabilities being -1."""
    count = len(log_ratios)
    row = Trajectory("a", "main", (8,) * (1 + count), (False,) + (True,) * count, (0.0,) + (-1.0,) * count, ())
    batch = collate_rows([row], [0], [0], [0], advantages=[advantage])
    logp = torch.tensor([[0.0, *(-1.0 + value for value in log_ratios)]])
    losses, _ = algorithm.token_losses(logp, batch.behavior_logp, batch)
    return losses[0, 1:].tolist()


def test_the_losses_on_the_reference_numbers(model_folder: Path) -> None:
    def make(cls: Any, **options: Any) -> Any:
        return cls({"main": Policy(str(model_folder))}, **options)

    # rho 1.648721, clip 0.2: A = 1 gives -1.2; A = -1 gives 1.648721.
    assert losses_of(make(GRPO), [0.5], 1.0) == pytest.approx([-1.2])
    assert losses_of(make(GRPO), [0.5], -1.0) == pytest.approx([1.648721])
    assert losses_of(make(REINFORCEPlusPlus), [0.5], 1.0) == pytest.approx([-1.2])
    # GSPO takes the geometric mean of the row: exp((0.5 + 0.1) / 2).
    wide = make(GSPO, clip={"low": 0.9, "high": 1.0})
    assert losses_of(wide, [0.5, 0.1], 1.0) == pytest.approx([-1.349859] * 2)
    assert losses_of(make(GSPO), [0.5, 0.1], 1.0) == pytest.approx([-1.0004] * 2)
    # CISPO: the weight is clipped, the gradient is not: -min(rho, 1.2) A log pi with log pi = -0.5.
    assert losses_of(make(CISPO, clip={"high": 0.2}), [0.5], 1.0) == pytest.approx([0.6])
    for cls in (RLOO, REINFORCE, ReMax):
        assert losses_of(make(cls), [0.5], 2.0) == pytest.approx([1.0])  # -2 * -0.5


@pytest.mark.parametrize(
    ("correction", "factor"),
    [
        (Correction(), 1.0),
        (Correction("plain"), math.e),
        (Correction("truncated", cap=2.0), 2.0),
        (Correction("masked", high=2.0), 0.0),
        (Correction("masked", high=3.0, level="sequence"), 0.0),  # e^2 for the row of two tokens
        (Correction("masked", high=3.0, level="geometric_mean"), math.e),
    ],
)
def test_corrections_weigh_the_loss_by_learner_over_sampler(
    correction: Correction, factor: float, model_folder: Path, quiet_trainer: Any
) -> None:
    policy = Policy(str(model_folder))
    algorithm = GRPO({"main": policy}, correction=correction, recompute_old_logp=None)
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    row = Trajectory("a", "main", (8, 9, 10, 11), (False, False, True, True), (0.0,) * 4, ())
    rows = collate_rows([row], [0], [0], [0], advantages=[1.0])
    with torch.no_grad():
        rows.proximal_logp = policy(rows.inputs())
    rows.behavior_logp = rows.proximal_logp - 1.0 * rows.action_mask  # pi_old / mu = e for every token
    loss = algorithm.policy_loss("main", rows, Batch({"main": rows}, {"main": batch_totals(rows.action_mask)}))
    assert loss.item() == pytest.approx(-factor, rel=1e-5)
    logged = algorithm.metrics.take_update()
    assert logged["train/mismatch_max_ratio"] == pytest.approx(math.e, rel=1e-5)
    assert logged["train/mismatch_chi_square"] == pytest.approx(math.e**2 - 1, rel=1e-5)
    assert logged["train/mismatch_effective_share"] == pytest.approx(1.0)
    assert logged["train/mismatch_k1"] == pytest.approx(-1.0, rel=1e-5)


def test_a_correction_needs_the_learners_numbers(model_folder: Path) -> None:
    policies = {"main": Policy(str(model_folder))}
    assert GRPO(policies, correction=Correction("truncated")).old_policy.recompute is True
    with pytest.raises(ConfigurationError, match="the ratio corrects already"):
        GRPO(policies, correction=Correction("truncated"), recompute_old_logp=False)


def test_long_turns_are_punished(model_folder: Path, quiet_trainer: Any) -> None:
    # max_tokens is 8: with a buffer of 4, 6 tokens cost 0.5 and 8 cost 1.
    episodes = [episode(0, 1.0, tokens=4), episode(1, 1.0, tokens=6), episode(2, 1.0, tokens=8)]
    _, advantages = prepared(RLOO, model_folder, quiet_trainer(), episodes, overlong_buffer=4)
    # Returns 1, 0.5, 0: less the mean of the others.
    assert advantages.tolist() == pytest.approx([0.75, 0.0, -0.75])


def fitted(cls: Any, model_folder: Path, environment: Any, trainer: Any, ckpt: Any = None, **data: Any) -> Any:
    algorithm = cls({"main": Policy(str(model_folder), learning_rate=1e-3)})
    settings: dict[str, Any] = {"groups": 4, "group_size": 4, "iterations": 2, "sampling": Sampling(max_tokens=6)}
    trainer.fit(algorithm, RolloutDataModule(environment, **{**settings, **data}), ckpt_path=ckpt)
    return algorithm


@pytest.mark.parametrize("cls", FAMILY)
def test_each_algorithm_trains_from_rollouts(cls: Any, model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer()
    fitted(cls, model_folder, echo(), trainer)
    metrics = trainer.callback_metrics
    assert trainer.global_step == 2
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/ratio_deviation"] < 1e-4, "one update for each collection: always on policy"


@pytest.mark.long
def test_the_algorithms_are_different_ones(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    weights = {}
    for cls in FAMILY:
        passes = 1 if cls in RATIO_FREE else 3
        algorithm = fitted(cls, model_folder, echo(), quiet_trainer(), passes=passes)
        weights[cls.__name__] = next(algorithm.policy("main").model.parameters()).detach().clone()
    names = list(weights)
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            assert not torch.equal(weights[first], weights[second]), (first, second)


@pytest.mark.parametrize("cls", RATIO_FREE)
def test_a_second_pass_without_a_ratio_is_refused_and_a_second_mini_batch_warned_of(
    cls: Any, model_folder: Path, echo: Any, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = cls({"main": Policy(str(model_folder))})

    def checked(**options: Any) -> None:
        data = RolloutDataModule(echo(), groups=4, group_size=4, **options)
        data.trainer = quiet_trainer()
        data.check(algorithm, data.trainer)

    with pytest.raises(ConfigurationError, match=rf"data\.passes is 2, but {cls.__name__} has no importance ratio"):
        checked(passes=2)
    checked(minibatches=4)
    (warning,) = [record.getMessage() for record in caplog.records if "minibatches" in record.getMessage()]
    assert "sampled 3 updates earlier" in warning
    caplog.clear()
    checked()
    assert not logged_here(caplog)


def test_a_loss_depends_on_the_old_policy_where_it_says_so(model_folder: Path) -> None:
    row = Trajectory("a", "main", (8, 9), (False, True), (0.0, -1.0), ())
    rows = collate_rows([row], [0], [0], [0], advantages=[1.0])
    classes = [getattr(algorithms, name) for name in algorithms.__all__]
    for cls in classes:
        if issubclass(cls, PolicyGradient) and cls is not OnPolicyDistillation:  # which needs a teacher
            algorithm = cls({"main": Policy(str(model_folder))})
            gradients = set()
            for old in (-1.0, -1.1):
                logp = torch.full((1, 2), -1.0, requires_grad=True)
                algorithm.token_losses(logp, torch.full((1, 2), old), rows)[0].sum().backward()
                assert logp.grad is not None
                gradients.add(round(logp.grad[0, 1].item(), 5))
            # GSPO's clipping range is narrower than this step, so its gradient is 0 then, which is another one too.
            assert (len(gradients) == 2) == algorithm.uses_importance_ratio == (cls not in [*RATIO_FREE, C3]), cls


@pytest.mark.parametrize("cls", [ReMax, MAREMAX])
def test_a_greedy_baseline_of_greedy_episodes_is_refused(
    cls: Any, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    data = RolloutDataModule(echo(), groups=4, group_size=4, sampling=Sampling(temperature=0.0))
    with pytest.raises(ConfigurationError, match=r"data\.sampling\.temperature is 0"):
        data.check(cls({"main": Policy(str(model_folder))}), quiet_trainer())


def test_remax_plays_one_greedy_episode_for_each_task(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer()
    fitted(ReMax, model_folder, echo(), trainer, iterations=1)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    greedy = [item for item in episodes if item.id.endswith("-greedy")]
    assert len(episodes) == 4 * 4 + 4
    assert [item.group for item in greedy] == ["0-0", "0-1", "0-2", "0-3"]
    tasks = {item.group: item.task for item in episodes if item not in greedy}
    assert all(item.task == tasks[item.group] for item in greedy)
    policy = Policy(str(model_folder))
    policy.load()
    policy.model.eval()
    for item in greedy:
        (row,) = item.rows()
        ids = torch.tensor([row.token_ids])
        probable = policy.model(ids).logits[0, :-1].argmax(-1).tolist()
        acts = [place for place, action in enumerate(row.action_mask) if action]
        assert [probable[place - 1] for place in acts] == [row.token_ids[place] for place in acts]


def test_groups_without_signal_are_replaced_within_the_bound(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer()
    fitted(GRPO, model_folder, echo(reward=1.0), trainer, iterations=1, resample_rounds=2)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    # Every group has equal rewards: four groups, replaced twice, and then kept.
    assert len(episodes) == 4 * 4 * 3
    assert float(trainer.callback_metrics["rollout/resampled_groups"]) == 8
    assert float(trainer.callback_metrics["rollout/zero_variance_groups"]) == 1
    assert len({(item.task.index, item.group) for item in episodes}) == 12
    by_task: dict[int, set[str]] = {}
    for item in episodes:
        by_task.setdefault(item.task.index, set()).add(item.group)
    assert len(by_task) == 12, "every attempt is at another task"


@pytest.mark.parametrize("overlong_buffer", [0, 3])
def test_groups_that_differ_in_length_alone_are_replaced(
    overlong_buffer: int, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    class Half(echo):  # type: ignore[misc]
        """Rewards every answer to an even task, and to an odd one those whose length is a multiple of 3."""

        def begin(self, task: Task) -> str:
            self.even = task.index % 2 == 0
            return str(super().begin(task))

        def reply(self, message: Any) -> Any:
            outcome = super().reply(message)
            outcome.components["digits"] = float(self.even or len(message.content) % 3 == 0)
            return outcome

    trainer = quiet_trainer()
    algorithm = GRPO({"main": Policy(str(model_folder))}, overlong_buffer=overlong_buffer)
    sampling = Sampling(max_tokens=6)
    data = RolloutDataModule(
        Half(size=64), groups=6, group_size=4, iterations=1, resample_rounds=8, sampling=sampling, seed=1
    )
    trainer.fit(algorithm, data)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    kept: dict[str, list[Any]] = {}
    for item in episodes:
        slot = item.group.split(".")[0]
        kept.setdefault(slot, []).append(item)
    last = {
        slot: max((item.group for item in items), key=lambda name: int((name + ".0").split(".")[1]))
        for slot, items in kept.items()
    }
    for slot, items in kept.items():
        paid = {item.reward for item in items if item.group == last[slot]}
        assert len(paid) == 2, (slot, last[slot])
    assert float(trainer.callback_metrics["rollout/zero_variance_groups"]) == 0


@pytest.mark.long
def test_a_resumed_run_with_resampling_equals_an_uninterrupted_one(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Coarse(echo):  # type: ignore[misc]
        def reply(self, message: Any) -> Any:
            outcome = super().reply(message)
            outcome.components["digits"] = float(any(letter.isdigit() for letter in message.content))
            return outcome

    options: dict[str, Any] = {"iterations": 4, "resample_rounds": 1, "group_size": 2, "groups": 6}
    whole_trainer = quiet_trainer()
    whole = fitted(GRPO, model_folder, Coarse(), whole_trainer, **options)
    assert any(".1-" in item.id for item in read_episodes(Path(whole_trainer.default_root_dir) / "episodes"))
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fitted(GRPO, model_folder, Coarse(), quiet_trainer(enable_checkpointing=True, callbacks=[saver]), **options)
    again = fitted(GRPO, model_folder, Coarse(), quiet_trainer(), ckpt=tmp_path / "step=2.ckpt", **options)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
