"""Imports point down the ordered list of packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "mrlm_pl": ROOT / "mrlm_pl",
    "mrlm_environments": ROOT / "environments" / "mrlm_environments",
    "mrlm_callbacks": ROOT / "callbacks" / "mrlm_callbacks",
}
FLOORS = [
    {"errors", "seeding", "grouping"},
    {"episode"},
    {"settings", "compressed_files", "durable_files", "model_folders", "turn_tree"},
    {"episode_files"},
    {"concurrency"},
    {"environment"},
    {"sandbox"},
    {"losses"},
    {"advantages"},
    {"rewards"},
    {"answers"},
    {"trainer"},
    {"policy"},
    {"engines"},
    {"reward_models"},
    {"serving"},
    {"rollout"},
    {"evaluation"},
    {"learner"},
    {"algorithms"},
    {"data"},
    {"runs"},
    {"viewer"},
    {"cli"},
]
"""From the ground up: a package imports only packages above it in this list."""

GENERATED = ("_pb2.py", "_pb2_grpc.py")


def module_name(path: Path, source: str, root: Path) -> str:
    parts = (source, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {
    module_name(path, source, root): path
    for source, root in SOURCES.items()
    for path in sorted(root.rglob("*.py"))
    if not path.name.endswith(GENERATED)
}


def imported(tree: ast.AST, modules: set[str] | dict[str, Path] = MODULES) -> Iterator[tuple[str, str]]:
    """Return the project's modules that a module imports anywhere, each with the imported name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in modules:
                    yield inner, ""
                elif node.module in modules:
                    yield node.module, alias.name
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name in modules)


@cache
def trees() -> dict[str, ast.AST]:
    """Return the syntax tree of each module."""
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports() -> dict[str, list[tuple[str, str]]]:
    """Return the imports of each module."""
    return {name: list(imported(tree)) for name, tree in trees().items()}


def floor(module: str) -> int:
    """Return a module's place in the list; the package itself and plugins are above all."""
    package, _, rest = module.partition(".")
    if package != "mrlm_pl" or not rest:
        return len(FLOORS)
    return next(number for number, names in enumerate(FLOORS) if rest.partition(".")[0] in names)


def upward(imports: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Return the imports of packages that are not above the importing one."""
    return [
        f"{name} imports {other}"
        for name, found in imports.items()
        if name.startswith("mrlm_pl.")
        for other, _ in found
        if other.partition(".")[0] != "mrlm_pl" or (floor(other) >= floor(name) and not same_package(name, other))
    ]


def same_package(one: str, other: str) -> bool:
    return one.split(".")[:2] == other.split(".")[:2]


def circles(imports: dict[str, list[tuple[str, str]]]) -> list[list[str]]:
    """Return the import cycles, including imports for type checkers."""
    graph = {name: {other for other, _ in found if other != name} for name, found in imports.items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = []
            while True:
                group.append(stack.pop())
                if group[-1] == name:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def private_imports(imports: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Return imports of private names or modules across modules."""
    return [
        f"{name} imports {taken} from {other}"
        for name, found in imports.items()
        for other, taken in found
        if (taken.startswith("_") and not taken.startswith("__")) or other.rpartition(".")[2].startswith("_")
    ]


def names_read(tree: ast.AST) -> set[str]:
    """Return the names of the attributes that a module reads, including by ``getattr`` and similar functions."""
    nodes = list(ast.walk(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return attributes | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def stored(method: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Return the constructor's arguments that it stores unchanged, with their attributes."""
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=False) if pair else [(target, node.value)]
            for to, value in pairs:
                if isinstance(to, ast.Attribute) and isinstance(value, ast.Name):
                    yield value.id, to.attr


def unread_arguments(tree: ast.AST, read_anywhere: set[str]) -> list[str]:
    """Return constructor arguments that their class does not read, or stores in an unread attribute."""
    found = []
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for method in cls.body:
            if not (isinstance(method, ast.FunctionDef) and method.name == "__init__"):
                continue
            read = {item.id for item in ast.walk(method) if isinstance(item, ast.Name)}
            arguments = (*method.args.args[1:], *method.args.kwonlyargs)
            lost = {name for name, attribute in stored(method) if attribute not in read_anywhere}
            found += [f"{cls.name}({item.arg})" for item in arguments if item.arg not in read or item.arg in lost]
    return found


def test_every_package_has_its_place() -> None:
    known = {name for names in FLOORS for name in names}
    assert {name.split(".")[1] for name in MODULES if name.startswith("mrlm_pl.")} == known


def missing(tree: ast.AST) -> list[str]:
    """Return imported modules and names of the project that do not exist."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in SOURCES):
            continue
        if "_pb2" in node.module or any("_pb2" in alias.name for alias in node.names):
            continue
        if node.module not in MODULES:
            found.append(node.module)
    return found


def test_what_is_imported_exists() -> None:
    assert [(name, found) for name, tree in trees().items() if (found := missing(tree))] == []


def test_imports_point_down() -> None:
    assert upward(imports()) == []


def test_no_modules_import_each_other() -> None:
    assert circles(imports()) == []


def test_private_names_stay_in_their_module() -> None:
    assert private_imports(imports()) == []


def test_every_argument_of_a_constructor_is_read() -> None:
    read = set().union(*map(names_read, trees().values()))
    assert [(name, found) for name, tree in trees().items() if (found := unread_arguments(tree, read))] == []


def test_the_checks_find_planted_faults() -> None:
    planted = {
        "mrlm_pl.losses.planted": [("mrlm_pl.data.rollout.module", "RolloutDataModule")],
        "mrlm_pl.episode": [("mrlm_environments.math", "")],
        "mrlm_pl.engines.one": [("mrlm_pl.engines.two", "_hidden")],
        "mrlm_pl.engines.two": [("mrlm_pl.engines.one", "")],
    }
    assert upward(planted) == [
        "mrlm_pl.losses.planted imports mrlm_pl.data.rollout.module",
        "mrlm_pl.episode imports mrlm_environments.math",
    ]
    assert circles(planted) == [["mrlm_pl.engines.one", "mrlm_pl.engines.two"]]
    assert private_imports(planted) == ["mrlm_pl.engines.one imports _hidden from mrlm_pl.engines.two"]
    tree = ast.parse(
        "class A:\n    def __init__(self, a, b, c):\n        self.a, self.b = a, b\n    def read(self):\n        self.a"
    )
    assert unread_arguments(tree, names_read(tree)) == ["A(b)", "A(c)"]


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=str)
def test_a_folder_has_few_entries(folder: Path) -> None:
    hidden = {"__init__.py", "__init__.pyi", "__pycache__", "py.typed"}
    entries = {item.name.partition("_pb2")[0] for item in folder.iterdir() if item.name not in hidden}
    assert len(entries) <= MANY.get(folder.relative_to(ROOT).as_posix(), 14), sorted(entries)


MANY = {"mrlm_pl/algorithms": 40, "mrlm_pl/cli/commands": 20, "mrlm_pl": 30, "environments/mrlm_environments": 24}
"""Folders with one file per algorithm or command, or one folder per package or environment."""

ELSEWHERE = "mrlm_environments.adapters.chat_harness"
"""Only the virtual environment of verifiers can import it."""
ENVIRONMENTS = [name for name in MODULES if name.startswith("mrlm_environments") and name != ELSEWHERE]
LIGHT_MODULES = [
    "mrlm_pl",
    "mrlm_pl.episode",
    "mrlm_pl.environment",
    "mrlm_pl.environment.rows",
    "mrlm_pl.sandbox",
    "mrlm_pl.serving.verifiers.client",
    "mrlm_pl.serving.verifiers.asking",
    "mrlm_pl.serving.verifiers.service",
    "mrlm_pl.reward_models.model",
]


def test_environments_start_without_torch() -> None:
    """One process imports all of them: if none of these imports loads torch, none of them alone does."""
    code = (
        "import importlib, sys\n"
        f"for module in {[*LIGHT_MODULES, *ENVIRONMENTS]}:\n"
        "    importlib.import_module(module)\n"
        "    heavy = sorted({'torch', 'transformers', 'lightning'} & set(sys.modules))\n"
        "    assert not heavy, f'{module} imports {heavy}'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_script_that_trains_here_imports_no_servers() -> None:
    packages = "mrlm_pl.algorithms, mrlm_pl.data, mrlm_pl.runs"
    code = f"import sys, {packages}; print(sorted({{'grpc', 'aiohttp', 'ray'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
