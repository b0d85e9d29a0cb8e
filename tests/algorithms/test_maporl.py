"""MAPoRL: the rewards of turns, the ends of credit, the input of the critics, and the turns that are trained."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment

from mrlm_pl.algorithms import MAPoRL
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.credit.influence import learned_in, scores_of, with_influence
from mrlm_pl.policy import LoRA, Policy
from tests.support.environments.discussion import PERSONS, Discussion
from tests.support.runs.watching import Watch

# The reference's example: two persons, three turns, gamma 0.3.
SCORES = {"ann": (0.2, 0.8, 1.0), "bob": (0.9, 0.6, 0.5)}
INFLUENCE = {"ann": (0.343525, 0.788462, 1.0), "bob": (0.847122, 0.634615, 0.5)}
TOKENS = 2
BY_TURN = [f"{person}@{turn}" for person in PERSONS for turn in (1, 2, 3)]


def discussion(
    scores: dict[str, tuple[float, ...]] = SCORES, by_turn: bool = False, rest: float = 0.0, policy: str = "main"
) -> Episode:
    """A record in which each answer is two tokens behind three of the environment, with ``rest`` as another reward."""
    rows: dict[str, list[Trajectory]] = {}
    for person, (begin, values) in zip(scores, enumerate(scores.values()), strict=True):
        agents = [f"{person}@{turn}" if by_turn else person for turn in range(1, len(values) + 1)]
        for agent in dict.fromkeys(agents):
            steps = [step for step, name in enumerate(agents) if name == agent]
            turns, messages = [], []
            for place, step in enumerate(steps):
                start = 5 * place + 3
                parts = {"score": values[step], "penalty": rest}
                turn = Turn(agent, step, start, start + TOKENS, values[step] + rest, parts, "stop", policy, 0, "e")
                turns.append(turn)
                messages += [Message("user", f"q{step}"), Message("assistant", f"{person}{step}")]
            mask = (False, False, False, True, True) * len(steps)
            ids = tuple(8 + begin + number for number in range(len(mask)))
            logprobs = tuple(-1.0 if acted else 0.0 for acted in mask)
            row = Trajectory(agent, policy, ids, mask, logprobs, tuple(turns), tuple(messages))
            rows.setdefault(agent, []).append(row)
    trajectories = {agent: tuple(own) for agent, own in rows.items()}
    return Episode("0", Task("discussion", "train", 0), "g", 0, 0, trajectories, "end", agents=tuple(trajectories))


def influence(**options: Any) -> partial[Any]:
    amounts = {"alpha0": 0.0, "alpha1": 0.0, "beta0": 0.0, "beta1": 0.0, **options}
    return partial(with_influence, gamma=0.3, reward="team", horizon="discounted_sum", amounts=amounts)


def rewards(episode: Episode) -> dict[str, list[float]]:
    """The rewards of each person's turns, in their order."""
    found: dict[str, dict[int, float]] = {}
    for row in episode.rows():
        for turn in row.turns:
            found.setdefault(turn.agent.partition("@")[0], {})[turn.index] = turn.reward
    return {person: [rewarded[step] for step in sorted(rewarded)] for person, rewarded in found.items()}


@pytest.mark.parametrize("by_turn", [False, True])
def test_a_turn_is_paid_its_influence_and_what_is_not_shared(by_turn: bool) -> None:
    rewarded, sums = influence()(discussion(by_turn=by_turn, rest=-0.25))
    found = rewards(rewarded)
    for person, expected in INFLUENCE.items():
        assert found[person] == pytest.approx([value - 0.25 for value in expected], abs=1e-6)
    # Mean R of the first turn: (0.343525 + 0.847122) / 2.
    assert sums["influence/turn_1"] == (pytest.approx(1.190647, abs=1e-6), 2.0)
    for row in rewarded.rows():
        for turn in row.turns:
            assert sum(turn.components.values()) == turn.reward
            assert turn.components["unshared"] == pytest.approx(-0.25)


def test_incentives_are_paid_and_summed_by_kind() -> None:
    # Ann goes from wrong to right beside a right bob: alpha1 for her in turn 2, beta1 for bob in turn 1. Bob ends at
    # exactly 0.5: his change from right is a tie, and so is ann's last influence on him.
    rewarded, sums = influence(alpha0=1.0, alpha1=10.0, beta0=100.0, beta1=1000.0)(discussion())
    earned = {
        person: [round(value - base) for value, base in zip(found, INFLUENCE[person], strict=True)]
        for person, found in rewards(rewarded).items()
    }
    assert earned == {"ann": [0, 10, 0], "bob": [1000, 0, 0]}
    assert sums["incentive_alpha1"] == (10.0, 6.0)
    assert sums["incentive_beta1"] == (1000.0, 6.0)
    assert sums["incentive_alpha0"] == (0.0, 6.0)
    assert sums["ties"] == (2.0, 1.0)


def test_labels_are_scores_like_any_other() -> None:
    rewarded, _ = influence(alpha0=0.5)(discussion({"ann": (0.0, 1.0), "bob": (0.0, 0.0), "eve": (1.0, 0.0)}))
    # Turn 1: 0.3 (1 / 3) / 1.3 for the wrong and (1 + 0.1) / 1.3 for the right. Bob was wrong and eve right before: a
    # tie, for which ann earns 0. Eve gave up the right answer beside the wrong.
    assert rewards(rewarded) == {
        "ann": pytest.approx([0.1 / 1.3, 1.0]),
        "bob": pytest.approx([0.1 / 1.3, 0.0]),
        "eve": pytest.approx([1.1 / 1.3, -0.5]),
    }


def test_a_discussion_that_ended_early_pays_what_there_was() -> None:
    early = {person: scores[:2] for person, scores in SCORES.items()}
    rewarded, sums = influence()(dataclasses.replace(discussion(early), truncated=True))
    assert rewards(rewarded)["ann"] == pytest.approx([0.315385, 0.8], abs=1e-6)
    assert "influence/turn_3" not in sums
    assert not rewarded.truncated, "no value of what would have come after is added"


def test_a_consensus_is_not_paid_for_turns_that_are_not_played() -> None:
    # Scores of 1 earn R = 1 in every turn, however many turns are played.
    components = {"score": 1.0, "consensus": 2.0}
    agreed = discussion({"ann": (1.0,), "bob": (1.0,)}).with_turns(
        lambda turn: dataclasses.replace(turn, reward=3.0, components=components)
    )
    assert rewards(influence()(agreed)[0]) == {"ann": [1.0], "bob": [1.0]}
    assert rewards(influence()(discussion({"ann": (1.0,) * 3, "bob": (1.0,) * 3}))[0])["ann"] == [1.0] * 3


def acted(agent: str, *decisions: tuple[int, float | None]) -> tuple[Trajectory, ...]:
    """A row of an agent that decides at these steps of the environment, with one token each; some are scored."""
    turns = []
    for place, (step, score) in enumerate(decisions):
        parts = {"other": 0.125} if score is None else {"score": score}
        rewarded = sum(parts.values())
        turns.append(Turn(agent, step, 2 * place + 1, 2 * place + 2, rewarded, parts, "stop", "main", 0, "e"))
    mask = (False, True) * len(turns)
    return (Trajectory(agent, "main", tuple(range(8, 8 + len(mask))), mask, (0.0, -1.0) * len(turns), tuple(turns)),)


@pytest.mark.parametrize("by_turn", [False, True])
def test_turns_are_counted_by_answers_and_not_by_steps(by_turn: bool) -> None:
    """Two solvers at steps 0 and 3; between them a leader, who is scored, and a summarizer, who is not."""
    if by_turn:
        trajectories = {
            "a@1": acted("a@1", (0, 0.2)),
            "b@1": acted("b@1", (0, 0.8)),
            "leader@1": acted("leader@1", (1, 0.5)),
            "summarizer@1": acted("summarizer@1", (2, None)),
            "a@2": acted("a@2", (3, 0.4)),
            "b@2": acted("b@2", (3, 0.6)),
            "leader@2": acted("leader@2", (4, 0.2)),
        }
    else:
        trajectories = {
            "a": acted("a", (0, 0.2), (3, 0.4)),
            "b": acted("b", (0, 0.8), (3, 0.6)),
            "leader": acted("leader", (1, 0.5), (4, 0.2)),
            "summarizer": acted("summarizer", (2, None)),
        }
    record = dataclasses.replace(discussion(), trajectories=trajectories)
    assert scores_of(record) == [{"a": 0.2, "b": 0.8, "leader": 0.5}, {"a": 0.4, "b": 0.6, "leader": 0.2}]
    found = rewards(influence()(record)[0])
    # The mean of the second turn is 0.4: (0.2 + 0.12) / 1.3 and so on. The summarizer keeps its reward.
    assert found == {
        "a": pytest.approx([0.32 / 1.3, 0.4]),
        "b": pytest.approx([0.92 / 1.3, 0.6]),
        "leader": pytest.approx([0.62 / 1.3, 0.2]),
        "summarizer": [0.125],
    }
    kept = learned_in(record, [1])
    steps = [
        (turn.agent.partition("@")[0], turn.index)
        for row in kept.rows()
        for turn in row.turns
        if row.action_mask[turn.start]
    ]
    assert sorted(steps) == [("a", 0), ("b", 0), ("leader", 1), ("summarizer", 2)]


def test_what_comes_before_an_answer_is_of_the_same_turn() -> None:
    """Ann calls a tool before her second answer."""
    record = dataclasses.replace(
        discussion(),
        trajectories={"ann": acted("ann", (0, 0.2), (1, None), (2, 1.0)), "bob": acted("bob", (0, 0.9), (2, 0.5))},
    )
    assert scores_of(record) == [{"ann": 0.2, "bob": 0.9}, {"ann": 1.0, "bob": 0.5}]
    assert rewards(influence()(record)[0])["ann"] == pytest.approx([(0.2 + 0.3 * 0.75) / 1.3, 0.125, 1.0])
    (row,) = learned_in(record, [2]).trajectories["ann"]
    assert [place for place, trained in enumerate(row.action_mask) if trained] == [3, 5]


def test_records_that_cannot_be_scored_are_refused() -> None:
    none = discussion()
    row = none.trajectories["ann"][0]
    without = dataclasses.replace(row, turns=tuple(dataclasses.replace(turn, components={}) for turn in row.turns))
    with pytest.raises(DataError, match="'discussion' has no turn with a reward component 'score'"):
        scores_of(dataclasses.replace(none, trajectories={"ann": (without,)}))
    with pytest.raises(DataError, match=r"episode '0': scores: that of 'ann' in turn 1 is 1\.5"):
        influence()(discussion({"ann": (0.0, 1.5)}))
    twice = discussion({"ann": (1.0,)}).trajectories["ann"][0]
    other = dataclasses.replace(twice, turns=(dataclasses.replace(twice.turns[0], agent="ann@1"),))
    with pytest.raises(DataError, match="'ann' answered twice in turn 1, the second time as 'ann@1'"):
        scores_of(dataclasses.replace(none, trajectories={"ann": (twice,), "ann@1": (other,)}))


def test_an_episode_that_is_cut_short_before_any_score_does_not_end_the_run(
    model_folder: Path, quiet_trainer: Any
) -> None:
    # The record of a question that fills the context window: no agent has acted.
    silent = dataclasses.replace(discussion(), trajectories={}, stop_reason="context_window", truncated=True)
    alone = prepared(model_folder, quiet_trainer(), [discussion()], turn_schedule=[[1]])
    beside = prepared(model_folder, quiet_trainer(), [silent, discussion()], turn_schedule=[[1]])
    for found in (alone, beside):
        assert found[1]["main"].action_mask.sum() == 4
    assert torch.equal(beside[1]["main"].advantages, alone[1]["main"].advantages)
    assert alone[0].metrics.take_rollout() == beside[0].metrics.take_rollout()
    # One who had called a tool by then keeps the reward of the call.
    row = discussion({"ann": (1.0,)}).trajectories["ann"][0]
    call = dataclasses.replace(row, turns=(dataclasses.replace(row.turns[0], reward=0.1, components={"call": 0.1}),))
    rewarded, sums = influence()(dataclasses.replace(silent, trajectories={"ann": (call,)}))
    assert (rewards(rewarded), sums, rewarded.truncated) == ({"ann": [0.1]}, {}, False)


# Credit.


def prepared(
    model_folder: Path, trainer: Any, episodes: list[Episode], constant: float = 0.0, **options: Any
) -> tuple[MAPoRL, Any]:
    """The algorithm and its rows; all values are the constant."""
    algorithm = MAPoRL({"main": Policy(str(model_folder))}, whiten_advantages=False, lam=0.5, **options)
    algorithm.configure_model()
    algorithm.trainer = trainer
    head = algorithm.policy("main").value_head
    if head is not None:
        torch.nn.init.constant_(head.linear.bias, constant)
    with torch.no_grad():
        return algorithm, algorithm.prepare(episodes, Sampling())


@pytest.mark.parametrize("by_turn", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_no_credit_crosses_the_end_of_a_turn(
    by_turn: bool, truncated: bool, model_folder: Path, quiet_trainer: Any
) -> None:
    record = dataclasses.replace(discussion(by_turn=by_turn), truncated=truncated)
    _, rows = prepared(model_folder, quiet_trainer(), [record], constant=1.0)
    rows = rows["main"]
    expected = []
    for person in PERSONS:
        for influence in INFLUENCE[person]:
            # The last token: R - V, with nothing behind it. The first: 0 + V - V + lambda times the last one's.
            expected += [0.5 * (influence - 1.0), influence - 1.0]
    assert rows.advantages[rows.action_mask].tolist() == pytest.approx(expected, abs=1e-6)
    assert rows.returns[rows.action_mask].tolist() == pytest.approx([1.0 + value for value in expected], abs=1e-6)


def test_what_is_logged_of_a_collection(model_folder: Path, quiet_trainer: Any) -> None:
    failed = dataclasses.replace(discussion(), error="the back end is away")
    short = discussion({person: scores[:1] for person, scores in SCORES.items()})
    algorithm, _ = prepared(
        model_folder, quiet_trainer(), [discussion(), failed, short], alpha1=0.8, turn_schedule=[[1, 3], [2]]
    )
    told = algorithm.metrics.take_rollout()
    assert told["train/ties"] == 2.0
    assert told["train/incentive_alpha1"] == pytest.approx(0.1), "one of 8 answers"
    assert told["train/incentive_beta0"] == 0.0
    # (0.343525 + 0.847122 + 0.2 + 0.9) / 4
    assert told["train/influence/turn_1"] == pytest.approx(0.572662, abs=1e-6)
    assert told["train/influence/turn_2"] == pytest.approx(0.711538, abs=1e-6)
    assert [told[f"train/trained/turn_{turn}"] for turn in (1, 2, 3)] == [1.0, 0.0, 1.0]


# The critics' input.


def test_a_critic_reads_the_question_and_one_answer(model_folder: Path, quiet_trainer: Any) -> None:
    record = discussion(by_turn=True)
    critics = {agent: Policy(str(model_folder), random_init_seed=number) for number, agent in enumerate(BY_TURN)}
    algorithm = MAPoRL(
        {"main": Policy(str(model_folder))},
        agent_critics=critics,
        critic_reads="answer",
        whiten_advantages=False,
        lam=0.5,
        turn_schedule=[[2, 3]],
    )
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    for critic in critics.values():
        torch.nn.init.normal_(critic.value_head.linear.weight)
    with torch.no_grad():
        rows = algorithm.prepare([record], Sampling())
    assert set(rows) == {"main", *(f"{agent}/critic" for agent in BY_TURN if not agent.endswith("@1"))}
    chat = critics["ann@1"].chat
    prompt = chat.encode(chat.render([Message("user", "q0")], generation_prompt=True))
    for place, agent in enumerate(agent for agent in BY_TURN if not agent.endswith("@1")):
        person, _, turn = agent.partition("@")
        answer = record.trajectories[agent][0].token_ids[3:]
        trained = rows[f"{agent}/critic"]
        assert trained.token_ids.tolist() == [[*prompt, *answer]], (
            "the question of the first turn, no word of the others"
        )
        assert trained.action_mask.tolist() == [[False] * len(prompt) + [True] * TOKENS]
        critic = critics[agent]
        hidden = critic.model(trained.token_ids, output_hidden_states=True).hidden_states[-1]
        values = critic.value_head(hidden)[0, len(prompt) - 1 : -1].tolist()
        assert trained.values[trained.action_mask].tolist() == pytest.approx(values, abs=1e-5)
        influence = INFLUENCE[person][int(turn) - 1]
        last = influence - values[1]
        advantages = [values[1] - values[0] + 0.5 * last, last]
        assert rows["main"].advantages[place][rows["main"].action_mask[place]].tolist() == pytest.approx(
            advantages, abs=1e-5
        )
        returns = [value + advantage for value, advantage in zip(values, advantages, strict=True)]
        assert trained.returns[trained.action_mask].tolist() == pytest.approx(returns, abs=1e-5)
    assert rows["main"].values is None


def test_answers_in_one_conversation_are_rows_of_their_own(model_folder: Path, quiet_trainer: Any) -> None:
    critics = {person: Policy(str(model_folder)) for person in PERSONS}
    algorithm = MAPoRL({"main": Policy(str(model_folder))}, agent_critics=critics, critic_reads="answer", lam=1.0)
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    record = discussion()
    with torch.no_grad():
        rows = algorithm.prepare([record, dataclasses.replace(record, group="h")], Sampling())
    trained = rows["bob/critic"]
    ids = record.trajectories["bob"][0].token_ids
    assert [row[-TOKENS:] for row in trained.token_ids.tolist()] == [
        list(ids[start : start + 2]) for start in (3, 8, 13)
    ] * 2
    assert trained.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert trained.returns[trained.action_mask].view(6, 2)[:, 0].tolist() == pytest.approx(
        [*INFLUENCE["bob"]] * 2, abs=1e-6
    )


def test_a_record_without_messages_has_no_question(model_folder: Path, quiet_trainer: Any) -> None:
    record = discussion({"ann": (1.0,)})
    row = dataclasses.replace(record.trajectories["ann"][0], messages=())
    record = dataclasses.replace(record, trajectories={"ann": (row,)})
    options: dict[str, Any] = {"agent_critics": {"ann": Policy(str(model_folder))}, "critic_reads": "answer"}
    with pytest.raises(DataError, match="agent 'ann' was shown no user message"):
        prepared(model_folder, quiet_trainer(), [record], **options)


# The schedule of turns.


def test_only_the_actions_of_the_turns_are_learnt_from() -> None:
    (row,) = learned_in(discussion(), [1, 3]).trajectories["ann"]
    assert [place for place, acted in enumerate(row.action_mask) if acted] == [3, 4, 13, 14]
    assert row.logprobs == tuple(-1.0 if acted else 0.0 for acted in row.action_mask)
    assert row.token_ids == discussion().trajectories["ann"][0].token_ids


def test_the_schedule_goes_round_and_its_denominators_are_what_is_trained(
    model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = MAPoRL({"main": Policy(str(model_folder))}, turn_schedule=[[1], [2, 3], [4]], turn_iterations=2)
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    tokens = []
    for _ in range(7):
        with torch.no_grad():
            rows = algorithm.prepare([discussion()], Sampling())
        if rows:
            assert (rows["main"].episode_tokens == int(rows["main"].action_mask.sum())).all()
        tokens.append(int(rows["main"].action_mask.sum()) if rows else 0)
    # Two persons with two tokens a turn. There is no fourth turn: nothing is trained, which is not an error.
    assert tokens == [4, 4, 8, 8, 0, 0, 4]
    assert caplog.text.count("turn_schedule names the turns [4], but no episode went beyond turn 3") == 2
    assert caplog.text.count("turn_schedule") == 2


class Weights(Watch):
    """Keeps the weights before the first update and after each as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: Any, algorithm: Any) -> None:
        self._keep(algorithm)

    def on_train_batch_end(self, trainer: Any, algorithm: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, algorithm, *args)
        self._keep(algorithm)

    def _keep(self, algorithm: Any) -> None:
        self.weights.append({name: weight.detach().clone() for name, weight in algorithm.named_parameters()})

    def moved(self) -> list[set[str]]:
        """The policies, and agents' critics, whose weights each update changed."""
        return [
            {
                re.sub(r"\.(model|value_head)\..*", "", name)
                for name in before
                if not torch.equal(before[name], after[name])
            }
            for before, after in zip(self.weights, self.weights[1:], strict=False)
        ]


def rollouts(environment: Environment, **data: Any) -> RolloutDataModule:
    settings: dict[str, Any] = {"groups": 4, "group_size": 2, "iterations": 4, "sampling": Sampling(max_tokens=4)}
    return RolloutDataModule(environment, **{**settings, **data})


def policies_by_turn(model_folder: Path, lora: bool = False) -> dict[str, Any]:
    policies = {
        f"turn_{turn}": Policy(str(model_folder), 1e-3, weight_decay=0.1, lora=LoRA(2) if lora else None)
        for turn in (1, 2, 3)
    }
    seats = {agent: f"turn_{agent.partition('@')[2]}" for agent in BY_TURN}
    return {"policies": policies, "seats": seats}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.long_after(1)
def test_policies_of_other_turns_rest_to_the_bit(lora: bool, model_folder: Path, quiet_trainer: Any) -> None:
    watch = Weights()
    algorithm = MAPoRL(**policies_by_turn(model_folder, lora), turn_schedule=[[1], [3, 2]])
    data = rollouts(Discussion(by_turn=True), passes=2)
    quiet_trainer(callbacks=[watch]).fit(algorithm, data)
    one, others = {"policies.turn_1"}, {"policies.turn_2", "policies.turn_3"}
    assert watch.moved() == [one, one, others, others] * 2
    assert [told["train/trained/turn_1"] for told in watch.steps] == [1, 1, 0, 0, 1, 1, 0, 0]
    assert "train/turn_2/approx_kl" in watch.steps[2]
    if lora:
        bases = [algorithm.policy(name).network.get_input_embeddings().weight for name in algorithm.policies]
        assert len({weight.data_ptr() for weight in bases}) == 1, "one base for all turns"


@pytest.mark.long
def test_critics_of_other_turns_rest_too(model_folder: Path, quiet_trainer: Any) -> None:
    watch = Weights()
    critics = {agent: Policy(str(model_folder), 1e-3, weight_decay=0.1) for agent in BY_TURN}
    algorithm = MAPoRL(
        {"main": Policy(str(model_folder), 1e-3)},
        agent_critics=critics,
        critic_reads="answer",
        turn_schedule=[[2], [1]],
    )
    quiet_trainer(callbacks=[watch]).fit(algorithm, rollouts(Discussion(by_turn=True), iterations=2))
    for moved, turn in zip(watch.moved(), (2, 1), strict=True):
        assert moved == {"policies.main", *(f"critic.models.{person}@{turn}" for person in PERSONS)}


@pytest.mark.long
def test_a_run_resumed_within_the_schedule_equals_an_uninterrupted_one(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    def run(trainer: Any, resumed: Path | None = None) -> MAPoRL:
        algorithm = MAPoRL(
            **policies_by_turn(model_folder), turn_schedule=[[1], [2], [3]], turn_iterations=1, beta1=0.2
        )
        data = rollouts(Discussion(by_turn=True), iterations=3, passes=2)
        trainer.fit(algorithm, data, ckpt_path=resumed)
        return algorithm

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(quiet_trainer(enable_checkpointing=True, callbacks=[saver]))
    for step in (2, 3):  # between two collections, and within the second
        again = run(quiet_trainer(), tmp_path / f"step={step}.ckpt")
        assert again.collections == 3
        for name, weight in whole.state_dict().items():
            assert torch.equal(weight, again.state_dict()[name]), name


# Seats.


@pytest.mark.parametrize("critic_reads", ["debate", "answer"])
@pytest.mark.long
def test_the_result_does_not_depend_on_accumulation(critic_reads: Any, model_folder: Path, quiet_trainer: Any) -> None:
    found = []
    for pieces in (1, 4):
        watch = Weights()
        critics = {person: Policy(str(model_folder), 1e-3) for person in PERSONS}
        algorithm = MAPoRL(
            {"main": Policy(str(model_folder), 1e-3)},
            agent_critics=critics,
            critic_reads=critic_reads,
            turn_schedule=[[2, 3]],
        )
        algorithm.configure_model()
        for critic in critics.values():
            torch.nn.init.constant_(critic.value_head.linear.weight, 0.01)
        trainer = quiet_trainer(callbacks=[watch], accumulate_grad_batches=pieces)
        trainer.fit(algorithm, rollouts(Discussion(), iterations=1))
        found.append(watch.gradients)
    assert found[0].keys() == found[1].keys()
    assert {name.split(".")[0] for name in found[0]} == {"policies", "critic"}
    for name, gradient in found[0].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.norm() + 1), msg=name
        )


def test_a_frozen_partner_is_scored_but_not_trained(model_folder: Path, quiet_trainer: Any) -> None:
    watch = Weights()
    policies = {"ann": Policy(str(model_folder), 1e-3), "bob": Policy(str(model_folder), trained=False)}
    quiet_trainer(callbacks=[watch]).fit(MAPoRL(policies), rollouts(Discussion(labels=True), iterations=2))
    assert watch.moved() == [{"policies.ann"}] * 2


@pytest.mark.long
def test_two_different_models_learn_to_answer_together(model_folder: Path, quiet_trainer: Any) -> None:
    watch = Weights()
    policies = {"ann": Policy(learning_rate=6e-3), "bob": Policy(str(model_folder), learning_rate=1e-2)}
    algorithm = MAPoRL(policies, value_learning_rate=1e-2, alpha1=0.1, beta1=0.1)
    data = rollouts(Discussion(), group_size=6, iterations=5, passes=2, sampling=Sampling(max_tokens=3))
    quiet_trainer(callbacks=[watch], gradient_clip_val=1.0).fit(algorithm, data)
    first, last = watch.steps[0], watch.steps[-1]
    for name in policies:
        assert first[f"train/{name}/ratio_deviation"] < 1e-4
    assert first["train/influence/turn_1"] < 0.15
    assert last["train/influence/turn_1"] > 0.25
    assert {"train/ties", "train/incentive_beta1", "train/trained/turn_3"} <= set(last)


@pytest.mark.parametrize("policies_by", ["agent", "turn"])
@pytest.mark.long_after(1)
def test_a_team_with_a_leader_is_trained_on_its_labels(policies_by: Any, quiet_trainer: Any) -> None:
    watch = Weights()
    environment = CollaborativeReasoningEnvironment(role="leader", policies_by=policies_by)
    critics = {agent: Policy(learning_rate=1e-3) for agent in environment.agents}
    algorithm = MAPoRL({"main": Policy(learning_rate=1e-3)}, agent_critics=critics, critic_reads="answer")
    reads: dict[str, str] = {}
    prepare = algorithm.prepare

    def watched(*arguments: Any) -> Any:
        rows = prepare(*arguments)
        for agent in environment.agents:
            trained = rows[f"{agent}/critic"]
            first = trained.token_ids[0][: int(trained.action_mask[0].int().argmax())]
            reads[agent] = algorithm.policy("main").tokenizer.decode(first)
        return rows

    algorithm.prepare = watched  # type: ignore[method-assign]
    trainer = quiet_trainer(callbacks=[watch])
    trainer.fit(algorithm, rollouts(environment, groups=2, iterations=1, sampling=Sampling(max_tokens=16)))
    played = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    tables = [scores_of(episode) for episode in played]
    assert all(list(turn) == ["solver_1", "solver_2", "leader"] for table in tables for turn in table)
    labels = [score for table in tables for turn in table for score in turn.values()]
    assert set(labels) == {0.0, 1.0}
    last = [score for table in tables for score in table[1].values()]
    assert watch.steps[0]["train/influence/turn_2"] == pytest.approx(sum(last) / len(last))
    assert len(set(reads.values())) == 1, "all of them, the leader too, read the question alone"


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": -0.3}, r"gamma is -0\.3; it must be from 0 to 1"),
        ({"reward": "none"}, "reward is 'none'; choose from team, own"),
        ({"horizon": "all"}, "horizon is 'all'"),
        ({"alpha0": float("nan")}, "alpha0 is nan"),
        ({"critic_reads": "question"}, "critic_reads is 'question'; choose from debate, answer"),
        ({"critic_reads": "answer"}, "there are no agent_critics"),
        ({"turn_schedule": []}, "turn_schedule is empty"),
        ({"turn_schedule": [[1], []]}, r"turn_schedule has the entry \[\]"),
        ({"turn_schedule": [[0]]}, r"turn_schedule has the entry \[0\]"),
        ({"turn_schedule": [[1, 1]]}, r"turn_schedule has the entry \[1, 1\]"),
        ({"turn_iterations": 0}, "turn_iterations is 0"),
        ({"lam": 1.5}, r"lam is 1\.5"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MAPoRL({"main": Policy(str(model_folder))}, **options)


def test_a_schedule_must_fit_the_agents(model_folder: Path) -> None:
    algorithm = MAPoRL({"main": Policy(str(model_folder))}, turn_schedule=[[1], [4]])
    with pytest.raises(ConfigurationError, match="turn_schedule names turn 4, but the agents act in 3 turns"):
        algorithm.check_agents(BY_TURN)
    algorithm.check_agents(PERSONS)  # how often they act is for the environment to say


def test_critics_must_fit_the_agents(model_folder: Path) -> None:
    algorithm = MAPoRL({"main": Policy(str(model_folder))}, agent_critics={PERSONS[0]: Policy(str(model_folder))})
    with pytest.raises(ConfigurationError, match=f"agent_critics: '{PERSONS[1]}' has no critic"):
        algorithm.check_agents(PERSONS)
