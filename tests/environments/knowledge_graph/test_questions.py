"""Generated questions: their programs earn 1, programs with one wrong step earn 0, splits share no name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from mrlm_environments.knowledge_graph.environment import KnowledgeGraphEnvironment
from mrlm_environments.knowledge_graph.exploration import Exploration, read_action
from mrlm_environments.knowledge_graph.questions import KINDS
from mrlm_environments.knowledge_graph.world import WORLDS, schema, world

from mrlm_pl.environment import SPLITS, Task
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.environment.tools import ToolError
from mrlm_pl.episode import Message
from tests.support.environments.graph_rows import triples, values

OPERATORS = {"and": "intersection", "count": "count", "argmax": "argmax", "argmin": "argmin"}


def outcome(task: Task, actions: list[str], final: int) -> float:
    """The reward of a program played in text form; a call that fails leaves the episode without its variable."""
    environment = KnowledgeGraphEnvironment(max_turns=20)
    environment.reset(task)
    for action in actions:
        environment.step({"agent": Message("assistant", f"Action: {action}")})
    return environment.step({"agent": Message("assistant", f"Final Answer: #{final}")}).rewards["agent"]


def wrong_steps(data: dict[str, Any]) -> list[list[str]]:
    """All programs that differ in one step: another relation or attribute of the lists, extreme, entity or variable."""
    graph = world(**data["world"]).graph
    explored, found, made = Exploration(graph, {}), [], []
    for place, action in enumerate(data["actions"]):
        tool, arguments = read_action(action) or ("", {})
        first, *others = arguments.values()
        known = [*data["entities"].values(), *made]
        steps = {(tool, first, *others)}
        if tool == "get_neighbors" or tool.startswith("arg"):
            (name,) = others
            lists = "get_relations" if tool == "get_neighbors" else "get_attributes"
            listed = explored.call(lists, {"variable": first}).partition("[")[2].rstrip("]").split(", ")
            steps |= {(tool, first, other) for other in listed} | {(tool, own, name) for own in known}
            if tool.startswith("arg"):
                steps.add(("argmin" if tool == "argmax" else "argmax", first, name))
        elif tool == "intersection":
            steps |= {(tool, *pair) for pair in itertools.combinations_with_replacement(made, 2)}
            steps -= {(tool, *others, first)}  # the same set
        elif tool == "count":
            steps |= {(tool, own) for own in made}
        steps -= {(tool, first, *others)}
        wrong = [f"{name}({','.join(operands)})" for name, *operands in sorted(steps)]
        found += [[*data["actions"][:place], other, *data["actions"][place + 1 :]] for other in wrong]
        explored.call(tool, arguments)
        made = [f"#{number}" for number in range(len(explored.variables))]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_programs_earn_1_and_programs_with_one_wrong_step_0(kind: Any) -> None:
    environment = KnowledgeGraphEnvironment(kinds=[kind])
    seen = set()
    for index in range(12):
        task = environment.tasks("train")[index]
        data = dict(task.data)
        variables = sum(not action.startswith(("get_relations", "get_attributes")) for action in data["actions"])
        seen.add(data["hops"])
        assert outcome(task, data["actions"], variables - 1) == 1.0
        assert (OPERATORS.get(kind, "get_neighbors") + "(") in data["actions"][-1]
        wrong = wrong_steps(data)
        assert wrong
        for actions in wrong:
            assert outcome(task, actions, variables - 1) == 0.0, (data["question"], actions)
        for earlier in range(variables - 1):
            assert outcome(task, data["actions"], earlier) == 0.0, (data["question"], earlier)
    assert seen == {1, 2, 3}


@pytest.mark.long
def test_answers_follow_from_the_triples_alone() -> None:
    # the answer by joins over the list of triples, without the store's indexes and the tools
    environment = KnowledgeGraphEnvironment(kinds=["join", "reverse", "and", "argmax"])
    for index in range(20):
        data = environment.tasks("train")[index].data
        home = world(**data["world"])
        known, measured = triples(home.graph), values(home.graph)
        sets: list[set[str]] = []
        for action in data["actions"]:
            tool, _, rest = action.partition("(")
            names = rest.rstrip(")").split(",")
            operands = [sets[int(name[1:])] if name.startswith("#") else {name} for name in names]
            if tool == "get_neighbors":
                sets.append({o for s, r, o in known if r == names[1] and s in operands[0]})
            elif tool == "intersection":
                sets.append(operands[0] & operands[1])
            elif tool == "argmax":
                sets.append({max((v, e) for e, a, v in measured if a == names[1] and e in operands[0])[1]})
        assert sorted(sets[-1]) == data["answer"]


def test_splits_share_no_entity_and_no_name_of_a_schema() -> None:
    names = {split: {name for n in range(WORLDS) for name in world(split, n, 120).names} for split in SPLITS}
    ids = {split: {one for n in range(WORLDS) for one in world(split, n, 120).names.values()} for split in SPLITS}
    words: dict[str, set[str]] = {}
    for split in SPLITS:
        assert {split_of(name) for name in names[split]} == {split}
        plan = schema(split)
        assert (len(plan.classes), len(plan.relations), len(plan.attributes)) == (12, 40, 8)
        words[split] = {*plan.classes, *plan.classes.values()}
        words[split] |= {relation.name for relation in plan.relations} | {one.name for one in plan.attributes}
        assert len({relation.name for relation in plan.relations}) == 40
        assert {one.owner for one in plan.attributes} | {one.source for one in plan.relations} == set(plan.classes)
    for sets in (names, ids, words):
        assert not sets["train"] & sets["test"]
        assert not sets["train"] & sets["validation"]
        assert not sets["validation"] & sets["test"]


def test_an_episode_plays_in_the_graph_that_its_question_was_generated_in() -> None:
    environment = KnowledgeGraphEnvironment(entities=120)
    task = environment.tasks("train")[0]
    environment.reset(task)
    assert environment._exploration.graph is world("train", task.data["world"]["number"], 120).graph


def test_tasks_are_a_function_of_their_index() -> None:
    assert [KnowledgeGraphEnvironment().tasks("test")[n] for n in range(3)] == [
        KnowledgeGraphEnvironment().tasks("test")[n] for n in range(3)
    ]
    source = KnowledgeGraphEnvironment().tasks("train")
    assert len({source[n].data["question"] for n in range(40)}) == 40


def test_an_extreme_without_values_fails_as_a_call() -> None:
    home = world("train", 0, 120)
    exploration = Exploration(home.graph, home.names)
    genre = next(name for name, one in home.names.items() if one in home.members["film.genre"])
    exploration.call("get_neighbors", {"variable": genre, "relation": "film.genre.writers"})
    with pytest.raises(ToolError, match="no attribute"):
        exploration.call("argmax", {"variable": "#0", "attribute": "film.film.minutes"})
