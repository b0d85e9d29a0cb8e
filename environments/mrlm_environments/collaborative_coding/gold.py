"""Divides a known solution between a helper ``aux`` and a main function, so that both do a part of the work."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterable, Iterator

from mrlm_environments.code.syntax import METHOD
from mrlm_environments.collaborative_coding.aux_use import AUX, AuxUse, aux_use, function_of
from mrlm_pl.sandbox import bound_names

_NO_PART = (ast.Name, ast.Constant, ast.Starred, ast.Slice, ast.FormattedValue, ast.JoinedStr, ast.Lambda)
_BINDING = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)
_ALWAYS = (
    ast.BinOp, ast.UnaryOp, ast.Call, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Tuple, ast.List,
    ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.keyword, ast.Return,
)  # fmt: skip
"""Nodes that evaluate all that they hold."""

_BEST = AuxUse(calls=True, thin=False, ignores=False)


def split_solution(solution: str, entry: str) -> tuple[str, str]:
    """Programs of the helper and of the main agent that do together what the solution does.

    ``aux`` is the largest expression of the function that leaves it work of its own: ``3 * (x + 4)`` becomes
    ``aux(x)``, which is ``x + 4``, and ``part = aux(x)``, ``return 3 * part``. Where no expression will do, as in
    ``x + y``, ``aux`` is the whole solution, and the main function does the work again where ``aux`` returns None.
    Other functions of the solution are the helper's.

    Raises:
        ValueError: the solution does not define the function.
    """
    tree = _without_aux(ast.parse(solution))
    function = function_of(tree, entry)
    if not isinstance(function, ast.FunctionDef):
        raise ValueError(f"the solution does not define {entry}")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    inside = [node for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom))]
    others = [node for node in tree.body if node not in imports and node is not function]
    others = [node for node in others if not (isinstance(node, METHOD) and node.name == entry)]
    main, aux = next(_divisions(function))
    return (
        ast.unparse(ast.fix_missing_locations(ast.Module([*imports, *inside, *others, aux], []))),
        ast.unparse(ast.fix_missing_locations(ast.Module([*imports, main], []))),
    )


def _without_aux(tree: ast.Module) -> ast.Module:
    """Return the solution with another name for whatever it calls ``aux`` itself."""
    taken = {inner.id for inner in ast.walk(tree) if isinstance(inner, ast.Name)} | bound_names(ast.unparse(tree))
    fresh = next(name for number in itertools.count(1) if (name := f"{AUX}_{number}") not in taken)
    is_argument = any(isinstance(node, ast.arg) and node.arg == AUX for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            node.asname = fresh if AUX in (node.asname, node.name) else node.asname
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            node.names = [fresh if name == AUX else name for name in node.names]
        elif is_argument or not isinstance(node, ast.keyword):
            for field in ("id", "name", "arg"):
                if getattr(node, field, None) == AUX:
                    setattr(node, field, fresh)
    return tree


def _divisions(function: ast.FunctionDef) -> Iterator[tuple[ast.FunctionDef, ast.FunctionDef]]:
    """Main functions that use ``aux`` fully, with it, from the largest part to the smallest, then by redundancy."""
    nodes = list(ast.walk(function))
    local = _bound(function)
    skipped = {id(inner) for node in nodes for outer in _outside(node) for inner in ast.walk(outer)}
    skipped |= {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    most = 0.6 * len(nodes)
    places = [
        (size, place)
        for place, node in enumerate(nodes)
        if isinstance(node, ast.expr)
        and not isinstance(node, _NO_PART)
        and id(node) not in skipped
        and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        and 1 < (size := sum(1 for _ in ast.walk(node))) <= most
        and not any(isinstance(inner, _BINDING) for inner in ast.walk(node))
    ]
    for _, place in sorted(places, key=lambda pair: (-pair[0], pair[1])):
        for hoisted in (False, True):
            made = _extracted(function, place, local, hoisted=hoisted)
            if made is not None and aux_use(ast.unparse(made[0]), function.name) == _BEST:
                yield made
    yield _redundant(function)


def _extracted(
    function: ast.FunctionDef, place: int, local: set[str], *, hoisted: bool
) -> tuple[ast.FunctionDef, ast.FunctionDef] | None:
    """The function with a call of ``aux`` for the expression at a place, and ``aux``; None where that changes it.

    Args:
        function: what is divided.
        place: the expression's, in the order of ``ast.walk``.
        local: names that the function binds.
        hoisted: the call is assigned in a line of its own before the function's only statement.
    """
    main = copy.deepcopy(function)
    nodes = list(ast.walk(main))
    part = nodes[place]
    assert isinstance(part, ast.expr)
    inner = _bound_in(ast.walk(part))
    if inner & _bound_in(node for node in nodes if node not in set(ast.walk(part))):
        return None  # which of two equal names is meant would take an analysis of scopes
    loaded = [node.id for node in ast.walk(part) if isinstance(node, ast.Name)]
    free = list(dict.fromkeys(name for name in loaded if name in local and name not in inner))
    call = ast.Call(ast.Name(AUX, ast.Load()), [ast.Name(name, ast.Load()) for name in free], [])
    replacement: ast.expr = call
    if hoisted:
        parents = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        above: ast.AST = part
        while above is not main.body[-1]:
            below, above = above, parents[id(above)]
            if not _evaluates(above, below):
                return None
        name = next(name for name in ("part", "helped", "from_aux") if name not in local)
        replacement = ast.Name(name, ast.Load())
        main.body.insert(len(main.body) - 1, ast.Assign([ast.Name(name, ast.Store())], call))
    _replace(main, part, replacement)
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in free], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    return _located(main), _located(_function(AUX, arguments, [ast.Return(part)]))


def _redundant(function: ast.FunctionDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Return a main function that does the work itself where ``aux``, the whole of it, returns None."""
    aux, main = copy.deepcopy(function), copy.deepcopy(function)
    aux.name = AUX
    given = function.args
    values: list[ast.expr] = [ast.Name(node.arg, ast.Load()) for node in (*given.posonlyargs, *given.args)]
    values += [ast.Starred(ast.Name(given.vararg.arg, ast.Load()), ast.Load())] if given.vararg else []
    named = [ast.keyword(node.arg, ast.Name(node.arg, ast.Load())) for node in given.kwonlyargs]
    named += [ast.keyword(None, ast.Name(given.kwarg.arg, ast.Load()))] if given.kwarg else []
    call = ast.Call(ast.Name(AUX, ast.Load()), values, named)
    name = next(name for name in ("value", "helped", "from_aux") if name not in _bound(function))
    known = ast.Compare(ast.Name(name, ast.Load()), [ast.IsNot()], [ast.Constant(None)])
    main.body[:0] = [
        ast.Assign([ast.Name(name, ast.Store())], call),
        ast.If(known, [ast.Return(ast.Name(name, ast.Load()))], []),
    ]
    return _located(main), _located(aux)


def _outside(node: ast.AST) -> list[ast.AST]:
    """Parts of a node that are no values of the function's work: annotations, defaults, called names, formats."""
    if isinstance(node, METHOD):
        return [node.args, *node.decorator_list, *([node.returns] if node.returns else [])]
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if isinstance(node, ast.FormattedValue):
        return [node.format_spec] if node.format_spec else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return [node.value]
    return [node.func] if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else []


def _bound(function: ast.FunctionDef) -> set[str]:
    """Return names that are bound anywhere in a function."""
    return _bound_in(node for node in ast.walk(function) if node is not function)


def _bound_in(nodes: Iterable[ast.AST]) -> set[str]:
    bound: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, METHOD):
            bound.add(node.name)
    return bound


def _evaluates(node: ast.AST, part: ast.AST) -> bool:
    """Return whether a node always evaluates a part of it, and once."""
    if isinstance(node, ast.IfExp):
        return part is node.test
    if isinstance(node, ast.Compare):
        return part in (node.left, node.comparators[0])
    if isinstance(node, ast.BoolOp):
        return part is node.values[0]
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return part is node.generators[0]
    return part is node.iter if isinstance(node, ast.comprehension) else isinstance(node, _ALWAYS)


def _replace(tree: ast.AST, old: ast.expr, new: ast.expr) -> None:
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list) and any(item is old for item in value):
                value[:] = [new if item is old else item for item in value]


def _function(name: str, arguments: ast.arguments, body: list[ast.stmt]) -> ast.FunctionDef:
    function = ast.parse(f"def {name}(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.args, function.body = arguments, body
    return function


def _located(function: ast.FunctionDef) -> ast.FunctionDef:
    return ast.fix_missing_locations(function)
