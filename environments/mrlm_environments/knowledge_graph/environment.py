"""Questions about a graph, answered step by step with seven tools: AgentBench's Knowledge Graph, or generated ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_environments.knowledge_graph.exploration import PARAMETERS, Exploration, read_action
from mrlm_environments.knowledge_graph.graph import Graph
from mrlm_environments.knowledge_graph.ontology import Ontology
from mrlm_environments.knowledge_graph.questions import KINDS, Kind, WorldTasks
from mrlm_environments.knowledge_graph.reconstruction import reconstructed
from mrlm_environments.knowledge_graph.rows import ROW_FORM, gold_replies, row_data
from mrlm_environments.knowledge_graph.sparql import SparqlGraph, query_endpoint, query_file
from mrlm_environments.knowledge_graph.world import world
from mrlm_pl.environment import Message, Outcome, SingleAgentEnvironment, Task, TaskSource, ToolSchema
from mrlm_pl.environment.rows import BadRows
from mrlm_pl.environment.tools import (
    MalformedCall,
    ToolError,
    checked_call,
    clipped,
    requested_calls,
    tool_message,
    tool_schema,
)
from mrlm_pl.episode import ToolCall
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import at_least, between, one_of, some_of, whole_range

Scoring = Literal["exact", "f1"]
RECONSTRUCTED, FREEBASE = "reconstructed", "http://rdf.freebase.com/ns/"

_TEXT = {"type": "string"}
TOOLS = tuple(
    tool_schema(name, description, dict.fromkeys(PARAMETERS[name], _TEXT), closed=True)
    for name, description in {
        "get_relations": "List the relations of an entity or of a variable's entities.",
        "get_neighbors": "Make a variable of the entities to which a relation leads.",
        "intersection": "Make a variable of the entities that are in both variables.",
        "get_attributes": "List the attributes of a variable's entities that hold numbers or dates.",
        "argmax": "Make a variable of the entity with the largest value of an attribute.",
        "argmin": "Make a variable of the entity with the smallest value of an attribute.",
        "count": "Make a variable of the number of a variable's entities.",
    }.items()
)
INSTRUCTION = (
    "Answer the question by exploring a graph with the tools. A tool takes the name of an entity, or a variable (#0, "
    "#1, ...), which stands for a set of entities. Without tool calls, write one line such as: Action: "
    "get_relations(NAME). When a variable is the answer, write: Final Answer: #NUMBER"
)
NO_CALL = "No valid function calls found! Need to recheck the function calls."
_FINAL = re.compile(r"(?:Find|Final) Answer: #(\d{1,6})")
_ACTION = re.compile(r"^Action.*?:(.*)", re.MULTILINE)


class KnowledgeGraphEnvironment(SingleAgentEnvironment):
    """A question, the names of its entities, and seven tools that explore a graph; ``Final Answer: #k`` ends.

    The reward is 1.0 if the entities of variable ``#k`` (or the number) are those of the answer, else 0. The final
    answer counts in a reply without a call; one that names no variable ends the episode without a reward.

    Args:
        data: in place of generated questions, rows in AgentBench's format: a file or a hub name, or a mapping from
            splits to these; see :func:`mrlm_pl.environment.rows.read_split`.
        graph: of the rows: ``reconstructed`` makes a small graph for each question in which its program gives its
            answer; else an N-Triples file (extra ``graph``) or the URL of a SPARQL endpoint.
        ontology: folder with AgentBench's ``fb_roles`` and ``reverse_properties``; ``reconstructed`` needs it, other
            graphs take the types of variables from it.
        namespace: beginning of the IRIs of entities and relations that names leave out.
        kinds: operators of generated questions; None is all of them.
        hops: least and most relations on the way to the answer of a generated question, from 1 to 3.
        entities: of a generated graph, from 120 to 5000.
        reward: ``exact`` as above, or ``f1`` of the two sets; both are metrics of the last turn.
        incomplete_penalty: subtracted where the episode ends without a valid final answer, from 0 to 1.
        max_turns: replies that the agent may give.
        output_characters: an observation is cut after this many.
        instruction: a system message before the question.
        bad_rows: ``skip`` leaves out rows of the data that cannot be used, with a warning that names them; ``stop``
            raises at the first one.

    Raises:
        ConfigurationError: a value is out of its range, or the graph or the ontology cannot be read.
    """

    name = "knowledge_graph"
    client_settings = ("kinds", "hops", "reward", "incomplete_penalty", "max_turns", "instruction")
    forks = True

    def __init__(
        self,
        data: str | dict[str, str] | None = None,
        graph: str = RECONSTRUCTED,
        ontology: str | None = None,
        namespace: str = FREEBASE,
        kinds: list[Kind] | None = None,
        hops: tuple[int, int] = (1, 3),
        entities: int = 500,
        reward: Scoring = "exact",
        incomplete_penalty: float = 0.0,
        max_turns: int = 15,
        output_characters: int = 4000,
        instruction: str = INSTRUCTION,
        bad_rows: BadRows = "skip",
    ) -> None:
        at_least(1, "knowledge_graph: ", max_turns=max_turns, output_characters=output_characters)
        between(120, 5000, "knowledge_graph: ", entities=entities)
        between(0, 1, "knowledge_graph: ", incomplete_penalty=incomplete_penalty)
        one_of(get_args(Scoring), "knowledge_graph: ", reward=reward)
        self.kinds = some_of(KINDS, "knowledge_graph: ", kinds=kinds)
        self.hops = whole_range(1, 3, "knowledge_graph: ", hops=hops)
        self.entities, self.reward, self.incomplete_penalty = entities, reward, incomplete_penalty
        self.max_turns, self.output_characters, self.instruction = max_turns, output_characters, instruction
        self._tasks = DataTasks(self.name, data, bad_rows, ROW_FORM)
        self._ontology = None if ontology is None else Ontology(ontology)
        self._graph: SparqlGraph | None = None
        if graph != RECONSTRUCTED:
            query = query_endpoint(graph) if graph.startswith(("http://", "https://")) else query_file(graph)
            self._graph = SparqlGraph(query, namespace, self._ontology)
        elif data is not None and ontology is None:
            raise ConfigurationError(
                "knowledge_graph: graph 'reconstructed' needs `ontology`, the folder of AgentBench's fb_roles and "
                "reverse_properties"
            )

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the seven tools; see :meth:`Environment.tools`."""
        return TOOLS

    def tasks(self, split: str) -> TaskSource:
        """Return generated questions without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row lacks a field or is of another form.
            ConfigurationError: the split is unknown or empty, or the graphs are too small for the questions.
        """
        if self._tasks.data is None:
            return WorldTasks(self.name, split, self.kinds, self.hops, self.entities)
        return self._tasks.rows(split, ("question", "entities", "answer"), _identity, self._row_task)

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the calls of the program and the final answer; None if they do not fit in the turns."""
        replies = gold_replies(task.data)
        return {self.agents[0]: replies} if 0 < len(replies) <= self.max_turns else None

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards without a final answer and of a right one; see :meth:`Environment.bounds`."""
        return -self.incomplete_penalty, 1.0

    def begin(self, task: Task) -> Sequence[Message]:
        """Return the question with its entities; see :meth:`SingleAgentEnvironment.begin`."""
        self._answer, self._turns = frozenset(task.data["answer"]), 0
        self._exploration = Exploration(self._graph_of(task.data), task.data["entities"])
        return opening(f"{task.data['question']}\nEntities: [{', '.join(task.data['entities'])}]", self.instruction)

    def reply(self, message: Message) -> Outcome:
        """Make the calls of a reply, or judge its final answer; see :meth:`SingleAgentEnvironment.reply`."""
        self._turns += 1
        text = message.content.partition("Observation:")[0].replace("\\_", "_")
        calls = requested_calls(message)
        written = None if calls else _ACTION.search(text)
        final = None if calls else _FINAL.search(text)
        if final:
            return self._judged(int(final[1]))
        told: list[Message] = []
        faults = 0
        for call in calls:
            observation, failed = self._observed(call)
            told.append(tool_message(call, observation))
            faults += failed
        if written:
            read = read_action(written[1])
            call = MalformedCall(written[1], NO_CALL) if read is None else ToolCall("", *read)
            observation, failed = self._observed(call)
            told, faults = [Message("user", observation)], int(failed)
        metrics = {"failed_calls": float(faults + (not told))}
        if self._turns == self.max_turns:
            return self._ended({}, "max_turns", metrics)
        return Outcome(observation=told or NO_CALL, metrics=metrics)

    def _observed(self, call: ToolCall | MalformedCall) -> tuple[str, bool]:
        """Return the observation of a call, and whether the call failed."""
        try:
            asked = checked_call(call, TOOLS, NO_CALL)
            return clipped(self._exploration.call(asked.name, asked.arguments), self.output_characters), False
        except ToolError as error:
            return clipped(f"Error: {error}", self.output_characters), True

    def _judged(self, number: int) -> Outcome:
        try:
            given = self._exploration.answer(number)
        except ToolError:
            return self._ended({}, "invalid_variable", {"failed_calls": 1.0})
        exact, f1 = float(given == self._answer), f1_score(given, self._answer)
        scores = {"exact": exact, "f1": f1}
        return self._ended({self.reward: scores[self.reward]}, "answered", scores)

    def _ended(self, components: Mapping[str, float], stop_reason: str, metrics: Mapping[str, float]) -> Outcome:
        answered = stop_reason == "answered"
        return Outcome(
            components if answered else {self.reward: 0.0, "incomplete": -self.incomplete_penalty},
            stop_reason=stop_reason,
            truncated=stop_reason == "max_turns",
            success=metrics.get("exact") == 1.0,
            metrics=metrics if answered else {"exact": 0.0, "f1": 0.0, **metrics},
        )

    def _graph_of(self, data: Mapping[str, Any]) -> Graph:
        if "world" in data:
            return world(**data["world"]).graph
        if self._graph is not None:
            return self._graph
        assert self._ontology is not None, "the constructor demands it"
        return reconstructed(data, self._ontology)

    def _row_task(self, row: Mapping[str, Any]) -> dict[str, Any]:
        data = row_data(row)
        if self._graph is None:
            self._graph_of(data)  # a row without a graph is refused here
        return data


def _identity(row: Mapping[str, Any]) -> str:
    return json.dumps([row["question"], row["entities"]], sort_keys=True)


def f1_score(given: frozenset[str], expected: frozenset[str]) -> float:
    """Return the harmonic mean of precision and recall of a set; 0 where they share nothing.

    >>> f1_score(frozenset("ab"), frozenset("b")), f1_score(frozenset(), frozenset("b"))
    (0.6666666666666666, 0.0)
    """
    return 2 * len(given & expected) / (len(given) + len(expected)) if given & expected else 0.0
