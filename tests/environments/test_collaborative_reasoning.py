from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment
from mrlm_environments.collaborative_reasoning.masks import AnswerMasks
from mrlm_environments.math.environment import MathEnvironment

from mrlm_pl.environment import Message, Observations, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.episode import base_agent
from mrlm_pl.errors import ConfigurationError, DataError, EnvironmentContractError
from mrlm_pl.reward_models.scorer import TextScore, TextScorer
from tests.support.environments.data_sets import files_of, rows_of

TASK = Task(
    "collaborative_reasoning", "train", 0, 0, {"format": "math", "question": "2+3?", "answer": "5", "solution": "5"}
)


def environment(**options: Any) -> CollaborativeReasoningEnvironment:
    return CollaborativeReasoningEnvironment(**options)


def play(
    played: CollaborativeReasoningEnvironment, said: Mapping[str, Sequence[str]], task: Task = TASK
) -> tuple[list[Observations], list[Step]]:
    """Return observations and steps of an episode in which each person says one text after another."""
    texts = {person: iter(turns) for person, turns in said.items()}
    observed = [played.reset(task)]
    steps: list[Step] = []
    while not steps or not steps[-1].done:
        actions = {agent: Message("assistant", next(texts[base_agent(agent)])) for agent in observed[-1]}
        steps.append(played.step(actions))
        observed.append(steps[-1].observations)
    return observed[:-1], steps


def text(observations: Observations, agent: str) -> str:
    return observations[agent][-1].content


def test_the_first_turn_is_the_question_alone_and_the_second_shows_the_others_answers() -> None:
    observed, steps = play(environment(solvers=3), {f"solver_{n}": (f"it is {n}", str(n)) for n in (1, 2, 3)})
    assert [list(seen) for seen in observed] == [["solver_1", "solver_2", "solver_3"]] * 2
    assert all(seen == (Message("user", "2+3?"),) for seen in observed[0].values())
    assert text(observed[1], "solver_2") == "solver_1: it is 1\n\nsolver_3: it is 3\n\n2+3?"
    assert (steps[-1].stop_reason, steps[-1].success) == ("turns", False)


def test_every_answer_is_paid_in_its_turn() -> None:
    _, steps = play(environment(), {"solver_1": ("5", "4"), "solver_2": ("3", "5.0")})
    assert [step.components for step in steps] == [
        {"solver_1": {"score": 1.0}, "solver_2": {"score": 0.0}},
        {"solver_1": {"score": 0.0}, "solver_2": {"score": 1.0}},
    ]
    assert steps[0].rewards == {"solver_1": 1.0, "solver_2": 0.0}


def test_scores_are_shown_in_words_only_when_asked_for() -> None:
    said = {"solver_1": ("4", "4"), "solver_2": ("5", "5")}
    shown, _ = play(environment(show_scores=True), said)
    assert text(shown[1], "solver_1") == "solver_2 (excellent): 5\n\n2+3?"
    assert text(shown[1], "solver_2") == "solver_1 (poor): 4\n\n2+3?"
    plain, _ = play(environment(), said)
    assert text(plain[1], "solver_1") == "solver_2: 5\n\n2+3?"


@pytest.mark.parametrize("role", [None, "leader", "summarizer"])
def test_feedback_never_tells_the_expected_answer(role: Any) -> None:
    task = Task(TASK.environment, "train", 0, 0, {**TASK.data, "question": "Q?", "answer": "98765"})
    said = dict.fromkeys(("solver_1", "solver_2", "leader", "summarizer"), ("no", "12", "no"))
    observed, _ = play(environment(max_turns=3, role=role, masks=AnswerMasks(penalty=1.0)), said, task)
    assert "98765" not in json.dumps([[text(seen, agent) for agent in seen] for seen in observed])


@pytest.mark.parametrize(
    ("answers", "right"),
    [(("5", "5", "4"), True), (("none", "", "5"), True), (("4", "4", "5"), False), (("none", "", "none"), False)],
)
def test_the_majority_of_the_last_turn_decides(answers: tuple[str, ...], right: bool) -> None:
    said = {f"solver_{n}": ("1", answer) for n, answer in enumerate(answers, start=1)}
    _, steps = play(environment(solvers=3), said)
    assert steps[-1].success is right
    assert steps[-1].metrics["majority_accuracy"] == float(right)


def test_of_equally_many_votes_the_first_solvers_counts() -> None:
    assert play(environment(max_turns=1), {"solver_1": ["5"], "solver_2": ["4"]})[1][-1].success
    assert not play(environment(max_turns=1), {"solver_1": ["4"], "solver_2": ["5"]})[1][-1].success


@pytest.mark.parametrize(
    ("answer", "fault"), [("5", "too_short"), ("so a a a a a is 5", "looping"), ("I do not know", "unanswered")]
)
def test_masked_answers_have_score_0_pay_the_penalty_and_do_not_vote(answer: str, fault: str) -> None:
    masks = AnswerMasks(penalty=0.5, min_characters=3, loop_ngram=2)
    observed, steps = play(
        environment(solvers=3, masks=masks),
        {"solver_1": (answer, answer), "solver_2": (answer, answer), "solver_3": ("It is 5", "It is 4")},
    )
    assert steps[0].components["solver_1"] == {"score": 0.0, "penalty": -0.5}
    assert steps[0].rewards == {"solver_1": -0.5, "solver_2": -0.5, "solver_3": 1.0}
    assert f"solver_1: {answer}" in text(observed[1], "solver_3")
    assert steps[-1].success is False, "4 is the one answer that counts"
    assert {name: steps[-1].metrics[name] for name in ("too_short", "looping", "unanswered")} == {
        "too_short": 0.0,
        "looping": 0.0,
        "unanswered": 0.0,
        fault: 4.0,
    }
    assert (
        "penalty" not in play(environment(), {"solver_1": ("", ""), "solver_2": ("", "")})[1][0].components["solver_1"]
    )


def test_consensus_ends_the_episode_early_and_the_last_answers_stand() -> None:
    said = {"solver_1": ("4", "5", "1"), "solver_2": ("5", "5.0", "1")}
    _, steps = play(environment(max_turns=3, consensus_stop=True), said)
    assert (len(steps), steps[-1].stop_reason, steps[-1].success) == (2, "consensus", True)
    assert [step.rewards for step in steps] == [{"solver_1": 0.0, "solver_2": 1.0}, {"solver_1": 2.0, "solver_2": 2.0}]
    assert steps[-1].components["solver_1"] == {"score": 1.0, "consensus": 1.0}, "two turns with one answer"
    metrics = steps[-1].metrics
    assert [metrics[f"turn_{turn}_accuracy"] for turn in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert "turn_3_improved" not in metrics
    assert (metrics["turns"], metrics["answers"], metrics["consensus"]) == (2.0, 4.0, 1.0)
    _, steps = play(environment(max_turns=3), said)
    assert (len(steps), steps[-1].stop_reason) == (3, "turns")


def test_nobody_who_is_masked_agrees() -> None:
    said = {"solver_1": ("", "5"), "solver_2": ("", "none")}
    _, steps = play(environment(consensus_stop=True), said)
    assert (len(steps), steps[-1].stop_reason, steps[-1].metrics["consensus"]) == (2, "turns", 0.0)


def test_improvements_and_declines_are_counted_among_those_that_could() -> None:
    said = {"solver_1": ("4", "5", "5"), "solver_2": ("5", "4", "5"), "solver_3": ("4", "4", "4")}
    _, steps = play(environment(solvers=3, max_turns=3), said)
    names = [f"{kind}{of}" for kind in ("improved", "declined") for of in ("", "_of")]
    found = steps[-1].metrics
    assert [found[f"turn_2_{name}"] for name in names] == [1, 2, 1, 1]
    assert [found[f"turn_3_{name}"] for name in names] == [1, 2, 0, 1]
    assert [found[name] for name in names] == [2, 4, 1, 2]
    assert [found[f"solver_{n}_turn_2_accuracy"] for n in (1, 2, 3)] == [1, 0, 0]
    assert [found[f"turn_{turn}_majority_accuracy"] for turn in (1, 2, 3)] == [0, 0, 1]


def test_a_leader_answers_last_and_its_answer_is_the_teams() -> None:
    said = {"solver_1": ("5", "5"), "solver_2": ("5", "5"), "leader": ("I say 5", "I say 4")}
    observed, steps = play(environment(role="leader"), said)
    assert [list(seen) for seen in observed] == [["solver_1", "solver_2"], ["leader"]] * 2
    assert text(observed[1], "leader").endswith("solver_1: 5\n\nsolver_2: 5\n\n2+3?")
    assert text(observed[2], "solver_1") == "solver_2: 5\n\nleader: I say 5\n\n2+3?"
    assert [step.components.get("leader") for step in steps] == [None, {"score": 1.0}, None, {"score": 0.0}]
    assert steps[-1].success is False
    assert steps[-1].metrics["majority_accuracy"] == 1.0
    assert [steps[-1].metrics[f"leader_turn_{turn}_accuracy"] for turn in (1, 2)] == [1.0, 0.0]
    said["leader"] = ("who knows", "who knows")
    assert play(environment(role="leader"), said)[1][-1].success, "it gives no answer: the majority's counts"


@pytest.mark.parametrize("policies_by", ["agent", "turn"])
def test_a_student_answers_once_beside_the_team(policies_by: str) -> None:
    said = {"solver_1": ("4", "4"), "solver_2": ("3", "3"), "student": ["5"]}
    observed, steps = play(environment(role="student", policies_by=policies_by), said)
    assert [[base_agent(agent) for agent in seen] for seen in observed] == [
        ["solver_1", "solver_2", "student"],
        ["solver_1", "solver_2"],
    ]
    first = {base_agent(agent): seen[-1].content for agent, seen in observed[0].items()}
    assert first["student"] == "2+3?"
    assert "5" not in "".join(seen[-1].content for seen in observed[1].values()).replace("2+3?", "")
    assert {base_agent(agent): reward for agent, reward in steps[0].rewards.items()} == {
        "solver_1": 0.0,
        "solver_2": 0.0,
        "student": 1.0,
    }
    assert steps[0].metrics["student_accuracy"] == 1.0
    assert not steps[1].success, "the student has no vote"


def test_a_leader_speaks_before_a_consensus_ends_the_episode() -> None:
    said = {"solver_1": ["5"], "solver_2": ["5"], "leader": ["4"]}
    _, steps = play(environment(role="leader", consensus_stop=True), said)
    assert ([step.done for step in steps], steps[-1].stop_reason) == ([False, True], "consensus")
    assert steps[1].rewards == {"solver_1": 1.0, "solver_2": 1.0, "leader": 0.0}, "of the turn that is left"
    assert not steps[-1].success


def test_a_summary_is_shown_in_place_of_the_answers_and_paid_by_what_comes_of_it() -> None:
    said = {"solver_1": ("4", "5"), "solver_2": ("3", "4"), "summarizer": ["They say 3 and 4"]}
    observed, steps = play(environment(role="summarizer"), said)
    assert [list(seen) for seen in observed] == [["solver_1", "solver_2"], ["summarizer"], ["solver_1", "solver_2"]]
    assert "solver_1: 4" in text(observed[1], "summarizer")
    assert text(observed[2], "solver_1") == "summarizer: They say 3 and 4\n\n2+3?"
    assert steps[1].components == {"summarizer": {}}
    assert steps[2].components["summarizer"] == {"summary": 0.5}
    masks = AnswerMasks(penalty=0.25, min_characters=4)
    said = {"solver_1": ("it is 4", "it is 5"), "solver_2": ("it is 3", "it is 4"), "summarizer": ["?"]}
    _, steps = play(environment(role="summarizer", masks=masks), said)
    assert steps[1].components == {"summarizer": {"penalty": -0.25}}
    assert steps[2].components["summarizer"] == {"summary": 0.0}


def test_an_agent_of_its_own_for_every_turn_reads_the_same() -> None:
    said = {person: (f"{person} 4", f"{person} 5") for person in ("solver_1", "solver_2", "summarizer")}
    for role in (None, "summarizer"):
        by_agent, first = play(environment(role=role), said)
        by_turn, second = play(environment(role=role, policies_by="turn"), said)
        assert [step.metrics for step in first] == [step.metrics for step in second]
        assert list(by_turn[-1]) == ["solver_1@2", "solver_2@2"]
        assert [message.content for message in by_turn[-1]["solver_1@2"]] == [
            text(by_agent[0], "solver_1"),
            "solver_1 4",
            text(by_agent[-1], "solver_1"),
        ]
        assert [message.role for message in by_turn[-1]["solver_1@2"]] == ["user", "assistant", "user"]
        assert second[-1].components == {
            "solver_1@2": {"score": 1.0},
            "solver_2@2": {"score": 1.0},
            **({"summarizer@1": {"summary": 1.0}} if role else {}),
        }
    agents = environment(role="leader", policies_by="turn").agents
    assert agents == tuple(f"{person}@{turn}" for turn in (1, 2) for person in ("solver_1", "solver_2", "leader"))


class Lengths(TextScorer):
    """A tenth of the reply's length; keeps the conversations."""

    def __init__(self, probability: bool = True, scale: float = 0.1) -> None:
        self.is_probability, self.scale = probability, scale
        self.asked: list[list[tuple[str, ...]]] = []

    @property
    def probability(self) -> bool:
        return self.is_probability

    def score(self, messages: Sequence[Message]) -> TextScore:
        return TextScore(self.scale * len(messages[-1].content), truncated=len(messages[-1].content) == 2)

    def score_batch(self, conversations: Sequence[Sequence[Message]]) -> list[TextScore]:
        self.asked.append([tuple(message.content for message in messages) for messages in conversations])
        return super().score_batch(conversations)


def test_a_model_scores_all_unmasked_answers_of_a_turn_at_once() -> None:
    scorer = Lengths()
    _, steps = play(
        environment(solvers=3, scorer=scorer, instruction="Be brief."),
        {"solver_1": ("44", "5"), "solver_2": ("none", "none"), "solver_3": ("5", "555")},
    )
    question = "2+3?\nBe brief."
    assert scorer.asked == [[(question, "44"), (question, "5")], [(question, "5"), (question, "555")]]
    assert [step.rewards for step in steps] == [
        pytest.approx({"solver_1": 0.2, "solver_2": 0.0, "solver_3": 0.1}),
        pytest.approx({"solver_1": 0.1, "solver_2": 0.0, "solver_3": 0.3}),
    ]
    assert steps[-1].metrics["turn_2_score"] == pytest.approx(0.4 / 3)
    assert steps[-1].metrics["verifier_score"] == pytest.approx(0.4 / 3), "that of the last turn"
    assert "verifier_score" not in steps[0].metrics
    assert steps[-1].metrics["truncated_scores"] == 1.0
    assert steps[-1].metrics["turn_2_accuracy"] == pytest.approx(1 / 3), "accuracy is by the label"
    assert environment(scorer=scorer).gold(TASK) is None


def test_a_truncated_score_of_the_student_counts_in_its_step() -> None:
    said = {"solver_1": ["5"], "solver_2": ["5"], "student": ["44"]}
    _, steps = play(environment(role="student", scorer=Lengths(), max_turns=1), said)
    assert steps[-1].metrics["truncated_scores"] == 1.0


def test_values_of_a_model_that_are_no_probabilities_go_through_the_sigmoid() -> None:
    scorer = Lengths(probability=False, scale=2.0)
    _, steps = play(environment(scorer=scorer, max_turns=1), {"solver_1": ["5"], "solver_2": ["55"]})
    assert steps[0].rewards == pytest.approx({"solver_1": 0.880797, "solver_2": 0.982014}, abs=1e-6)


@pytest.mark.parametrize(
    ("probability", "scale"), [(True, 2.0), (True, -0.1), (True, float("nan")), (False, float("nan")), (False, 1e999)]
)
def test_what_is_no_score_is_an_error_that_names_the_scorer(probability: bool, scale: float) -> None:
    with pytest.raises(EnvironmentContractError, match="scorer Lengths"):
        play(environment(scorer=Lengths(probability, scale)), {"solver_1": ["5"], "solver_2": ["5"]})


def test_a_scorer_that_loses_an_answer_is_refused() -> None:
    class Forgetful(Lengths):
        def score_batch(self, conversations: Sequence[Sequence[Message]]) -> list[TextScore]:
            return super().score_batch(conversations)[1:]

    with pytest.raises(EnvironmentContractError, match="Forgetful gave 1 scores for 2 answers"):
        play(environment(scorer=Forgetful()), {"solver_1": ["5"], "solver_2": ["5"]})


@pytest.mark.long
def test_generated_problems_are_those_of_the_math_environment() -> None:
    for split in ("train", "test"):
        ours = [environment().tasks(split)[index].data for index in range(40)]
        assert all(split_of(data["key"]) == split for data in ours)
        theirs = {MathEnvironment(difficulty=(1, 1)).tasks(split)[index].data["question"] for index in range(1500)}
        assert sum(data["question"] in theirs for data in ours) > 10


@pytest.mark.parametrize(
    "options",
    [
        {"solvers": 1, "max_turns": 1},
        {"consensus_stop": True, "show_scores": True, "solvers": 3, "max_turns": 4},
        {"format": "nli"},
        {"role": "leader", "policies_by": "turn"},
        {"role": "summarizer", "format": "nli"},
        {"role": "summarizer", "policies_by": "turn"},
    ],
    ids=str,
)
@pytest.mark.long_after(1)
def test_the_contract_is_kept(options: dict[str, Any]) -> None:
    masks = AnswerMasks(penalty=0.25, min_characters=1)
    check_environment(environment(masks=masks, **options), tasks_per_split=2).raise_on_failure()


def test_copies_share_the_scorer_and_forks_go_on_by_themselves() -> None:
    played = environment(scorer=Lengths())
    played.reset(TASK)
    played.step({"solver_1": Message("assistant", "4"), "solver_2": Message("assistant", "5")})
    fork = copy.deepcopy(played)
    assert fork.scorer is played.scorer, "a model is in memory once, however many episodes are played"
    actions = {name: Message("assistant", "5") for name in ("solver_1", "solver_2")}
    assert played.step(actions) == fork.step(actions)
    again = pickle.loads(pickle.dumps(environment(solvers=3)))
    assert again.agents == ("solver_1", "solver_2", "solver_3")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"solvers": 0}, "solvers is 0"),
        ({"max_turns": 0}, "max_turns is 0"),
        ({"role": "king"}, "'king'"),
        ({"role": "summarizer", "max_turns": 1}, "max_turns is 1"),
        ({"solvers": 1, "consensus_stop": True}, "consensus_stop"),
        ({"policies_by": "day"}, "'day'"),
        ({"scorer": "luck"}, "'luck'"),
        ({"format": "poetry"}, "'poetry'"),
        ({"difficulty": (0, 1)}, "difficulty"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        environment(**options)


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("form", "row"),
    [
        (None, {"uid": "1", "context": "P.", "hypothesis": "H.", "label": "c", "reason": "", "genre": "wiki"}),
        ("nli", {"context": "P.", "hypothesis": "H.", "label": "c"}),
        (None, {"sentence1": "P.", "sentence2": "H.", "gold_label": "contradiction", "pairID": "1"}),
        (None, {"premise": "P.", "hypothesis": "H.", "label": 2, "reason": ""}),
    ],
)
def test_inferences_are_read_as_they_are_published(form: Any, row: Mapping[str, Any], tmp_path: Path) -> None:
    played = environment(data={"test": write(tmp_path / "rows.jsonl", [row])}, format=form)
    (task,) = played.tasks("test")
    assert task.data["question"].startswith("Premise: P.\nHypothesis: H.\n")
    assert task.data["answer"] == "contradiction"


def test_the_format_of_rows_is_told_by_their_fields(tmp_path: Path) -> None:
    math = [{"question": f"Q{n}?", "answer": f"Because.\n#### {n}"} for n in range(50)]
    labels = ("entailment", 1, "2", " Contradiction ", -1)
    nli = [{"premise": f"P{n // 2}.", "hypothesis": f"H{n}.", "label": labels[n % 5]} for n in range(100)]
    played = environment(data=write(tmp_path / "rows.jsonl", [*math, *nli]))
    found = [task.data for split in ("train", "validation", "test") for task in played.tasks(split)]
    assert len(found) == 50 + 80, "rows without a label are left out"
    assert {data["answer"] for data in found if data["format"] == "nli"} == {"entailment", "neutral", "contradiction"}
    by_hypothesis = {data["question"].split("\n")[1]: data["answer"] for data in found if data["format"] == "nli"}
    assert [by_hypothesis[f"Hypothesis: H{n}."] for n in range(4)] == [
        "entailment",
        "neutral",
        "contradiction",
        "contradiction",
    ]
    for split in ("train", "validation", "test"):
        assert all(split_of(task.data["key"]) == split for task in played.tasks(split))
    check_environment(played, tasks_per_split=4).raise_on_failure()


@pytest.mark.parametrize(
    ("row", "options", "fault"),
    [
        ({"question": "Q?"}, {}, r"row 1: its fields \['question'\] are those of no known format"),
        ({"question": "Q?"}, {"format": "math"}, "no field 'answer'"),
        ({"question": "Q?", "answer": "five"}, {}, "must be a number or end in '#### N'"),
        ({"premise": "P", "hypothesis": "H", "label": "maybe"}, {}, "label 'maybe'"),
        ({"premise": "P", "hypothesis": "H", "label": 3}, {}, "label 3"),
        ({"premise": "P", "hypothesis": "H", "label": 1, "question": "Q", "answer": "#### 1"}, {}, "both formats"),
    ],
)
def test_faults_of_rows_are_named(tmp_path: Path, row: dict[str, Any], options: Any, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        environment(data=write(tmp_path / "rows.jsonl", [row]), **options).tasks("train")


def test_majorities_of_single_replies() -> None:
    for played in (environment(solvers=1), MathEnvironment()):
        assert played.majority(TASK, ["4", "it is 5", "5"])
        assert played.majority(TASK, ["none", "", "5"])
        assert played.majority(TASK, ["4", "5"]) is False
    assert played.majority(TASK, []) is False


@pytest.mark.parametrize("path", files_of("gsm8k", "gsm8k_train.jsonl"))
def test_gsm8k_is_read_and_its_solutions_earn_the_maximum(path: Path) -> None:
    played = environment(data={"train": str(path)})
    source = played.tasks("train")
    rows = len(rows_of(path))
    assert source.size is not None
    assert 0.7 * rows < source.size < rows, "an eighth each is held out for validation and test"
    for index in range(0, source.size, 1 + rows // 400):
        task = source[index]
        _, steps = play(played, {person: [task.data["solution"]] * 2 for person in ("solver_1", "solver_2")}, task)
        assert [step.rewards for step in steps] == [{"solver_1": 1.0, "solver_2": 1.0}] * 2, task.data
        assert steps[-1].success


def test_the_scorer_and_the_masks_are_built_from_the_block_of_the_document() -> None:
    import yaml

    from mrlm_pl.cli.parsing.parser import CommandParser
    from mrlm_pl.environment import Environment
    from mrlm_pl.reward_models import RewardModel
    from mrlm_pl.runs.plugins import import_environment

    document = (Path(__file__).parents[2] / "docs/environments/collaborative_reasoning.md").read_text()
    block = yaml.safe_load(document.partition("```yaml\n")[2].partition("```")[0])
    import_environment("CollaborativeReasoningEnvironment")
    parser = CommandParser(prog="test", allow_abbrev=False)
    parser.add_subclass_arguments(Environment, "environment", required=True)
    built = parser.instantiate(parser.parse_args(["--environment", json.dumps(block["environment"])])).environment
    assert isinstance(built.scorer, RewardModel)
    assert built.scorer.model == "path/or/hub-id"
    assert built.masks == AnswerMasks(penalty=0.5, min_characters=20)
    assert (len(built.agents), built.max_turns) == (3, 3)
