"""A class that several agents write: its methods divided among them, and their replies merged into its skeleton."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from mrlm_environments.code.rows import python_blocks
from mrlm_environments.code.syntax import METHOD

Method: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Key: TypeAlias = tuple[str, str]
"""A method's name, and ``setter`` or ``deleter`` for these parts of a property, else nothing."""


_KEPT = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.ClassDef, ast.Try, ast.If, *METHOD)


@dataclass(frozen=True)
class Reply:
    """The code that an agent wrote.

    Args:
        methods: definitions of methods, the last one of each.
        attributes: assignments and classes of the class's body.
        around: imports, functions, classes and constants outside the class.
        heads: heads of the class.
    """

    methods: dict[Key, Method] = field(default_factory=dict)
    attributes: list[ast.stmt] = field(default_factory=list)
    around: list[ast.stmt] = field(default_factory=list)
    heads: list[ast.ClassDef] = field(default_factory=list)


@dataclass(frozen=True)
class Merged:
    """A merged class.

    Args:
        source: source of the whole file.
        written: methods that at least one agent wrote.
        overlapping: methods that more than one agent defined.
    """

    source: str
    written: frozenset[str]
    overlapping: frozenset[str]


def shares(methods: Sequence[str], agents: int) -> list[list[str]]:
    """Return the methods of each agent that acts: adjacent ones together, sizes at most one apart, none empty.

    >>> shares(["a", "b", "c"], 2), shares(["a"], 3)
    ([['a', 'b'], ['c']], [['a']])
    """
    acting = min(agents, len(methods))
    size, more = divmod(len(methods), acting)
    ends = [(number + 1) * size + min(number + 1, more) for number in range(acting)]
    return [list(methods[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def read_reply(text: str, name: str, methods: Sequence[str]) -> Reply:
    """Return the definitions in all Python blocks of a reply; raises an error of ``BROKEN`` if a block is no Python.

    Methods may be inside the class or outside. Anything that is not a definition, such as examples of use, is left out.
    """
    reply = Reply()
    for block in python_blocks(text) or [text]:
        _read_module(ast.parse(textwrap.dedent(block)).body, name, methods, reply)
    return reply


def merge(skeleton: str, name: str, methods: Sequence[str], replies: Sequence[Reply]) -> Merged:
    """Return the skeleton with the agents' methods; raises an error of ``BROKEN`` if that does not compile.

    Of two definitions of a method the one of the earlier agent counts, but a mere stub never does. Decorators, bases
    and attributes of the skeleton stay and those that agents add come to them. Methods that the skeleton gives stay.
    """
    tree = ast.parse(skeleton)
    target = class_of(tree, name)
    written = _merge_class(target, methods, replies)
    place = tree.body.index(target)
    tree.body[place:place] = _distinct(stmt for reply in replies for stmt in reply.around)
    tree.body.sort(key=_import_order)
    source = ast.unparse(ast.fix_missing_locations(tree))
    compile(source, "<merged>", "exec", dont_inherit=True)
    defined = [{key[0] for key in reply.methods} for reply in replies]
    overlapping = {method for method in methods if sum(method in names for names in defined) > 1}
    return Merged(source, frozenset(written), frozenset(overlapping))


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    """Return the class of a name in a file.

    Raises:
        ValueError: there is none.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ValueError(f"there is no class {name}")


def is_stub(method: Method) -> bool:
    """Return whether a method does nothing: a docstring, ``pass``, ``...`` or ``raise NotImplementedError`` at most."""
    return all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node))
        for node in method.body
    )


def key_of(method: Method) -> Key:
    """Return the method's name and its part of a property."""
    for decorator in method.decorator_list:
        if isinstance(decorator, ast.Attribute) and decorator.attr in ("setter", "deleter"):
            return method.name, decorator.attr
    return method.name, ""


def _read_module(body: Sequence[ast.stmt], name: str, methods: Sequence[str], reply: Reply) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            reply.heads.append(node)
            for inner in node.body:
                if isinstance(inner, METHOD):
                    reply.methods[key_of(inner)] = inner
                elif isinstance(inner, (ast.Assign, ast.AnnAssign, ast.ClassDef)):
                    reply.attributes.append(inner)
        elif isinstance(node, METHOD) and (node.name in methods or _first_argument(node) in ("self", "cls")):
            reply.methods[key_of(node)] = node
        elif isinstance(node, _KEPT) and not _mentions(node, (name, "__name__")):
            reply.around.append(node)


def _merge_class(target: ast.ClassDef, methods: Sequence[str], replies: Sequence[Reply]) -> set[str]:
    """Put the agents' parts into the class; the methods of which each part was written."""
    given = {key_of(node): node for node in target.body if isinstance(node, METHOD)}
    chosen: dict[Key, Method] = {}
    for reply in replies:
        for key, method in reply.methods.items():
            asked = key[0] in methods
            if (asked and not is_stub(method)) or (not asked and key not in given):
                chosen.setdefault(key, method)
    for key, method in chosen.items():
        if key in given:
            _add_new(given[key].decorator_list, method.decorator_list)
            method.decorator_list = given[key].decorator_list
    for reply in replies:
        for head in reply.heads:
            _add_new(target.bases, head.bases)
            _add_new(target.keywords, head.keywords)
            _add_new(target.decorator_list, head.decorator_list)
    known = {bound for node in target.body for bound in _bound(node)}
    attributes = _distinct(stmt for reply in replies for stmt in reply.attributes if not known & set(_bound(stmt)))
    new = [method for key, method in chosen.items() if key not in given]
    kept = [chosen.get(key_of(node), node) if isinstance(node, METHOD) else node for node in target.body]
    first = next((place for place, node in enumerate(kept) if isinstance(node, METHOD)), len(kept))
    target.body = [*kept[:first], *attributes, *kept[first:], *new]
    return {name for name in methods if all(key in chosen for key in given if key[0] == name)}


def _add_new(nodes: list[ast.expr] | list[ast.keyword], more: Sequence[ast.AST]) -> None:
    """Append the nodes that are missing, in place."""
    there = {ast.dump(node) for node in nodes}
    nodes.extend(node for node in more if ast.dump(node) not in there)  # type: ignore[misc]


def _distinct(statements: Iterator[ast.stmt]) -> list[ast.stmt]:
    """Return statements without repetition; of two that bind the same names, imports aside, the first one."""
    found: dict[str, ast.stmt] = {}
    for stmt in statements:
        names = [] if isinstance(stmt, (ast.Import, ast.ImportFrom)) else list(_bound(stmt))
        found.setdefault(",".join(names) or ast.dump(stmt), stmt)
    return list(found.values())


def _bound(stmt: ast.stmt) -> Iterator[str]:
    """Yield names that a statement of a class's or a file's own level binds."""
    if isinstance(stmt, (ast.ClassDef, *METHOD)):
        yield stmt.name
    elif isinstance(stmt, (ast.Assign, ast.AnnAssign)):
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))


def _first_argument(method: Method) -> str | None:
    arguments = [*method.args.posonlyargs, *method.args.args]
    return arguments[0].arg if arguments else None


def _mentions(node: ast.AST, names: Sequence[str]) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def _import_order(stmt: ast.stmt) -> int:
    """Return the rank of a statement: ``from __future__`` first, then imports, then the rest as it stands."""
    if isinstance(stmt, ast.ImportFrom) and stmt.module == "__future__":
        return 0
    return 1 if isinstance(stmt, (ast.Import, ast.ImportFrom)) else 2
