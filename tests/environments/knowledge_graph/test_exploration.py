"""The seven tools over a graph made by hand: their observations, answers and errors."""

from __future__ import annotations

import pytest
from mrlm_environments.knowledge_graph.exploration import Exploration, read_action

from mrlm_pl.environment.tools import ToolError
from tests.support.environments.graph_rows import small_graph


def explored(*actions: str) -> tuple[Exploration, list[str]]:
    exploration = Exploration(small_graph(), {"Acme": "m.s1", "Best, Inc. (UK)": "m.s2"})
    observations = []
    for action in actions:
        read = read_action(action)
        assert read is not None
        observations.append(exploration.call(*read))
    return exploration, observations


def test_the_observations_are_agentbenchs() -> None:
    exploration, observations = explored(
        "get_relations(Acme)",
        "get_neighbors(Acme, film.studio.films)",
        "get_relations(#0)",
        "get_attributes(#0)",
        "argmax(#0, film.film.released)",
        "get_neighbors(Best, Inc. (UK), film.studio.films)",
        "intersection(#0, #2)",
        "get_neighbors(variable #0, film.film.cast)",
        "count(#0)",
    )
    assert observations == [
        "Observation: [film.studio.films]",
        "Observation: variable #0, which are instances of film.film",
        "Observation: [film.film.cast, film.film.studio]",
        "Observation: [film.film.length, film.film.released]",
        "Observation: variable #1, which are instances of film.film",
        "Observation: variable #2, which are instances of film.film",
        "Observation: variable #3, which are instances of film.film",
        "Observation: variable #4, which are instances of film.actor",
        "Observation: variable #5, which is a number",
    ]
    answers = [set(exploration.answer(number)) for number in range(6)]
    assert answers == [{"m.f1", "m.f2", "m.f3"}, {"m.f2"}, {"m.f3"}, {"m.f3"}, {"m.a1", "m.a2"}, {"3"}]


def test_extremes_compare_numbers_and_dates_and_keep_ties() -> None:
    films = "get_neighbors(Acme, film.studio.films)"
    for action, best in {
        "argmax(#0, film.film.length)": {"m.f2", "m.f3"},
        "argmin(#0, film.film.length)": {"m.f1"},
        "argmax(#0, film.film.released)": {"m.f2"},
        "argmin(#0, film.film.released)": {"m.f1"},
    }.items():
        assert explored(films, action)[0].answer(1) == best


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("get_relations(#7)", "no variable #7; entities are Acme, Best, Inc. (UK); variables are #0 to #1"),
        ("get_relations(Nowhere)", "'Nowhere' is no entity"),
        ("get_relations(#1)", "#1 is a number"),
        ("intersection(#0, #1)", "#1 is a number"),
        ("intersection(#0, Acme)", "intersection: 'Acme' is no variable; make one with get_neighbors"),
        ("intersection(m.f1, m.f1)", "intersection: 'm.f1' is no variable"),
        ("argmin(m.f1, film.film.length)", "argmin: 'm.f1' is no variable"),
        ("count(Acme)", "count: 'Acme' is no variable"),
        ("get_neighbors(#0, film.studio.films)", "'film.studio.films' is no relation of #0; call get_relations"),
        ("argmax(#0, film.film.cast)", "'film.film.cast' is no attribute of #0; call get_attributes"),
    ],
)
def test_a_wrong_argument_is_named_and_makes_no_variable(action: str, reason: str) -> None:
    exploration, _ = explored("get_neighbors(Acme, film.studio.films)", "count(#0)")
    read = read_action(action)
    assert read is not None
    with pytest.raises(ToolError) as raised:
        exploration.call(*read)
    assert reason in str(raised.value)
    assert len(exploration.variables) == 2


def test_a_name_that_looks_like_a_variable_is_the_entity() -> None:
    exploration = Exploration(small_graph(), {"#0": "m.s2"})
    exploration.call("get_neighbors", {"variable": "#0", "relation": "film.studio.films"})
    assert exploration.answer(0) == {"m.f3"}


@pytest.mark.parametrize("part", ["a", "count("])
def test_long_text_that_is_no_call_does_not_take_the_square_of_its_length(part: str) -> None:
    assert read_action(part * 1_000_000) is None  # milliseconds; the square is beyond the time of a test


@pytest.mark.parametrize("text", ["", ")count(", "get_relations", "look(x)", "intersection(#0)", "get_relations Acme"])
def test_text_that_is_no_call(text: str) -> None:
    assert read_action(text) is None
