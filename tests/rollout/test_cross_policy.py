"""Turns that stale snapshots sample: their share, their weights and their part in the loss."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import GRPO, MAGRPO, PPO, REINFORCE, ReMax
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.collectors.players import StaleSnapshots
from mrlm_pl.data.rollout.metrics import CollectionSums
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import Correction
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.rollout.cross_policy import CrossPolicy, stale_turns
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.tree_player import Branching, TreePlayer
from mrlm_pl.trainer.fsdp import FSDP
from tests.rollout.test_player import CHAT, Relay, ScriptedEngine
from tests.rollout.test_turn_tree import GrowingSums, played_trees
from tests.support.runs.short_fits import fingerprint
from tests.support.runs.watching import Watch

STALE = CrossPolicy(share=0.5, refresh=2)


def make(folder: Path, environment: Any, algorithm: Any = GRPO, lora: LoRA | None = None, **options: Any) -> Any:
    """A run whose weights move far in every step."""
    model = options.pop("model", {})
    policy = Policy(str(folder), learning_rate=1e-2, lora=lora)
    settings: dict[str, Any] = {"groups": 2, "group_size": 4, "iterations": 5, "sampling": Sampling(max_tokens=5)}
    return (
        algorithm({"main": policy}, **model),
        RolloutDataModule(environment, **{**settings, "cross_policy": STALE, **options}),
    )


def seats(cross_policy: CrossPolicy | None, *agents: str) -> dict[str, Seat]:
    return {agent: Seat("main", CHAT, Sampling(), 2048, cross_policy) for agent in agents}


def test_only_a_share_above_0_needs_stale_weights() -> None:
    assert CrossPolicy(share=0.0, refresh=1).drawn(7, "solver", 0) is None
    with pytest.raises(ConfigurationError, match="always the current weights"):
        CrossPolicy(share=0.5, refresh=1)


def scripted(environment: Any, cross_policy: CrossPolicy, episodes: int) -> tuple[list[Episode], ScriptedEngine]:
    engine = ScriptedEngine()
    player = EpisodePlayer({environment.name: environment}, seats(cross_policy, *environment.agents), engine)
    task = environment.tasks("train")[0]
    try:
        return player.play_blocking([EpisodeSpec(f"e{n}", task, "g", seed=n) for n in range(episodes)]), engine
    finally:
        player.close()


def turns_of(episodes: Sequence[Episode]) -> list[tuple[Episode, Trajectory, Turn]]:
    return [(episode, row, turn) for episode in episodes for row in episode.rows() for turn in row.turns]


def fitted(trainer: Any, algorithm: Any, data: Any, **options: Any) -> list[Episode]:
    """The episodes of a run."""
    folder = Path(trainer.default_root_dir) / "episodes"
    for path in folder.glob("*"):
        path.unlink()
    trainer.fit(algorithm, data, **options)
    return list(read_episodes(folder))


class Words(GrowingSums):
    """Rewards any reply."""

    name = "words"

    def step(self, actions: Any) -> Any:
        digits = {agent: Message("assistant", str(len(message.content))) for agent, message in actions.items()}
        return super().step(digits)


class Weights(Callback):
    """Keeps the policy's weights of every version."""

    def __init__(self) -> None:
        self.of: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_start(self, trainer: Any, algorithm: Any, batch: Any, batch_idx: int) -> None:
        network = algorithm.policy("main").model
        self.of[trainer.global_step] = {name: weight.clone() for name, weight in network.state_dict().items()}


@torch.no_grad()
def logprobs(policy: Policy, weights: dict[str, torch.Tensor], rows: Sequence[Trajectory]) -> list[torch.Tensor]:
    """Log-probabilities of the rows' actions under the model's own forward pass with these weights."""
    policy.model.load_state_dict(weights)
    found = []
    for row in rows:
        ids, mask = torch.tensor([row.token_ids]), torch.tensor([row.action_mask])
        found.append(policy(TokenRows(ids, torch.tensor([ids.shape[1]]), mask))[0])
    return found


# Who samples a turn.


@pytest.mark.long
def test_the_share_of_stale_turns_is_the_stated_one(echo: Any) -> None:
    """Three standard deviations of 4,000 draws of probability 0.25 are 0.0205."""
    episodes, engine = scripted(echo(turns=2), CrossPolicy(share=0.25, snapshots=2), 2000)
    found = [turn.policy for _, _, turn in turns_of(episodes)]
    assert len(found) == 4000
    assert abs(sum(policy != "main" for policy in found) / 4000 - 0.25) <= 0.0205
    assert set(found) == {"main", "main@3"}, "the scripted engine says that its weights are of version 3"
    asked = Counter(request.policy for call in engine.calls for request in call)
    assert set(asked) == {"main", "main@snapshot-0", "main@snapshot-1"}
    assert abs(asked["main@snapshot-0"] / 4000 - 0.125) <= 0.0157
    mixed = sum(len(stale_turns(episode)) == 1 for episode in episodes)
    assert abs(mixed / 2000 - 0.375) <= 0.0325, (
        "2 x .25 x .75 of the episodes have one of each, as turns are drawn apart"
    )
    again, _ = scripted(echo(turns=2), CrossPolicy(share=0.25, snapshots=2), 100)
    assert [episode.trajectories for episode in again] == [episode.trajectories for episode in episodes[:100]]
    assert Episode.from_json(episodes[0].to_json()) == episodes[0]


def test_whole_trajectories_are_of_one_policy_in_the_baseline(echo: Any) -> None:
    episodes, _ = scripted(echo(turns=2), CrossPolicy(share=0.25, unit="trajectory"), 500)
    counts = [len(stale_turns(episode)) for episode in episodes]
    assert set(counts) == {0, 2}
    assert abs(counts.count(2) / 500 - 0.25) <= 0.058, "three standard deviations"


def test_two_agents_of_an_episode_are_drawn_apart() -> None:
    episodes, _ = scripted(Relay(), CrossPolicy(share=0.5, unit="trajectory"), 200)
    drawn = {tuple(rows[0].turns[0].policy for rows in episode.trajectories.values()) for episode in episodes}
    assert drawn == {(a, b) for a in ("main", "main@3") for b in ("main", "main@3")}


@pytest.mark.parametrize("unit", ["turn", "trajectory"])
def test_decisions_of_a_turn_tree(unit: Any) -> None:
    """A decision that several paths share is of one policy in all of them; those of a state are drawn apart."""
    environment, engine = GrowingSums(turns=2), ScriptedEngine()
    cross = CrossPolicy(share=0.5, unit=unit)
    player = EpisodePlayer({"sums": environment}, seats(cross, "a", "b"), engine)
    task = environment.tasks("train")[0]
    specs = [EpisodeSpec(f"t{n}", task, f"t{n}", seed=n) for n in range(20)]
    paths = played_trees(TreePlayer(player, Branching("cross"), 2), specs)
    player.close()
    kinds: dict[tuple[str, ...], set[str]] = {}
    states: dict[tuple[str, ...], set[str]] = {}
    trees: dict[tuple[str, ...], set[str]] = {}
    for episode, row, turn in turns_of([path for tree in paths for path in tree]):
        kinds.setdefault((episode.group, turn.node, row.agent, str(turn.sample)), set()).add(turn.policy)
        states.setdefault((episode.group, turn.node, row.agent), set()).add(turn.policy)
        trees.setdefault((episode.group, row.agent), set()).add(turn.policy)
    assert {len(found) for found in kinds.values()} == {1}
    assert {next(iter(found)) for found in kinds.values()} == {"main", "main@3"}
    assert max(len(found) for found in states.values()) == (2 if unit == "turn" else 1)
    assert max(len(found) for found in trees.values()) == (2 if unit == "turn" else 1)


# Which weights they are.


@pytest.mark.parametrize(
    ("cross", "versions"),
    [
        (CrossPolicy(0.5, refresh=2), [{0}, {0}, {4}, {4}, {8}]),
        (CrossPolicy(0.5, refresh=1, snapshots=2), [{0}, {0, 2}, {2, 4}, {4, 6}, {6, 8}]),
        (CrossPolicy(0.5, refresh=2, snapshots=2), [{0}, {0}, {0, 4}, {0, 4}, {4, 8}]),
    ],
)
@pytest.mark.long_after(1)
def test_snapshots_are_replaced_at_the_stated_iterations(
    cross: CrossPolicy, versions: list[set[int]], model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    """Each iteration makes two updates, so iteration k begins with the weights of version 2k."""
    metrics = Watch()
    algorithm, data = make(model_folder, echo(turns=3), cross_policy=cross, minibatches=2)
    episodes = fitted(quiet_trainer(callbacks=[metrics]), algorithm, data)
    found: list[set[int]] = [set() for _ in range(5)]
    ages: list[list[int]] = [[] for _ in range(5)]
    for episode, row, turn in turns_of(episodes):
        assert row.policy == "main"
        if turn.policy == "main":
            assert turn.version == 2 * episode.iteration
        else:
            assert turn.policy == f"main@{turn.version}"
            found[episode.iteration].add(turn.version)
            ages[episode.iteration].append(2 * episode.iteration - turn.version)
    assert found == versions
    for iteration, aged in enumerate(ages):
        seen = metrics.steps[2 * iteration]
        assert seen["rollout/stale_turns"] == pytest.approx(len(aged) / 24)
        assert seen["rollout/stale_age"] == pytest.approx(sum(aged) / len(aged))


def test_an_engine_is_given_a_snapshot_when_it_is_replaced(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    class Loads(ScriptedEngine):
        def load(self, policy: str, weights: Any, version: int) -> None:
            loaded.append((policy, version))

    loaded: list[tuple[str, int]] = []
    run = make(model_folder, echo(), engine=Loads(), cross_policy=CrossPolicy(0.5, refresh=2, snapshots=2))
    quiet_trainer().fit(*run)
    assert [version for policy, version in loaded if policy == "main"] == [0, 1, 2, 3, 4]
    assert [item for item in loaded if item[0] != "main"] == [
        ("main@snapshot-0", 0),
        ("main@snapshot-1", 0),
        ("main@snapshot-0", 2),
        ("main@snapshot-1", 4),
    ]


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
@pytest.mark.long_after(1)
def test_stale_turns_have_the_log_probabilities_of_their_snapshot(
    lora: LoRA | None, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    """Cached keys and values of an earlier turn are those of the same weights."""
    weights = Weights()
    algorithm, data = make(model_folder, echo(turns=4), lora=lora, iterations=4)
    episodes = fitted(quiet_trainer(callbacks=[weights]), algorithm, data)
    rows, moved, seen = [row for episode in episodes for row in episode.rows()], 0.0, 0
    under = {version: logprobs(algorithm.policy("main"), of, rows) for version, of in weights.of.items()}
    for place, (episode, row) in enumerate(zip(episodes, rows, strict=True)):
        told = torch.tensor(row.logprobs)
        for turn in row.turns:
            span = slice(turn.start, turn.stop)
            assert torch.allclose(told[span], under[turn.version][place][span], atol=2e-5)
            if turn.policy != "main" and turn.version < episode.iteration:
                seen += 1
                moved = max(moved, float((told[span] - under[episode.iteration][place][span]).abs().max()))
    assert seen > 10
    assert moved > 1e-2, "the weights of then and of now are not told apart by this test"
    held = data.players.stale.state()["slots"]["main"][0]["weights"]
    assert all((".lora_" in name) == (lora is not None) for name in held)


def test_adapters_share_the_base_of_the_policy(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), lora=LoRA(rank=2), iterations=1)
    shared: list[bool] = []

    class Look(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            own = {id(weight): name for name, weight in algorithm.policy("main").network.named_parameters()}
            (slot,) = data.players.stale._slots["main"]
            shared.append(all((id(w) in own) != (".lora_" in name) for name, w in slot.network.named_parameters()))

    quiet_trainer(callbacks=[Look()]).fit(algorithm, data)
    assert shared == [True]


# Their part in the loss.


class Noted(GRPO):
    """Keeps the inputs of an update's loss."""

    def token_losses(self, logp: Any, old_logp: Any, rows: Any) -> Any:
        self.noted.append((logp.detach().clone(), old_logp.clone(), rows))
        return super().token_losses(logp, old_logp, rows)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.long_after(1)
def test_the_ratio_is_to_the_snapshot_that_sampled(
    corrected: bool, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    """Without recomputation pi / mu is the loss's own ratio; with it, the correction's weight is."""
    weights = Weights()
    options = {"model": {"correction": Correction("plain")}} if corrected else {}
    algorithm, data = make(model_folder, echo(turns=3), Noted, **options)
    algorithm.noted = []
    episodes = fitted(quiet_trainer(callbacks=[weights]), algorithm, data)
    policy, compared = algorithm.policy("main"), 0
    logp, old_logp, rows = algorithm.noted[-1]
    given = {row.token_ids: row for episode in episodes if episode.iteration == 4 for row in episode.rows()}
    for place, length in enumerate(rows.lengths.tolist()):
        row = given[tuple(rows.token_ids[place, :length].tolist())]
        (now,) = logprobs(policy, weights.of[4], [row])
        for turn in row.turns:
            (then,) = logprobs(policy, weights.of[turn.version], [row])
            span = slice(turn.start, turn.stop)
            ratio = torch.exp(now - then)[span]
            if corrected:
                assert torch.allclose(torch.exp(logp - old_logp)[place, span], torch.ones(1), atol=1e-4)
                weight = algorithm.old_policy.correction.weights(old_logp, rows.behavior_logp, rows.action_mask)
                assert torch.allclose(weight[place, span], ratio, rtol=1e-3)
            else:
                assert torch.allclose(torch.exp(logp - old_logp)[place, span], ratio, rtol=1e-3)
            if turn.policy == "main@4":
                assert torch.allclose(ratio, torch.ones(1)), "iteration 4 has just taken the weights of then"
            compared += turn.policy != "main"
    assert compared > 3


def test_the_ratio_of_an_older_snapshot_is_not_one(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    metrics = Watch()
    algorithm, data = make(model_folder, echo(turns=3))
    quiet_trainer(callbacks=[metrics]).fit(algorithm, data)
    deviations = [seen["train/ratio_deviation"] for seen in metrics.steps]
    # Iterations 2 and 4 begin with a new snapshot.
    assert max(deviations[k] for k in (0, 2, 4)) < 1e-4
    assert min(deviations[k] for k in (1, 3)) > 1e-2


@pytest.mark.parametrize("algorithm", [REINFORCE, ReMax])
def test_a_loss_without_a_ratio_takes_a_correction(
    algorithm: Any, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    run = make(model_folder, echo(), algorithm)
    with pytest.raises(ConfigurationError, match="give it a correction"):
        quiet_trainer().fit(*run)
    found = make(model_folder, echo(), algorithm, model={"correction": Correction("truncated")}, iterations=1)
    episodes = fitted(quiet_trainer(), *found)
    greedy = [episode for episode in episodes if episode.id.endswith("greedy")]
    assert len(greedy) == (2 if algorithm is ReMax else 0)
    assert not any(stale_turns(episode) for episode in greedy), "they measure the current weights"


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_recomputed_log_probabilities_take_a_correction(
    algorithm: Any, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    run = make(model_folder, echo(), algorithm, sampling=Sampling(top_p=0.9, max_tokens=4))
    with pytest.raises(ConfigurationError, match="give it a correction"):
        quiet_trainer().fit(*run)


def test_an_actor_with_a_critic_and_a_turn_tree_learn_from_stale_turns(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    quiet_trainer().fit(*make(model_folder, echo(turns=2), PPO, iterations=2))
    model = {"correction": Correction("truncated")}
    episodes = fitted(quiet_trainer(), *make(model_folder, Words(), MAGRPO, model=model, group_size=2, iterations=2))
    assert any(stale_turns(episode) for episode in episodes)
    assert all(row.policy == "main" for episode in episodes for row in episode.rows())


def test_a_frozen_policy_has_no_snapshots(model_folder: Path, quiet_trainer: Any) -> None:
    policies = {"a": Policy(str(model_folder), learning_rate=1e-2), "b": Policy(str(model_folder), trained=False)}
    metrics = Watch()
    cross = CrossPolicy(share=1.0, refresh=2)
    data = RolloutDataModule(Relay(), groups=2, group_size=4, iterations=1, cross_policy=cross)
    episodes = fitted(quiet_trainer(callbacks=[metrics]), GRPO(policies), data)
    assert {(row.agent, turn.policy) for _, row, turn in turns_of(episodes)} == {("a", "a@0"), ("b", "b")}
    assert metrics.steps[0]["rollout/stale_turns"] == 1.0, "of the turns of policies that have snapshots"


# Beside them nothing changes.


@pytest.mark.long
def test_a_share_of_0_trains_like_a_run_without_snapshots(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    prints = []
    for cross in (None, CrossPolicy(share=0.0), STALE):
        algorithm, data = make(model_folder, echo(turns=2), cross_policy=cross)
        quiet_trainer().fit(algorithm, data)
        prints.append(fingerprint(algorithm))
    assert prints[0] == prints[1] != prints[2]


def test_evaluation_is_never_stale(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    seen: list[Episode] = []

    class Look(Callback):
        def on_validation_batch_end(self, trainer: Any, algorithm: Any, outputs: Any, batch: Any, *rest: Any) -> None:
            seen.extend(batch.episodes)

    prints = []
    for limit in (0, 1.0):
        cross = CrossPolicy(share=1.0, refresh=2)
        algorithm, data = make(model_folder, echo(turns=2), validation_episodes=4, cross_policy=cross, iterations=3)
        trainer = quiet_trainer(callbacks=[Look()], limit_val_batches=limit, val_check_interval=1)
        assert all(stale_turns(episode) for episode in fitted(trainer, algorithm, data))
        prints.append(fingerprint(algorithm))
    assert seen
    assert not any(stale_turns(episode) for episode in seen)
    assert {turn.version for _, _, turn in turns_of(seen)} == {1, 2, 3}
    assert prints[0] == prints[1]


def test_the_entropy_is_the_current_policys() -> None:
    """Of -0.5 a token that the policy chose, and -4 a token that a snapshot chose, the first counts."""
    own = Turn("x", 0, 1, 2, 0.0, {}, "stop", "main", 4, "e")
    stale = Turn("x", 1, 3, 4, 0.0, {}, "stop", "main@2", 2, "e")
    row = Trajectory("x", "main", (1,) * 4, (False, True, False, True), (0.0, -0.5, 0.0, -4.0), (own, stale))
    episode = Episode("0", Task("a", "train", 0), "g", 0, 0, {"x": (row,)}, "end")
    metrics = CollectionSums.of([episode], 1.0).metrics()
    assert metrics["rollout/entropy"] == 0.5
    assert metrics["rollout/response_tokens"] == 1.0
    assert metrics["rollout/tokens_per_second"] == 2.0
    all_stale = Trajectory("x", "main", (1,) * 4, (False,) * 3 + (True,), (0.0,) * 3 + (-4.0,), (stale,))
    episode = Episode("0", Task("a", "train", 0), "g", 0, 0, {"x": (all_stale,)}, "end")
    assert "rollout/entropy" not in CollectionSums.of([episode], 1.0).metrics()


# Checkpoints.


@pytest.mark.parametrize(
    ("cross", "lora", "steps"),
    [
        (CrossPolicy(0.5, refresh=2, snapshots=2), None, (1, 2, 3, 4, 5, 8)),
        (CrossPolicy(0.5, refresh=2, unit="trajectory"), LoRA(rank=2), (3, 6)),
    ],
)
@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(
    cross: CrossPolicy,
    lora: LoRA | None,
    steps: Sequence[int],
    model_folder: Path,
    echo: Any,
    quiet_trainer: Any,
    tmp_path: Path,
) -> None:
    """Checkpoints lie within an iteration (odd steps) and between two, before and after snapshots are taken."""
    options = {"minibatches": 2, "cross_policy": cross, "lora": lora}
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, echo(turns=2), **options)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(algorithm, data)
    whole = fingerprint(algorithm)
    for step in steps:
        algorithm, data = make(model_folder, echo(turns=2), **options)
        trainer = quiet_trainer()
        trainer.fit(algorithm, data, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert trainer.global_step == 10
        assert fingerprint(algorithm) == whole, f"from step {step}"


@pytest.mark.long
def test_a_checkpoint_after_the_run_and_other_numbers_of_snapshots(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    algorithm, data = make(model_folder, echo(), cross_policy=CrossPolicy(1.0, refresh=1, snapshots=2))
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert {slot["version"] for slot in data.players.stale.state()["slots"]["main"]} == {3, 4}
    for snapshots, versions in ((1, {4}), (3, {3, 4})):
        cross = CrossPolicy(1.0, refresh=9, snapshots=snapshots)
        algorithm, data = make(model_folder, echo(), cross_policy=cross)
        episodes = fitted(quiet_trainer(max_epochs=2), algorithm, data, ckpt_path=tmp_path / "end.ckpt")
        found = {turn.version for episode, _, turn in turns_of(episodes) if 5 <= episode.iteration < 9}
        assert found == versions


def test_snapshots_of_another_model_are_refused(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    quiet_trainer().fit(algorithm, data)
    state = data.players.stale.state()
    state["slots"]["main"][0]["weights"].popitem()
    data.players.stale.load(state)
    with pytest.raises(ConfigurationError, match="snapshots are of another model"):
        data.players.stale.begin(algorithm, 1, 1)


# Collections that are played meanwhile.


@pytest.mark.long
def test_stale_turns_are_apart_from_the_lag(model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path) -> None:
    metrics = Watch()
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"cross_policy": CrossPolicy(0.5, refresh=4), "mode": "async", "max_lag": 1, "iterations": 8}
    trainer = quiet_trainer(callbacks=[metrics, keep], enable_checkpointing=True)
    episodes = fitted(trainer, *make(model_folder, echo(turns=2), **options))
    ages = [e.iteration - t.version for e, _, t in turns_of(episodes) if t.policy != "main"]
    assert max(ages) >= 3, "iteration 3 is begun with the snapshot of version 0"
    assert all(e.iteration - t.version <= 1 for e, _, t in turns_of(episodes) if t.policy == "main")
    stale = sum(seen["rollout/stale_turns"] for seen in metrics.steps) / len(metrics.steps)
    assert stale == pytest.approx(len(ages) / len(turns_of(episodes)))
    trainer = quiet_trainer()
    again = fitted(trainer, *make(model_folder, echo(turns=2), **options), ckpt_path=tmp_path / "step=3.ckpt")
    assert trainer.global_step == 8
    assert {e.iteration for e in again} == {3, 4, 5, 6, 7}
    assert {t.version for e, _, t in turns_of(again) if t.policy != "main"} <= {0, 4}


# Refused options.


@pytest.mark.parametrize(
    "option", [{"share": 1.5}, {"share": -0.1}, {"refresh": 0}, {"snapshots": 0}, {"unit": "episode"}, {"refresh": 1}]
)
def test_values_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        CrossPolicy(**option)


def test_weights_that_are_split_over_processes_are_refused(model_folder: Path) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder))})
    trainer: Any = types.SimpleNamespace(strategy=FSDP(), precision="32-true")
    with pytest.raises(ConfigurationError, match=r"FSDP splits over processes; use one device or .*ddp"):
        StaleSnapshots(STALE).check(algorithm, trainer, Sampling())


def test_names_that_could_be_snapshots_are_refused(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    data = RolloutDataModule(echo(), groups=2, group_size=2, cross_policy=STALE)
    with pytest.raises(ConfigurationError, match="rename it"):
        quiet_trainer().fit(GRPO({"main@0": Policy(str(model_folder))}), data)
