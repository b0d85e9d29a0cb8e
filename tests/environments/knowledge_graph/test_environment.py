"""Episodes, scores and options; each defect of AgentBench's server as a test that this environment has not got it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.knowledge_graph.environment import (
    INSTRUCTION,
    NO_CALL,
    TOOLS,
    KnowledgeGraphEnvironment,
    f1_score,
)
from mrlm_environments.knowledge_graph.exploration import Exploration
from mrlm_environments.knowledge_graph.graph import TripleStore

from mrlm_pl.environment import Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tools import written_call
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError, DataError
from tests.support.environments.graph_rows import small_graph, written

FILMS = "Action: get_neighbors(Acme, film.studio.films)"


class Small(KnowledgeGraphEnvironment):
    """The environment over the small graph."""

    name = "small_knowledge_graph"

    def _graph_of(self, data: Any) -> TripleStore:
        return small_graph()


def posed(answer: list[str], **entities: str) -> Task:
    data = {"question": "Which?", "entities": {"Acme": "m.s1", **entities}, "answer": answer, "actions": []}
    return Task(Small.name, "train", 0, 0, data)


def played(task: Task, *replies: str | Message, **options: Any) -> list[Step]:
    environment = Small(**options)
    environment.reset(task)
    messages = [reply if isinstance(reply, Message) else Message("assistant", reply) for reply in replies]
    return [environment.step({"agent": message}) for message in messages]


def told(step: Step) -> list[str]:
    return [message.content for message in step.observations["agent"]]


# Scores


@pytest.mark.parametrize(
    ("answer", "exact", "f1"),
    [
        (["m.f1", "m.f2", "m.f3"], 1.0, 1.0),
        (["m.f1"], 0.0, 0.5),  # precision 1/3, recall 1
        (["m.f1", "m.x"], 0.0, 0.4),  # precision 1/3, recall 1/2
        (["m.f1", "m.f2", "m.f3", "m.x"], 0.0, 6 / 7),  # precision 1, recall 3/4
        (["m.x"], 0.0, 0.0),
    ],
)
def test_the_scores_of_sets(answer: list[str], exact: float, f1: float) -> None:
    last = played(posed(answer), FILMS, "Final Answer: #0")[-1]
    assert (last.done, last.stop_reason, last.success) == (True, "answered", exact == 1.0)
    assert last.components["agent"] == {"exact": exact}
    assert last.metrics == {"exact": exact, "f1": pytest.approx(f1), "failed_calls": 0.0}
    assert played(posed(answer), FILMS, "Final Answer: #0", reward="f1")[-1].components["agent"] == {
        "f1": pytest.approx(f1)
    }


def test_an_empty_set_answers_no_question() -> None:
    assert f1_score(frozenset(), frozenset("a")) == 0.0


def test_a_number_is_the_answer_of_a_count() -> None:
    assert played(posed(["3"]), FILMS, "Action: count(#0)", "Final Answer: #1")[-1].success
    assert not played(posed(["3"]), FILMS, "Action: count(#0)", "Final Answer: #0")[-1].success


@pytest.mark.parametrize(
    "text",
    [
        "Thought: it is #0.\nFinal Answer: #0",
        "Find Answer: #0",
        "Final Answer: #0\\_",
        "**Final Answer:** #0",
        "final answer:\n`#0`",
        "Final Answer: variable #0",
    ],
)
def test_forms_of_the_final_answer(text: str) -> None:
    assert played(posed(["m.f1", "m.f2", "m.f3"]), FILMS, text)[-1].success


@pytest.mark.parametrize("text", ["The answer is #0", "Answer: #0", "Observation: x\nFinal Answer: #0"])
def test_other_texts_do_not_end(text: str) -> None:
    last = played(posed(["m.f1"]), FILMS, text)[-1]
    assert not last.done
    assert told(last) == [NO_CALL]


def test_a_final_answer_without_its_variable_ends_without_a_reward() -> None:
    (last,) = played(posed(["m.f1"]), "Final Answer: #0", incomplete_penalty=0.2)
    assert (last.done, last.success, last.stop_reason) == (True, False, "invalid_variable")
    assert last.components["agent"] == {"exact": 0.0, "incomplete": -0.2}


def test_fifteen_rounds_are_the_default_and_the_penalty_is_off() -> None:
    steps = played(posed(["m.f1"]), *["hm"] * 15)
    assert [step.done for step in steps] == [False] * 14 + [True]
    assert (steps[-1].truncated, steps[-1].stop_reason) == (True, "max_turns")
    assert steps[-1].rewards["agent"] == 0.0
    assert played(posed(["m.f1"]), "hm", max_turns=1, incomplete_penalty=0.2)[-1].rewards["agent"] == -0.2


# Calls


def test_the_question_names_its_entities() -> None:
    (system, question) = Small().reset(posed(["m.f1"], Best="m.s2"))["agent"]
    assert (system.role, system.content) == ("system", INSTRUCTION)
    assert question.content == "Which?\nEntities: [Acme, Best]"


def test_calls_in_every_form_are_made() -> None:
    native = Message("assistant", "", tool_calls=(ToolCall("c1", "get_relations", {"variable": "Acme"}),))
    texts = (
        "Thought: look.\nAction: get_relations(Acme)",
        "Action 1: get\\_relations(Acme)\nObservation: [made.up]",
        "**Action:** `get_relations(Acme)`",
        "- action: get_relations(Acme)",
    )
    for reply in (native, written_call("get_relations", variable="Acme"), *texts):
        (step,) = played(posed(["m.f1"]), reply)
        assert told(step) == ["Observation: [film.studio.films]"]
        assert step.metrics == {"failed_calls": 0.0}
    assert played(posed(["m.f1"]), native)[0].observations["agent"][0].tool_call_id == "c1"


def test_calls_of_one_reply_are_made_in_order_and_a_failed_one_makes_no_variable() -> None:
    reply = (
        written_call("get_neighbors", variable="Acme", relation="film.studio.films")
        + written_call("argmax", variable="#0", attribute="film.film.cast")
        + written_call("count", variable="#0")
    )
    (step,) = played(posed(["m.f1"]), reply)
    assert [text.partition(",")[0] for text in told(step)][0::2] == [
        "Observation: variable #0",
        "Observation: variable #1",
    ]
    assert told(step)[1].startswith("Error: 'film.film.cast' is no attribute")
    assert step.metrics == {"failed_calls": 1.0}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", NO_CALL),
        ("Action: none", NO_CALL),
        ("Action: look(Acme)", NO_CALL),
        ("<tool_call>{oops</tool_call>", "not JSON"),
        (written_call("look", variable="Acme"), "there is no tool 'look'"),
        (written_call("get_relations"), "'variable' is a required property"),
        (written_call("get_relations", variable=3), "not of type 'string'"),
        (written_call("get_relations", variable="Acme", hidden=1), "hidden"),
    ],
)
def test_a_faulty_call_is_an_observation(reply: str, reason: str) -> None:
    (step,) = played(posed(["swordfish"]), reply)
    assert not step.done
    assert reason in told(step)[0]
    assert "swordfish" not in told(step)[0]
    assert step.metrics == {"failed_calls": 1.0}


def test_failed_calls_are_those_of_the_episode() -> None:
    steps = played(posed(["m.f1", "m.f2", "m.f3"]), "hm", "Action: look(Acme)", FILMS, "Final Answer: #0")
    assert [step.metrics["failed_calls"] for step in steps] == [1.0, 2.0, 2.0, 2.0]
    last = played(posed(["m.f1"]), "hm", FILMS, "Final Answer: #7")[-1]
    assert last.metrics == {"exact": 0.0, "f1": 0.0, "failed_calls": 2.0}


def test_a_call_comes_before_a_final_answer_in_the_same_reply() -> None:
    step = played(posed(["m.f1"]), FILMS, written_call("count", variable="#0") + " Final Answer: #0")[-1]
    assert told(step) == ["Observation: variable #1, which is a number"]


def test_long_observations_are_cut() -> None:
    (step,) = played(posed(["m.f1"]), "Action: get_relations(Acme)", output_characters=20)
    assert told(step)[0].startswith("Observation: [film.s\n[")


# The team


def test_explorers_act_in_turn_and_the_answerer_sees_their_calls() -> None:
    environment = Small(team=True, max_turns=6)
    assert environment.agents == ("explorer_1", "explorer_2", "answerer")
    assert list(environment.reset(posed(["3"]))) == ["explorer_1"]
    step = environment.step({"explorer_1": Message("assistant", FILMS)})
    assert told_to("explorer_1", step) == ["Observation: variable #0, which are instances of film.film"]
    step = environment.step({"explorer_1": Message("assistant", "Action: count(#0)")})  # not its tool; its second turn
    assert step.metrics == {"failed_calls": 1.0}
    seen = "Which?\nEntities: [Acme]\nget_neighbors(Acme, film.studio.films)\nObservation: variable #0, which are"
    assert told_to("explorer_2", step)[-1] == f"{seen} instances of film.film"
    step = environment.step({"explorer_2": Message("assistant", "Final Answer: #0")})  # ends its part, not the episode
    assert told_to("answerer", step)[-1].startswith(seen)
    environment.step({"answerer": Message("assistant", "Action: count(#0)")})
    last = environment.step({"answerer": Message("assistant", "Final Answer: #1")})
    assert last.rewards == {"explorer_1": 1.0, "explorer_2": 1.0, "answerer": 1.0}


def told_to(agent: str, step: Step) -> list[str]:
    return [message.content for message in step.observations[agent]]


def test_the_fewest_turns_of_a_team_reach_its_answerer() -> None:
    environment = Small(team=True, max_turns=3, incomplete_penalty=0.5)
    environment.reset(posed(["3"]))
    for explorer in ("explorer_1", "explorer_2"):
        environment.step({explorer: Message("assistant", FILMS)})
    assert environment.copy().step({"answerer": Message("assistant", "Final Answer: #0")}).stop_reason == "answered"
    last = environment.step({"answerer": Message("assistant", "hm")})
    assert last.rewards == {"explorer_1": -0.5, "explorer_2": -0.5, "answerer": -0.5}
    for turns in (1, 2):
        with pytest.raises(ConfigurationError, match=f"max_turns is {turns}, and a team of 3 needs .*; give 3 or more"):
            KnowledgeGraphEnvironment(team=True, max_turns=turns)


def test_gold_replies_of_the_team_earn_1() -> None:
    environment = KnowledgeGraphEnvironment(team=True)
    source = environment.tasks("train")
    for index in range(12):
        replies = {agent: iter(texts) for agent, texts in (environment.gold(source[index]) or {}).items()}
        due = list(environment.reset(source[index]))
        while due:
            step = environment.step({due[0]: Message("assistant", next(replies[due[0]]))})
            due = list(step.observations)
        assert step.rewards == dict.fromkeys(environment.agents, 1.0)
        assert [list(left) for left in replies.values()] == [[], [], []]


# AgentBench's server


def test_a_relation_needs_no_call_of_get_relations_before() -> None:
    # there: ValueError, and a cache of all sessions
    exploration = Exploration(small_graph(), {"Acme": "m.s1"})
    exploration.call("get_neighbors", {"variable": "Acme", "relation": "film.studio.films"})
    assert exploration.answer(0) == {"m.f1", "m.f2", "m.f3"}


def test_relations_follow_the_graph_of_the_episode() -> None:
    # there: relations are remembered by the variable's name for all sessions
    other = TripleStore({})
    other.add("m.s1", "book.publisher.books", "m.b1")
    for graph, relation in ((small_graph(), "film.studio.films"), (other, "book.publisher.books")):
        assert Exploration(graph, {}).call("get_relations", {"variable": "m.s1"}) == f"Observation: [{relation}]"


def test_an_unknown_relation_is_an_observation() -> None:
    # there: get_neighbors raises
    (step,) = played(posed(["m.f1"]), "Action: get_neighbors(Acme, film.film.cast)")
    assert told(step) == ["Error: 'film.film.cast' is no relation of Acme; call get_relations for the list"]


def test_an_attribute_needs_no_call_of_get_attributes_before_and_an_entity_may_be_asked_for_its_own() -> None:
    # there: 'str' object has no attribute 'program'
    assert not played(posed(["m.f2"]), FILMS, "Action: argmax(#0, film.film.released)")[-1].metrics["failed_calls"]
    (step,) = played(posed(["m.f1"], Film="m.f1"), "Action: get_attributes(Film)")
    assert told(step) == ["Observation: [film.film.length, film.film.released]"]


def test_variables_of_different_types_are_intersected() -> None:
    # there: rejected, which eight of 150 training programs need
    graph = TripleStore({"a.b.c": "location.country", "a.b.d": "location.location"})
    graph.add("m.1", "a.b.c", "m.2")
    graph.add("m.1", "a.b.d", "m.2")
    assert Exploration(graph, {}).run(
        ["get_neighbors(m.1,a.b.c)", "get_neighbors(m.1,a.b.d)", "intersection(#0,#1)"]
    ) == {"m.2"}


@pytest.mark.parametrize("identifier", ["m.03", "g.121r_b9t", "common.topic"])
def test_entities_may_have_any_identifier(identifier: str) -> None:
    # there: only m. and f.
    graph = TripleStore({})
    graph.add(identifier, "a.b.c", "m.2")
    assert Exploration(graph, {"Name": identifier}).run(["get_neighbors(Name,a.b.c)"]) == {"m.2"}


def test_names_with_commas_and_parentheses_work_in_the_text_form() -> None:
    # there: arguments are split at every comma, and end at the first parenthesis
    task = posed(["m.f3"], **{"Messiah (Dublin, 1742)": "m.s2"})
    steps = played(task, "Action: get_neighbors(Messiah (Dublin, 1742), film.studio.films)", "Final Answer: #0")
    assert steps[-1].success


def test_lists_do_not_depend_on_the_order_of_hashes() -> None:
    graph = TripleStore({})
    for name in "hgfedcba":
        graph.add("m.1", f"a.b.{name}", "m.2")
    listed = Exploration(graph, {}).call("get_relations", {"variable": "m.1"})
    assert listed == f"Observation: [{', '.join(f'a.b.{name}' for name in 'abcdefgh')}]"


def test_the_instruction_has_no_braces_of_a_template() -> None:
    # there: the example shows doubled braces, and names the wrong variable
    assert "{" not in INSTRUCTION + "".join(tool.description for tool in TOOLS)


# Contract, options, rows


@pytest.mark.parametrize("options", [{}, {"max_turns": 1, "reward": "f1"}, {"team": True, "kinds": ["and"]}])
@pytest.mark.long_after(1)
def test_the_contract_holds(options: dict[str, Any]) -> None:
    check_environment(KnowledgeGraphEnvironment(**options), tasks_per_split=2).raise_on_failure()


def test_copies_in_mid_episode_have_their_own_variables_and_share_the_graph() -> None:
    environment = KnowledgeGraphEnvironment()
    task = environment.tasks("train")[0]
    gold = environment.gold(task)
    assert gold is not None
    environment.reset(task)
    for reply in gold["agent"][:2]:
        environment.step({"agent": Message("assistant", reply)})
    forked = environment.copy()
    assert isinstance(forked, KnowledgeGraphEnvironment)
    assert forked._exploration.graph is environment._exploration.graph
    for reply in gold["agent"][2:]:
        last = forked.step({"agent": Message("assistant", reply)})
    assert last.rewards["agent"] == 1.0
    assert len(environment._exploration.variables) == 1


@pytest.mark.slow
def test_a_thousand_sessions_take_little_memory() -> None:
    environment = KnowledgeGraphEnvironment()
    tasks = [environment.tasks("train")[number] for number in range(100)]
    environment.reset(tasks[0])
    tracemalloc.start()
    sessions = []
    for number in range(1000):
        task = tasks[number % 100]
        session = environment.copy()
        session.reset(task)
        for reply in (environment.gold(task) or {"agent": ()})["agent"][:4]:
            session.step({"agent": Message("assistant", reply)})
        sessions.append(session)
    each = tracemalloc.get_traced_memory()[0] / len(sessions)
    tracemalloc.stop()
    assert each < 5_000, f"{each:.0f} bytes a session"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_turns": 0}, "max_turns is 0"),
        ({"entities": 5}, "entities is 5"),
        ({"hops": [0, 2]}, "hops is"),
        ({"kinds": ["union"]}, "choose from join"),
        ({"reward": "mrr"}, "choose from exact, f1"),
        ({"incomplete_penalty": -1}, "incomplete_penalty is -1"),
        ({"data": "std.json"}, "needs `ontology`"),
        ({"ontology": "/nowhere"}, "fb_roles cannot be read"),
        ({"graph": "http://127.0.0.1/sparql"}, "graph and ontology are for rows; give `data`"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        KnowledgeGraphEnvironment(**options)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"question": 3}, "question"),
        ({"entities": ["Acme"]}, "entities"),
        ({"answer": []}, "answer"),
        ({"answer": [{}]}, "answer_argument"),
        ({"actions": ["look(x)"]}, "actions"),
    ],
)
def test_faults_of_a_row_are_named(tmp_path: Path, changed: dict[str, Any], fault: str) -> None:
    pytest.importorskip("pyoxigraph")
    row = {"question": "?", "entities": {"Acme": "m.s1"}, "answer": [{"answer_argument": "m.f1"}]}
    path = tmp_path / "std.json"
    path.write_text(json.dumps([{**row, **changed}]))
    graph = written(small_graph(), tmp_path / "graph.nt")
    environment = KnowledgeGraphEnvironment(data={"train": str(path)}, graph=graph)
    with pytest.raises(DataError, match=rf"std\.json.*row 1.*{fault}"):
        environment.tasks("train")
