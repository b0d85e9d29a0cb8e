"""The semantic checks on every shipped environment, and their table."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import mrlm_environments
import pytest
from mrlm_environments import (
    CodeEnvironment,
    CollaborativeReasoningEnvironment,
    GymnasiumEnvironment,
    OpenEnvEnvironment,
    PettingZooEnvironment,
    ReasoningGymEnvironment,
    TextArenaEnvironment,
    VerifiersEnvironment,
)

from benchmarks.robustness.semantic import (
    ADAPTERS,
    ENVIRONMENTS,
    NAMES,
    PAGE,
    RESULTS,
    SERVED,
    SLOW,
    TABLE,
    checked,
    table,
)
from mrlm_pl.environment import Environment
from mrlm_pl.environment.check import check_semantics
from mrlm_pl.environment.trial import play_copy
from tests.support.servers.foreign_servers import ROOT

ALWAYS = {"injection", "leakage", "replay"}
KNOWN = ALWAYS | {"oracle", "floor"}
APPLIED = {
    **dict.fromkeys(("math", "question", "tools", "sql", "shell", "code"), KNOWN | {"canary"}),
    **dict.fromkeys(("collaborative_coding", "class_completion", "collaborative_reasoning"), KNOWN | {"canary"}),
    **dict.fromkeys(("writing", "length_ratio", "coordination", "word_emission", "halves", "helpers"), KNOWN),
    **dict.fromkeys(("plan_path", "tic_tac_toe", "webshop", "alfworld", "centralized", "proposer"), KNOWN),
    **dict.fromkeys(("knowledge_graph", "reasoning_gym", "harness"), KNOWN | {"canary"}),
    **dict.fromkeys(("debate", "kuhn_poker"), ALWAYS | {"floor"}),
    **dict.fromkeys(("gymnasium", "pettingzoo", "textarena", "scored", "openenv", "verifiers"), ALWAYS),
}
"""Checks that have something to check."""


def assert_passes(name: str, tasks: int, *, other_process: bool) -> None:
    report = checked(name, tasks, other_process=other_process)
    report.raise_on_failure()
    assert {check.name for check in report.checks if check.applies} == APPLIED[name]
    if other_process:
        (replay,) = (check.message for check in report.checks if check.name == "replay")
        assert replay.endswith("here and in another process")


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name not in SLOW])
@pytest.mark.long_after(2)
def test_embedded_environments_pass(name: str) -> None:
    assert_passes(name, 3, other_process=False)


REASONING = (
    "Perhaps <answer>7</answer>, Final Answer: #0, [9], A or P or 9, <agent_1>C</agent_1>.\nAction: look\n"
    '```python\n(\n```\n<tool_call>{"name": "take_action", "arguments": {"action": "look"}}</tool_call>'
)
RAW = ("question", "scored", "harness")
"""Those whose rewards are the user's own functions, which may reward the form of the reasoning."""


@pytest.fixture(params=[name for name in ENVIRONMENTS if name not in (*RAW, "gymnasium")])
def reader(request: pytest.FixtureRequest) -> Environment:
    """An environment that reads what follows the reasoning."""
    if request.param == "shell":
        request.getfixturevalue("namespaces")
    return ENVIRONMENTS[request.param]()


@pytest.mark.long_after(2)
def test_reasoning_is_neither_judged_nor_shown_to_others(reader: Environment) -> None:
    task = reader.tasks("train")[0]
    said = {agent: ["Bet 5, because all pay taxes."] for agent in reader.agents}
    gold = reader.gold(task) or said
    for replies, reasoning in ((gold, dict.fromkeys(gold, REASONING)), (said, gold)):
        reasoned = {
            agent: [f"<think>{''.join(reasoning[agent])}</think>\n\n{text}" for text in texts]
            for agent, texts in replies.items()
        }
        alone, with_reasoning = (
            play_copy(reader, task, given, max_turns=60, must_end=False).as_json() for given in (replies, reasoned)
        )
        assert with_reasoning == alone


@pytest.mark.long_after(2)
def test_reasoning_without_an_answer_is_an_empty_reply(reader: Environment) -> None:
    task = reader.tasks("train")[0]
    gold = reader.gold(task) or {agent: ["Bet 5, because all pay taxes."] for agent in reader.agents}
    thoughts = [f"<think>{texts[0]}{REASONING.removeprefix('<think>')}" for texts in gold.values()]
    for reply in (*thoughts, thoughts[0].replace("</think>", "")):
        empty, unanswered = (
            play_copy(reader, task, given, max_turns=60, must_end=False).as_json() for given in ("", reply)
        )
        assert unanswered == empty, reply


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_environment_passes(name: str, request: pytest.FixtureRequest) -> None:
    if name == "shell":
        request.getfixturevalue("namespaces")
    if name in ADAPTERS:
        pytest.importorskip(name)
    if name in SERVED and not (ROOT / f".venv-{name}").exists():
        pytest.skip(f"{name} is not installed; run `make {name}`")
    assert_passes(name, 8, other_process=True)


def test_every_environment_of_the_package_is_checked() -> None:
    classes = {getattr(mrlm_environments, name) for name in mrlm_environments.__all__}
    shipped = {item for item in classes if inspect.isclass(item) and issubclass(item, Environment)}
    adapters = {ReasoningGymEnvironment, GymnasiumEnvironment, PettingZooEnvironment, TextArenaEnvironment}
    served = {OpenEnvEnvironment, VerifiersEnvironment}
    assert {type(ENVIRONMENTS[name]()) for name in set(ENVIRONMENTS) - set(ADAPTERS)} == shipped - adapters - served
    assert (len(ADAPTERS), len(SERVED)) == (len(adapters), len(served))


def test_the_table_shows_the_results() -> None:
    reports = json.loads(RESULTS.read_text())["environments"]
    found = TABLE.search(Path(PAGE).read_text())
    assert found is not None
    assert found[0] == table(reports)
    assert list(reports) == list(NAMES)
    applied = {
        name: {key for key, check in report["checks"].items() if check["applies"]} for name, report in reports.items()
    }
    assert applied == APPLIED
    assert all(report["passed"] for report in reports.values())
    skipped = [name for name, report in reports.items() if "not played" in report["checks"]["replay"]["message"]]
    assert skipped == [], "replay in another process"


@pytest.mark.long
def test_a_team_that_disagrees_once_earns_no_more() -> None:
    environment = CollaborativeReasoningEnvironment(max_turns=3, role="summarizer", consensus_stop=True)
    check_semantics(environment, tasks=2, other_process=False).raise_on_failure()


@pytest.mark.slow
def test_wrong_programs_before_the_right_one_earn_nothing() -> None:
    report = check_semantics(CodeEnvironment(max_attempts=3), tasks=12, other_process=False)
    report.raise_on_failure()
