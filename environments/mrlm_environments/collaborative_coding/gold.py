"""Divides a known solution between a helper ``aux`` and a main function, so that both do a part of the work."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator

from mrlm_environments.code.syntax import METHOD, replace_node
from mrlm_environments.collaborative_coding.aux_use import AUX, AuxUse, aux_use, function_of
from mrlm_pl.sandbox import bound_names
from mrlm_pl.sandbox.inside.grader import bound_by

_NO_PART = (ast.Name, ast.Constant, ast.Starred, ast.Slice, ast.FormattedValue, ast.JoinedStr, ast.Lambda)
_BINDING = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await)
_ALWAYS = (
    ast.BinOp, ast.UnaryOp, ast.Call, ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Tuple, ast.List,
    ast.Set, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.keyword, ast.Return,
)  # fmt: skip
"""Nodes that evaluate all that they hold."""

_BEST = AuxUse(calls=True, thin=False, ignores=False)


def split_solution(solution: str, entry: str) -> tuple[str, str]:
    """Return programs of the helper and of the main agent that together do the work of the solution.

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
    return ast.unparse(ast.Module([*imports, *inside, *others, aux], [])), ast.unparse(ast.Module([*imports, main], []))


def _without_aux(tree: ast.Module) -> ast.Module:
    """Return the solution with its own ``aux`` renamed."""
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


def _divisions(function: ast.FunctionDef) -> Iterator[tuple[ast.FunctionDef, ast.stmt]]:
    """Yield main functions that use ``aux`` fully, each with its ``aux``, from the largest part to the smallest."""
    nodes = list(ast.walk(function))
    body = {node for statement in function.body for node in ast.walk(statement)}
    body -= {node.func for node in nodes if isinstance(node, ast.Call)}
    parts = [(place, node) for place, node in enumerate(nodes) if node in body and isinstance(node, ast.expr)]
    sizes = {place: len(list(ast.walk(node))) for place, node in parts}
    for place in sorted(sizes, key=lambda place: -sizes[place]):
        if isinstance(nodes[place], _NO_PART) or not 1 < sizes[place] <= 0.6 * len(nodes):
            continue
        for hoisted in (False, True):
            main = copy.deepcopy(function)
            aux = _extracted(main, list(ast.walk(main))[place], hoisted=hoisted)
            if aux is not None and aux_use(ast.unparse(main), main.name) == _BEST:
                yield main, aux
    yield _redundant(function)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a statement that are always evaluated, and once."""
    for part in ast.iter_child_nodes(node):
        if _evaluates(node, part):
            yield part
            yield from _parts(part)


def _extracted(main: ast.FunctionDef, part: ast.AST, *, hoisted: bool) -> ast.stmt | None:
    """Put a call of ``aux`` in place of a part of the main function; return ``aux``.

    None where that would change the program. ``hoisted`` puts the call in a line of its own before the last statement.
    """
    inside = list(ast.walk(part))
    around = set(ast.walk(main)) - {main, *inside}
    inner, local = bound_by(inside), bound_by({*around, *inside})
    # Which of two equal names is meant would take an analysis of scopes.
    possible = isinstance(getattr(part, "ctx", ast.Load()), ast.Load) and not inner & bound_by(around)
    if not possible or any(isinstance(node, _BINDING) for node in inside):
        return None
    loaded = [node.id for node in inside if isinstance(node, ast.Name)]
    free = ", ".join(dict.fromkeys(name for name in loaded if name in local and name not in inner))
    aux = ast.parse(f"def {AUX}({free}):\n    return {ast.unparse(part)}").body[0]
    if not hoisted:
        replace_node(main, part, ast.parse(f"{AUX}({free})", mode="eval").body)
    elif part in _parts(main.body[-1]):
        name = next(name for name in ("part", "helped", "from_aux") if name not in local)
        replace_node(main.body[-1], part, ast.Name(name, ast.Load()))
        main.body[-1:-1] = ast.parse(f"{name} = {AUX}({free})").body
    else:
        return None
    return aux


def _redundant(function: ast.FunctionDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Return a main function that does the work itself where ``aux``, the whole of it, returns None."""
    aux, main, given = copy.deepcopy(function), copy.deepcopy(function), function.args
    aux.name = AUX
    passed = [node.arg for node in (*given.posonlyargs, *given.args)]
    passed += [f"*{given.vararg.arg}"] if given.vararg else []
    passed += [f"{node.arg}={node.arg}" for node in given.kwonlyargs]
    passed += [f"**{given.kwarg.arg}"] if given.kwarg else []
    name = next(name for name in ("value", "helped", "from_aux") if name not in bound_by(ast.walk(function)))
    call = f"{name} = {AUX}({', '.join(passed)})\nif {name} is not None:\n    return {name}"
    main.body[:0] = ast.parse(call).body
    return main, aux


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
