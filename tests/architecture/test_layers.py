"""Imports point down: the layer table of the design, held against the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mrlm_pl"
LAYERS = {
    "episode": 0,
    "errors": 0,
    "seeding": 0,
    "settings": 0,
    "nearest": 0,
    "intervals": 0,
    "number_answers": 0,
    "agent_measures": 1,
    "whole_files": 0,
    "json_schemas": 0,
    "environment": 1,
    "environment_check": 1,
    "tools": 1,
    "cross_policy": 1,
    "batch": 1,
    "losses": 1,
    "advantages": 1,
    "rewards": 1,
    "sandbox": 2,
    "policy": 2,
    "engines": 2,
    "verifier": 2,
    "remote": 2,
    "event_loop": 2,
    "stepping": 2,
    "hosting": 2,
    "sharded_checkpoint": 2,
    "strategies": 3,
    "resume": 3,
    "play": 3,
    "rollout": 3,
    "turn_tree": 3,
    "evaluation": 3,
    "evaluation_agents": 3,
    "evaluation_comparison": 3,
    "data": 4,
    "algorithms": 4,
    "runs": 5,
    "cli": 6,
}
# Reading a data file needs no torch and no model: environments use it, so it counts as a record module.
LIGHT = {"data.rows": 1}


def imported_modules(path: Path) -> set[str]:
    """Dotted names below ``mrlm_pl`` that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mrlm_pl"):
            names.add(node.module.removeprefix("mrlm_pl").lstrip("."))
        elif isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("mrlm_pl.") for alias in node.names if alias.name.startswith("mrlm_pl.")}
    return names - {""}


def layer(module: str) -> int:
    for name, number in LIGHT.items():
        if module == name or module.startswith(name + "."):
            return number
    return LAYERS[module.partition(".")[0]]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    above = {name for name in imported_modules(path) if layer(name) > layer(own)}
    assert not above, f"{own} (layer {layer(own)}) imports upward: {sorted(above)}"


def test_the_package_never_imports_plugins() -> None:
    for path in FILES:
        assert "mrlm_environments" not in path.read_text() or path.parent.name == "cli", path


ENVIRONMENTS = [
    f"mrlm_environments.{path.stem}"
    for path in sorted((ROOT / "environments" / "mrlm_environments").glob("*.py"))
    if path.stem != "__init__"
]
LIGHT_MODULES = [
    "mrlm_pl.episode",
    "mrlm_pl.environment",
    "mrlm_pl.data.rows",
    "mrlm_pl.sandbox",
    "mrlm_pl.verifier.client",
    "mrlm_pl.verifier.asking",
    "mrlm_pl.verifier.model",
    "mrlm_pl.verifier.service",
    "mrlm_environments",
]


@pytest.mark.parametrize("module", [*LIGHT_MODULES, *ENVIRONMENTS])
def test_environments_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'lightning'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_script_that_trains_here_imports_no_servers() -> None:
    packages = "mrlm_pl.algorithms, mrlm_pl.data, mrlm_pl.runs"
    code = f"import sys, {packages}; print(sorted({{'grpc', 'aiohttp', 'ray'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
