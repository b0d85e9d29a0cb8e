"""reasoning-gym's generators: the library's own questions and scores."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from mrlm_environments import ReasoningGymEnvironment
from mrlm_environments.adapters.reasoning_gym import EVALUATING

from mrlm_pl.environment import Message
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError

EASY = {"max_terms": 2, "max_digits": 1}


@pytest.mark.parametrize("name", ["chain_sum", "gcd", "gsm_symbolic", "letter_jumble"])
def test_real_generators_keep_the_contract(name: str) -> None:
    check_environment(ReasoningGymEnvironment({name: {}}), tasks_per_split=4).raise_on_failure()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<answer>{answer}</answer>", 1.0),
        ("First <answer>no</answer>, rather <answer> {answer} </answer>.", 1.0),
        ("{answer}", 0.0),
        ("<answer>999</answer>", 0.0),
        ("<answer>it is {answer}</answer>", None),
    ],
)
def test_the_reward_is_the_librarys_score(reply: str, expected: float | None) -> None:
    environment = ReasoningGymEnvironment({"chain_sum": EASY})
    task = environment.tasks("test")[2]
    entry = reasoning_gym.create_dataset("chain_sum", seed=0, **EASY)[task.data["index"]]
    assert (entry["question"], entry["answer"]) == (task.data["question"], task.data["answer"])
    if expected is None:  # documented by the library: a right answer in a longer text earns its fraction of it
        expected = len(entry["answer"]) / len(f"it is {entry['answer']}")
    assert environment.reset(task)["agent"][-1].content == entry["question"]
    step = environment.step({"agent": Message("assistant", reply.format(answer=entry["answer"]))})
    assert step.rewards == {"agent": pytest.approx(expected)}
    assert step.components == {"agent": {"score": pytest.approx(expected)}}
    assert step.success == (expected == 1.0)


def test_a_reply_without_a_tag_earns_nothing() -> None:
    environment = ReasoningGymEnvironment({"fraction_simplification": None})  # 0.01 for any text
    task = environment.tasks("train")[0]
    environment.reset(task)
    assert environment.step({"agent": Message("assistant", task.data["answer"])}).rewards == {"agent": 0.0}


def test_without_a_tag_the_whole_reply_is_scored() -> None:
    environment = ReasoningGymEnvironment({"chain_sum": EASY}, tag="", system_prompt="", success_at=0.3)
    task = environment.tasks("train")[0]
    (posed,) = environment.reset(task)["agent"]
    assert posed == Message("user", task.data["question"])
    answer = task.data["answer"]
    step = environment.step({"agent": Message("assistant", f" {answer}\n")})
    assert (step.rewards["agent"], step.success) == (1.0, True)


def test_tasks_follow_settings_and_weights_and_splits_are_disjoint() -> None:
    environment = ReasoningGymEnvironment({"chain_sum": EASY, "gcd": None}, weights={"chain_sum": 3})
    tasks = {split: [environment.tasks(split)[n].data for n in range(60)] for split in ("train", "validation", "test")}
    sums = [data["question"] for data in tasks["train"] if data["generator"] == "chain_sum"]
    assert 33 <= len(sums) <= 57  # 45 of 60 expected, standard deviation 3.4
    assert all(re.search(r": \d [+-] \d =$", question) for question in sums)
    posed = {split: {data["question"] for data in found} for split, found in tasks.items()}
    assert not posed["train"] & posed["test"]
    assert not posed["train"] & posed["validation"]
    assert not posed["validation"] & posed["test"]
    again = ReasoningGymEnvironment({"chain_sum": EASY, "gcd": {}}, weights={"chain_sum": 3})
    assert [again.tasks("train")[n].data for n in range(5)] == tasks["train"][:5]


@pytest.mark.parametrize(
    ("given", "shown"), [("simple", reasoning_gym.utils.SYSTEM_PROMPTS["simple"]), ("Be brief.", "Be brief.")]
)
def test_the_system_prompt_is_one_of_the_library_or_a_text(given: str, shown: str) -> None:
    environment = ReasoningGymEnvironment({"gcd": {}}, system_prompt=given)
    assert environment.reset(environment.tasks("train")[0])["agent"][0] == Message("system", shown)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"generators": {"chain_sums": {}}}, "no generator 'chain_sums'; did you mean 'chain_sum'"),
        ({"generators": {"chain_sum": {"terms": 3}}}, "its settings are min_terms, max_terms, min_digits"),
        ({"generators": {"chain_sum": {"min_terms": 0}}}, "min_terms must be positive"),
        ({"generators": {"chain_sum": {"seed": 3}}}, "its settings are min_terms"),
        ({"generators": {}}, "name at least one generator"),
        ({"generators": {"gcd": {}}, "weights": {"lcm": 1}}, "weights of these only"),
        ({"generators": {"gcd": {}}, "weights": {"gcd": 0}}, "weights['gcd'] is 0"),
        ({"generators": {"gcd": {}}, "success_at": 2}, "success_at is 2"),
        ({"generators": {"gcd": {}, "countdown": {}}}, "the scorers of countdown run replies as Python"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        ReasoningGymEnvironment(**arguments)
    assert told in str(error.value)


def test_an_error_of_a_scorer_is_counted_as_a_wrong_answer() -> None:
    environment = ReasoningGymEnvironment({"prime_factorization": {}})
    task = environment.tasks("train")[0]
    for text, failed in (("seven", 1.0), (task.data["answer"], 0.0)):  # it reads each factor as an integer
        environment.reset(task)
        step = environment.step({"agent": Message("assistant", f"<answer>{text}</answer>")})
        assert (step.rewards["agent"], step.metrics["scorer_errors"]) == (1.0 - failed, failed)


@pytest.mark.parametrize("said", ["nan", "NaN + nani", "{answer}"])
def test_an_answer_that_is_no_number_earns_nothing(said: str) -> None:
    environment = ReasoningGymEnvironment({"complex_arithmetic": {}})
    task = environment.tasks("train")[0]
    environment.reset(task)
    reply = said.format(answer=task.data["answer"])
    step = environment.step({"agent": Message("assistant", f"<answer>{reply}</answer>")})
    assert step.rewards["agent"] == (0.0 if "n" in said[:1].lower() else 1.0)


def test_no_score_is_above_1() -> None:
    environment = ReasoningGymEnvironment({"spell_backward": {}})
    for number in range(20):
        task = environment.tasks("train")[number]
        environment.reset(task)
        doubled = f"<answer>{task.data['answer']} {task.data['answer']}</answer>"
        assert environment.step({"agent": Message("assistant", doubled)}).rewards["agent"] <= 1.0


def test_generators_that_evaluate_replies_need_permission(tmp_path: Path) -> None:
    for name in EVALUATING:
        with pytest.raises(ConfigurationError, match=f"the scorers of {name} run replies"):
            ReasoningGymEnvironment({name: {}})
    allowed = ReasoningGymEnvironment({"binary_matrix": {}}, evaluate_replies=True)
    allowed.reset(allowed.tasks("train")[0])
    step = allowed.step({"agent": Message("assistant", f"<answer>open({str(tmp_path / 'mark')!r}, 'w')</answer>")})
    assert step.rewards["agent"] == 0
    assert (tmp_path / "mark").exists(), "the library's scorer ran the reply"


def test_all_generators_that_evaluate_replies_are_known() -> None:
    found = {
        name
        for name, (generator, _) in reasoning_gym.factory.DATASETS.items()
        if re.search(r"\b(eval|exec|sympify|parse_expr)\((?!entry)", inspect.getsource(generator.score_answer))
    }
    assert found - {"propositional_logic"} == set(EVALUATING), "propositional_logic has its own parser"


def test_a_task_of_other_settings_is_refused() -> None:
    task = ReasoningGymEnvironment({"chain_sum": EASY}).tasks("train")[0]
    with pytest.raises(EnvironmentContractError, match="its settings or its version have changed"):
        ReasoningGymEnvironment({"chain_sum": {"min_digits": 4}}).reset(task)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'mrlm\[reasoning_gym\]'"):
        ReasoningGymEnvironment({"gcd": {}})
