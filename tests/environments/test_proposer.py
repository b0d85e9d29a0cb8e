from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import Problem, ProposerEnvironment

from mrlm_pl.environment import Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError, EnvironmentContractError

EXAMPLE = "What is 1 + 1?"


def posed(reply: str, **options: Any) -> tuple[ProposerEnvironment, Step]:
    environment = ProposerEnvironment(**options)
    (asked,) = environment.reset(Task("proposer", "train", 0, 0, {"question": EXAMPLE}))["proposer"]
    assert asked.content == f"Write a new problem like this one.\n{EXAMPLE}"
    return environment, environment.step({"proposer": Message("assistant", reply)})


def solved(reply: str, *answers: str, **options: Any) -> Step:
    environment, _ = posed(reply, solvers=len(answers), **options)
    said = zip(environment.agents[1:], answers, strict=True)
    return environment.step({agent: Message("assistant", answer) for agent, answer in said})


def test_each_solver_reads_the_problem_alone() -> None:
    _, step = posed("My problem: (2+3)*4=21", solvers=2, instruction="Give a number.")
    asked = (Message("user", "What is (2 + 3) * 4?\nGive a number."),)
    assert step.observations == {"solver_1": asked, "solver_2": asked}
    assert not step.rewards


@pytest.mark.parametrize(
    ("reward", "answers", "expected"),
    [
        ("learnability", ("20", "1", "1", "1"), 0.75),
        ("learnability", ("20", "2*10=20", "x", "20"), 0.25),
        ("learnability", ("20", "20", "20", "20"), 0.0),
        ("learnability", ("1", "1", "1", "1"), 0.0),
        ("uncertainty", ("20", "1", "1", "1"), 0.5),
        ("uncertainty", ("20", "20", "1", "1"), 1.0),
        ("uncertainty", ("1", "1", "1", "1"), 0.0),
    ],
)
def test_the_proposer_earns_what_the_papers_give_for_the_rate_of_right_answers(
    reward: Any, answers: tuple[str, ...], expected: float
) -> None:
    step = solved("(2+3)*4", *answers, reward=reward)
    right = {f"solver_{number}": float("20" in answer) for number, answer in enumerate(answers, 1)}
    assert step.rewards == {"proposer": expected, **right}
    assert step.metrics == {"valid": 1.0, "solved": sum(right.values()), "solved_of": 4.0}


def test_without_a_known_answer_that_of_most_solvers_is_right() -> None:
    step = solved("How many days has a week?", "7", "It is 7.", "5", "many", problems="text", reward="uncertainty")
    assert step.rewards == {"proposer": 1.0, "solver_1": 1.0, "solver_2": 1.0, "solver_3": 0.0, "solver_4": 0.0}
    assert step.success is None
    assert not any(solved("Why?", "no", "none", problems="text").rewards.values())


def test_a_fraction_is_exact() -> None:
    step = solved("4/3+1", "7/3", "14/6", "2.33", "2.5")
    assert step.rewards == {"proposer": 0.5, "solver_1": 1.0, "solver_2": 1.0, "solver_3": 0.0, "solver_4": 0.0}


def test_the_example_is_repeated_whatever_spaces_surround_it() -> None:
    environment = ProposerEnvironment(problems="text")
    environment.reset(Task("proposer", "train", 0, 0, {"question": " How many?\n"}))
    assert environment.step({"proposer": Message("assistant", "How many?")}).stop_reason == "repeated"


@pytest.mark.parametrize(("answers", "success"), [(("20", "20", "1"), True), (("1", "1", "20"), False)])
def test_the_majority_decides_the_success(answers: tuple[str, ...], success: bool) -> None:
    assert solved("4 * 5", *answers).success is success


@pytest.mark.parametrize(
    ("reply", "problems", "reason"),
    [
        ("no problem", "expression", "invalid"),
        ("7", "expression", "invalid"),
        ("1/0", "expression", "invalid"),
        ("1+1=2", "expression", "repeated"),
        ("*".join(["9" * 50] * 18), "expression", "invalid"),
        ("   ", "text", "invalid"),
        (EXAMPLE, "text", "repeated"),
        ("x" * 1001, "text", "invalid"),
        ("x" * 1001 + "2+2", "expression", "invalid"),
    ],
)
def test_a_reply_without_a_new_problem_costs_the_proposer_alone(reply: str, problems: Any, reason: str) -> None:
    _, step = posed(reply, problems=problems)
    assert step.done
    assert (step.stop_reason, step.rewards, step.metrics) == (reason, {"proposer": -1.0}, {"valid": 0.0})


def test_own_problems_and_an_own_reward() -> None:
    def sum_of_digits(reply: str) -> Problem | None:
        return Problem(f"Sum of digits of {reply}?", str(sum(map(int, reply)))) if reply.isdigit() else None

    step = solved("123", "6", "5", problems=sum_of_digits, reward=lambda rate: 10 * rate)
    assert step.rewards == {"proposer": 5.0, "solver_1": 1.0, "solver_2": 0.0}
    assert posed("x", problems=sum_of_digits)[1].stop_reason == "invalid"
    with pytest.raises(EnvironmentContractError, match=r"<lambda> returned \('a', 'b'\); return None"):
        posed("x", problems=lambda _: ("a", "b"))
    with pytest.raises(EnvironmentContractError, match=r"answer='so'\); .* a number as text"):
        posed("x", problems=lambda _: Problem("How?", "so"))


@pytest.mark.parametrize("reward", [lambda rate, other: 1.0, lambda rate: None])
def test_a_reward_takes_a_rate_and_returns_a_number(reward: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"the reward <lambda> must take a rate .*test_proposer.py:\d+"):
        ProposerEnvironment(reward=reward)


@pytest.mark.parametrize("problems", ["expression", "text"])
def test_it_keeps_the_contract(problems: Any) -> None:
    check_environment(ProposerEnvironment(problems=problems)).raise_on_failure()


def test_examples_from_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "How many legs has a cat?", "answer": "4"}\n', encoding="utf-8")
    environment = ProposerEnvironment(data={"train": str(file)})
    assert environment.tasks("train")[0].data == {"question": "How many legs has a cat?"}
    file.write_text('{"question": 3}\n', encoding="utf-8")
    with pytest.raises(DataError, match="the question is 3; it must be a text"):
        ProposerEnvironment(data={"train": str(file)}).tasks("train")


@pytest.mark.parametrize(
    "options", [{"solvers": 0}, {"reward": "hardness"}, {"problems": "poem"}, {"difficulty": (0, 9)}]
)
def test_values_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        ProposerEnvironment(**options)
