"""Makes the programs of a helper ``aux`` and of a main function, which uses it, from a known solution."""

from __future__ import annotations

import ast
import copy
import itertools

from mrlm_environments.code.syntax import METHOD
from mrlm_environments.collaborative_coding.aux_use import AUX, function_of, own_nodes
from mrlm_pl.sandbox import bound_names
from mrlm_pl.sandbox.inside.grader import bound_by


def split_solution(solution: str, entry: str) -> tuple[str, str]:
    """Return programs of the helper and of the main agent that earn full marks where the solution passes the tests.

    ``aux`` does the work of the solution and returns its value in a list, out of which the main function takes it, so
    that without ``aux`` it has nothing. Other functions of the solution are the helper's.

    Raises:
        ValueError: the solution does not define the function.
    """
    tree = _without_aux(ast.parse(solution))
    function = function_of(tree, entry)
    if not isinstance(function, ast.FunctionDef):
        raise ValueError(f"the solution does not define {entry}")
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    helpers = [node for node in tree.body if not (isinstance(node, METHOD) and node.name == entry)]
    main, aux = _divide(function)
    return ast.unparse(ast.Module([*helpers, aux], [])), ast.unparse(ast.Module([*imports, main], []))


def _without_aux(tree: ast.Module) -> ast.Module:
    """Return the solution with its own ``aux`` renamed."""
    used_names = {inner.id for inner in ast.walk(tree) if isinstance(inner, ast.Name)} | bound_names(ast.unparse(tree))
    fresh = next(name for number in itertools.count(1) if (name := f"{AUX}_{number}") not in used_names)
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


def _divide(function: ast.FunctionDef) -> tuple[ast.FunctionDef, ast.FunctionDef]:
    """Return the main function, and ``aux`` with the whole of the function's body."""
    aux, main, parameters = copy.deepcopy(function), copy.deepcopy(function), function.args
    aux.name = AUX
    if not isinstance(aux.body[-1], ast.Return):
        aux.body += ast.parse("return None").body
    for node in own_nodes(aux.body):
        if isinstance(node, ast.Return):
            node.value = ast.List([node.value or ast.Constant(None)], ast.Load())
    arguments = [node.arg for node in (*parameters.posonlyargs, *parameters.args)]
    arguments += [f"*{parameters.vararg.arg}"] if parameters.vararg else []
    arguments += [f"{node.arg}={node.arg}" for node in parameters.kwonlyargs]
    arguments += [f"**{parameters.kwarg.arg}"] if parameters.kwarg else []
    name = next(name for name in ("found", "helped", "from_aux") if name not in bound_by(ast.walk(parameters)))
    main.body = ast.parse(f"{name} = {AUX}({', '.join(arguments)})\nreturn {name}[0]").body
    return main, aux
