"""Questions about a graph, answered step by step with seven tools: AgentBench's Knowledge Graph, or generated ones."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from mrlm_environments.data_tasks import DataTasks, ending, opening
from mrlm_environments.knowledge_graph.exploration import TOOLS, Exploration, Graph, read_action
from mrlm_environments.knowledge_graph.ontology import Ontology
from mrlm_environments.knowledge_graph.questions import KINDS, Kind, WorldTasks
from mrlm_environments.knowledge_graph.reconstruction import reconstructed
from mrlm_environments.knowledge_graph.sparql import SparqlGraph, query_endpoint, query_file
from mrlm_environments.knowledge_graph.world import world
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource, ToolSchema
from mrlm_pl.environment.tools import MalformedCall, ToolError, answer_calls, clip, requested_calls, written_call
from mrlm_pl.episode import ToolCall
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.settings import PositiveInt, UnitInterval, between, some_of, whole_range

Scoring = Literal["exact", "f1"]
ROW_FORM = "{question, entities: {NAME: ID}, answer: [{answer_argument}], actions: [CALL, ...]}"
RECONSTRUCTED, FREEBASE = "reconstructed", "http://rdf.freebase.com/ns/"

INSTRUCTION = (
    "Answer the question by exploring a graph with the tools. A tool takes the name of an entity, or a variable (#0, "
    "#1, ...), which stands for a set of entities. Without tool calls, write one line such as: Action: "
    "get_relations(NAME). When a variable is the answer, write: Final Answer: #NUMBER"
)
AGENT, TEAM = "agent", ("explorer_1", "explorer_2", "answerer")
EXPLORING = ("get_relations", "get_neighbors", "get_attributes")
DONE = "Done."
NO_CALL = "No valid function calls found! Need to recheck the function calls."
_FINAL = re.compile(r"(?:Find|Final) Answer[:\s*_`(]{1,8}(?:variable )?#(\d{1,6})", re.IGNORECASE)
_ACTION = re.compile(r"^[ \t*>#-]{0,8}action.*?:(.*)", re.IGNORECASE | re.MULTILINE)


class KnowledgeGraphEnvironment(Environment):
    """A question, the names of its entities, and seven tools that explore a graph; ``Final Answer: #k`` ends.

    The reward is 1.0 if the entities of variable ``#k`` (or the number) are those of the answer, else 0. The final
    answer counts in a reply without a call; one that names no variable ends the episode without a reward.

    As a team, two explorers list relations and attributes and follow relations, one after the other, each until it
    replies without a call or has a third of the turns. Then the answerer sees their calls and observations, has all
    tools, and answers. All three earn the reward.

    Args:
        data: rows in AgentBench's format that replace the generated questions: a file or a hub name, or a mapping from
            splits to these; see :func:`mrlm_pl.environment.rows.read_split`.
        graph: graph of the rows: ``reconstructed`` makes a small graph for each question in which its program gives its
            answer; else an N-Triples file (extra ``graph``) or the URL of a SPARQL endpoint.
        ontology: folder with AgentBench's ``fb_roles`` and ``reverse_properties``; ``reconstructed`` needs it, other
            graphs take the types of variables from it.
        namespace: beginning of the IRIs of entities and relations that names leave out.
        kinds: operators of generated questions; None is all of them.
        hops: minimum and maximum number of relations on the way to the answer of a generated question, from 1 to 3.
        entities: number of entities of a generated graph, from 120 to 5000.
        reward: ``exact`` as above, or ``f1`` of the two sets; both are metrics of the last turn.
        team: three agents, ``explorer_1``, ``explorer_2`` and ``answerer``, instead of one.
        incomplete_penalty: subtracted where the episode ends without a valid final answer, from 0 to 1.
        max_turns: replies of all agents together; a team needs at least 3.
        output_characters: number of characters after which an observation is truncated.
        instruction: system message before the question.

    Raises:
        ConfigurationError: a value is out of its range, or the graph or the ontology cannot be read.
    """

    name = "knowledge_graph"
    client_settings = ("kinds", "hops", "reward", "team", "incomplete_penalty", "max_turns", "instruction")
    secrets = ("actions", "answer")
    forks = True

    def __init__(
        self,
        data: str | dict[str, str] | None = None,
        graph: str = RECONSTRUCTED,
        ontology: str | None = None,
        namespace: str = FREEBASE,
        kinds: list[Kind] | None = None,
        hops: tuple[int, int] = (1, 3),
        entities: Annotated[int, between(120, 5000)] = 500,
        reward: Scoring = "exact",
        team: bool = False,
        incomplete_penalty: UnitInterval = 0.0,
        max_turns: PositiveInt = 15,
        output_characters: PositiveInt = 4000,
        instruction: str = INSTRUCTION,
    ) -> None:
        self.agents = TEAM if team else (AGENT,)
        if max_turns < len(self.agents):
            raise ConfigurationError(
                f"knowledge_graph: max_turns is {max_turns}, and a team of {len(TEAM)} needs a turn for each agent; "
                f"give {len(TEAM)} or more, or leave out `team`"
            )
        self._limit = max_turns // len(self.agents)  # replies of an explorer
        self.kinds = some_of(KINDS, "knowledge_graph: ", kinds=kinds)
        self.hops = whole_range(1, 3, "knowledge_graph: ", hops=hops)
        self.entities, self.reward, self.incomplete_penalty = entities, reward, incomplete_penalty
        self.max_turns, self.output_characters, self.instruction = max_turns, output_characters, instruction
        self._tasks = DataTasks(self.name, data, ROW_FORM)
        self._ontology = None if ontology is None else Ontology(ontology)
        self._graph: SparqlGraph | None = None
        if graph != RECONSTRUCTED:
            query = query_endpoint(graph) if graph.startswith(("http://", "https://")) else query_file(graph)
            self._graph = SparqlGraph(query, namespace, self._ontology)
        if data is None and (graph != RECONSTRUCTED or ontology is not None):
            raise ConfigurationError("knowledge_graph: graph and ontology are for rows; give `data` or leave them out")
        if data is not None and graph == RECONSTRUCTED and ontology is None:
            raise ConfigurationError(
                "knowledge_graph: graph 'reconstructed' needs `ontology`, the folder of AgentBench's fb_roles and "
                "reverse_properties"
            )

    def tools(self, agent: str) -> Sequence[ToolSchema]:
        """Return the seven tools; an explorer's do not combine sets."""
        return TOOLS if agent == self.agents[-1] else tuple(tool for tool in TOOLS if tool.name in EXPLORING)

    def tasks(self, split: str) -> TaskSource:
        """Return generated questions without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row lacks a field or is of another form.
            ConfigurationError: the split is unknown or empty, or the graphs are too small for the questions.
        """
        if self._tasks.data is None:
            return WorldTasks(self.name, split, self.kinds, self.hops, self.entities)
        return self._tasks.source(split, ("question", "entities", "answer"), self._row_task, _identity)

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the calls of the program and the final answer; None if they do not fit in the turns."""
        left = gold_replies(task.data)
        first = itertools.takewhile(lambda call: call.startswith(EXPLORING), task.data["actions"])
        exploring = left[: len(list(first))]
        replies: dict[str, list[str]] = {}
        for agent in self.agents[:-1]:
            part = exploring[: self._limit]
            exploring, left = exploring[len(part) :], left[len(part) :]
            replies[agent] = part if len(part) == self._limit else [*part, DONE]
        replies[self.agents[-1]] = left
        return replies if left and sum(map(len, replies.values())) <= self.max_turns else None

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the rewards without a final answer and of a right one; see :meth:`Environment.bounds`."""
        return -self.incomplete_penalty * len(self.agents), float(len(self.agents))

    def reset(self, task: Task) -> Observations:
        """Pose the question with its entities; see :meth:`Environment.reset`."""
        self._answer, self._turns, self._own, self._faults = frozenset(task.data["answer"]), 0, 0, 0
        self._exploration = Exploration(self._graph_of(task.data), task.data["entities"])
        self._posed = f"{task.data['question']}\nEntities: [{', '.join(task.data['entities'])}]"
        self._log: tuple[str, ...] = ()
        return {self.agents[0]: opening(self._posed, self.instruction)}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Make the calls of a reply, judge a final answer, or let the next agent act; see :meth:`Environment.step`."""
        ((agent, message),) = actions.items()
        self._turns += 1
        self._own += 1
        answers = agent == self.agents[-1]
        text = message.final_text.partition("Observation:")[0].replace("\\_", "_")
        calls = requested_calls(message)
        written = None if calls else _ACTION.search(text)
        final = _FINAL.search(text) if answers and not calls else None
        if final:
            try:
                given = self._exploration.answer(int(final[1]))
            except ToolError:
                self._faults += 1
                return self._end("invalid_variable")
            return self._end("answered", given)
        if written:
            read = read_action(written[1])
            calls = (MalformedCall(NO_CALL) if read is None else ToolCall("", *read),)
        told = []
        act = partial(self._call_tool, agent)
        for answer, made in answer_calls(calls, self.tools(agent), NO_CALL, act, limit=self.output_characters):
            self._faults += not made
            told.append(Message("user", answer.content) if written else answer)
        self._faults += answers and not told
        if self._turns == self.max_turns:
            return self._end("max_turns")
        metrics = {"failed_calls": float(self._faults)}
        if not answers and (not told or self._own == self._limit):
            self._own, following = 0, self.agents[self.agents.index(agent) + 1]
            return Step({following: opening("\n".join((self._posed, *self._log)), self.instruction)}, metrics=metrics)
        return Step({agent: told or [Message("user", NO_CALL)]}, metrics=metrics)

    def _call_tool(self, agent: str, call: ToolCall) -> str:
        """Make a call and return its observation, which the answerer reads too."""
        observation = self._exploration.call(call.name, call.arguments)
        if agent != self.agents[-1]:
            shown = clip(observation, self.output_characters)
            self._log = (*self._log, f"{call.name}({', '.join(call.arguments.values())})\n{shown}")
        return observation

    def _end(self, stop_reason: str, given: frozenset[str] = frozenset()) -> Step:
        scores = {"exact": float(given == self._answer), "f1": f1_score(given, self._answer)}
        parts: dict[str, float] = {self.reward: scores[self.reward]}
        if stop_reason != "answered":
            parts["incomplete"] = -self.incomplete_penalty
        metrics = {**scores, "failed_calls": float(self._faults)}
        return ending(self.agents, parts, stop_reason, given == self._answer, metrics)

    def _graph_of(self, data: Mapping[str, Any]) -> Graph:
        if "world" in data:
            # by place, as where the question is generated: the cache takes calls by name for others
            return world(*(data["world"][name] for name in ("split", "number", "entities"))).graph
        if self._graph is not None:
            return self._graph
        assert self._ontology is not None, "the constructor demands it"
        return reconstructed(data, self._ontology)

    def _row_task(self, row: Mapping[str, Any]) -> dict[str, Any]:
        data = row_data(row)
        if self._graph is None:
            self._graph_of(data)  # a row without a graph is rejected here
        return data


def _identity(row: Mapping[str, Any]) -> str:
    return json.dumps([row["question"], row["entities"]], sort_keys=True)


def row_data(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's data from a row: question, entities, actions (empty where the row has none) and answer.

    Raises:
        DataError: a field is of another form.
    """
    question, entities, answers, actions = row["question"], row["entities"], row["answer"], row.get("actions") or []
    if not isinstance(question, str) or not question.strip():
        raise DataError("field 'question' is not a string")
    if not isinstance(entities, Mapping) or not all(isinstance(value, str) for value in entities.values()):
        raise DataError("field 'entities' does not map names to identifiers")
    if not isinstance(answers, list) or not answers:
        raise DataError("field 'answer' is not a list of answers")
    if not isinstance(actions, list) or any(read_action(str(action)) is None for action in actions):
        raise DataError("field 'actions' is not a list of calls such as get_relations(m.03xxf2z)")
    answer = sorted({str(one["answer_argument"]) for one in answers})
    return {"question": question, "entities": dict(entities), "actions": actions, "answer": answer}


def gold_replies(data: Mapping[str, Any]) -> list[str]:
    """Return the replies of a question's program, with the names of entities, and the final answer."""
    names = {identifier: name for name, identifier in data["entities"].items()}
    replies, variables = [], 0
    for action in data["actions"]:
        read = read_action(action)
        assert read is not None, "rows are checked when they are read"
        tool, arguments = read
        replies.append(written_call(tool, **{key: names.get(value, value) for key, value in arguments.items()}))
        variables += not tool.startswith("get_") or tool == "get_neighbors"
    return [*replies, f"Final Answer: #{variables - 1}"] if variables else []


def f1_score(given: frozenset[str], expected: frozenset[str]) -> float:
    """Return the harmonic mean of precision and recall of a set; 0 where they share nothing.

    >>> f1_score(frozenset("ab"), frozenset("b")), f1_score(frozenset(), frozenset("b"))
    (0.6666666666666666, 0.0)
    """
    return 2 * len(given & expected) / (len(given) + len(expected)) if given & expected else 0.0
