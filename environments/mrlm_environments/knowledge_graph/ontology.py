"""Freebase's schema as AgentBench ships it: classes of relations, and inverse relations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mrlm_pl.environment.tasks import Shared
from mrlm_pl.errors import DataError
from mrlm_pl.grouping import grouped

ROLES, INVERSES = "fb_roles", "reverse_properties"
ORDERED = ("type.int", "type.float", "type.datetime")
"""Types of attributes with numbers or dates."""


class Ontology(Shared):
    """Types and inverses of relations, and the relations and attributes of each class.

    Args:
        folder: folder with ``fb_roles`` (class, relation, type) and ``reverse_properties`` (two relations) in lines.

    Raises:
        DataError: a file is missing, or has no line of this form.
    """

    def __init__(self, folder: str) -> None:
        roles = _lines(Path(folder) / ROLES, 3)
        pairs = _lines(Path(folder) / INVERSES, 2)
        self.types: Mapping[str, str] = {relation: target for _, relation, target in roles}
        self.owners: Mapping[str, str] = {relation: owner for owner, relation, _ in roles}
        self.inverses: Mapping[str, str] = {**{second: first for first, second in pairs}, **dict(pairs)}
        self.relations = grouped((owner, name) for owner, name, target in roles if not target.startswith("type."))
        self.attributes = grouped((owner, name) for owner, name, target in roles if target in ORDERED)


def _lines(path: Path, fields: int) -> list[list[str]]:
    """Return the fields of a file's lines; AgentBench's file has a few lines that run into each other."""
    try:
        found = [line.split() for line in path.expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"knowledge_graph: the ontology's {path} cannot be read: {error}") from error
    lines = [line for line in found if len(line) == fields]
    if not lines:
        raise DataError(f"knowledge_graph: {path} has no line of {fields} fields; give AgentBench's {path.name}")
    return lines
