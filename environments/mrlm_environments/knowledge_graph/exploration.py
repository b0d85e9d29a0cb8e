"""The seven tools: variables that stand for sets of entities, and the observations of AgentBench."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from mrlm_environments.knowledge_graph.graph import Nodes, TripleStore
from mrlm_environments.knowledge_graph.sparql import SparqlGraph
from mrlm_pl.environment.tools import ToolError, tool_schema

TOOLS = tuple(
    tool_schema(name, description, {key: {"type": "string"} for key in arguments.split()}, closed=True)
    for name, arguments, description in (
        ("get_relations", "variable", "List the relations of an entity or of a variable's entities."),
        ("get_neighbors", "variable relation", "Make a variable of the entities to which a relation leads."),
        ("intersection", "variable1 variable2", "Make a variable of the entities that are in both variables."),
        ("get_attributes", "variable", "List the attributes of a variable's entities that hold numbers or dates."),
        ("argmax", "variable attribute", "Make a variable of the entity with the largest value of an attribute."),
        ("argmin", "variable attribute", "Make a variable of the entity with the smallest value of an attribute."),
        ("count", "variable", "Make a variable of the number of a variable's entities."),
    )
)
PARAMETERS: dict[str, list[str]] = {tool.name: tool.parameters["required"] for tool in TOOLS}
"""Tools, and the names of their arguments in order."""

Graph: TypeAlias = TripleStore | SparqlGraph
_NUMBERED = re.compile(r"(?:[Vv]ariable )?#(\d{1,6})")
_TOOL = re.compile(r"\b(\w+)\(")


@dataclass(frozen=True)
class Variable:
    """A set of entities, or a number where ``number`` is set."""

    type: str
    nodes: Nodes = None
    number: int | None = None


class Exploration:
    """The variables of one episode. A failed call leaves them as they are.

    Args:
        graph: graph to explore.
        entities: identifiers of the question's entities by name.
    """

    def __init__(self, graph: Graph, entities: Mapping[str, str]) -> None:
        self.graph, self.entities = graph, entities
        self.variables: tuple[Variable, ...] = ()

    def call(self, tool: str, arguments: Mapping[str, str]) -> str:
        """Call a tool of :data:`PARAMETERS` and return its observation.

        Raises:
            ToolError: an argument names nothing that the tool can use.
        """
        first, *others = (arguments[name].strip() for name in PARAMETERS[tool])
        variable = self._variable(first, tool)
        graph, nodes = self.graph, variable.nodes
        if tool == "get_relations":
            return f"Observation: [{', '.join(graph.relations(nodes))}]"
        if tool == "get_attributes":
            return f"Observation: [{', '.join(graph.attributes(nodes))}]"
        if tool == "count":
            return self._announced(Variable("type.int", number=graph.size(nodes)))
        if tool == "intersection":
            other = self._variable(others[0], tool)
            return self._announced(Variable(variable.type, graph.intersection(nodes, other.nodes)))
        if tool == "get_neighbors":
            self._check("relation", others[0], first, graph.relations(nodes))
            return self._announced(Variable(graph.type_of(others[0]), graph.neighbors(nodes, others[0])))
        self._check("attribute", others[0], first, graph.attributes(nodes))
        return self._announced(Variable(variable.type, graph.best(nodes, others[0], tool == "argmax")))

    def run(self, actions: Iterable[str]) -> frozenset[str]:
        """Make the calls of a program, and return the answer that its last variable stands for.

        Raises:
            ToolError: a call fails, or none makes a variable.
        """
        for action in actions:
            read = read_action(action)
            if read is None:
                raise ToolError(f"{action[:80]!a} is no call; write TOOL(ARGUMENTS)")
            self.call(*read)
        return self.answer(len(self.variables) - 1)

    def answer(self, number: int) -> frozenset[str]:
        """Return the answer that a variable stands for: identifiers of entities, or a number as text.

        Raises:
            ToolError: there is no such variable.
        """
        if not 0 <= number < len(self.variables):
            raise ToolError(f"there is no variable #{number}; {self._known()}")
        variable = self.variables[number]
        return self.graph.members(variable.nodes) if variable.number is None else frozenset((str(variable.number),))

    def _announced(self, variable: Variable) -> str:
        self.variables = (*self.variables, variable)
        kind = "is a number" if variable.number is not None else f"are instances of {variable.type}"
        return f"Observation: variable #{len(self.variables) - 1}, which {kind}"

    def _variable(self, name: str, tool: str) -> Variable:
        """Return the variable, or the set of the one entity, that a name stands for.

        An entity alone is no operand of a set operation: its count, 1, is the answer of many questions.
        """
        numbered = _NUMBERED.fullmatch(name)
        if numbered and name not in self.entities:
            if int(numbered[1]) >= len(self.variables):
                raise ToolError(f"there is no variable #{int(numbered[1])}; {self._known()}")
            variable = self.variables[int(numbered[1])]
            if variable.number is not None:
                raise ToolError(f"{tool}: {name} is a number, not a set of entities")
            return variable
        if not tool.startswith("get_"):
            raise ToolError(f"{tool}: {name[:80]!a} is no variable; make one with get_neighbors")
        nodes = self.graph.entity(self.entities.get(name, name))
        if nodes is None:
            raise ToolError(f"{name[:80]!a} is no entity of the graph; {self._known()}")
        return Variable("", nodes)

    def _known(self) -> str:
        last = f"variables are #0 to #{len(self.variables) - 1}" if self.variables else "there are no variables yet"
        return f"entities are {', '.join(self.entities)}; {last}"

    def _check(self, kind: str, given: str, name: str, known: list[str]) -> None:
        if given not in known:
            raise ToolError(f"{given[:80]!a} is no {kind} of {name[:80]}; call get_{kind}s for the list")


def read_action(text: str) -> tuple[str, dict[str, str]] | None:
    """Return tool and arguments of a call in AgentBench's text form, or None.

    Names of entities may contain commas and parentheses; the second argument of a tool does not.

    >>> read_action("get_neighbors(Messiah (Dublin, 1742), music.album.releases)")
    ('get_neighbors', {'variable': 'Messiah (Dublin, 1742)', 'relation': 'music.album.releases'})
    """
    found, end = _TOOL.search(text), text.rfind(")")
    if found is None or found[1] not in PARAMETERS or end < found.end():
        return None
    names = PARAMETERS[found[1]]
    values = [value.strip() for value in text[found.end() : end].rsplit(",", len(names) - 1)]
    return (found[1], dict(zip(names, values, strict=True))) if len(values) == len(names) else None
