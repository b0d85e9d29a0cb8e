"""Python blocks of the documents run and print the text below them, YAML blocks configure runs, linked files exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrlm_pl.sandbox import strongest
from tests.support.documents import DOCUMENTS, OWN_MODULE, ROOT, blocks, dedented, outputs, parse

PYTHON = blocks("python")
YAML = blocks("yaml")
OUTPUTS = outputs()

PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "policies": lambda value: {"model": {"init_args": {"policies": value}}},
    "seats": lambda value: {"model": {"init_args": {"seats": value}}},
    "environment": lambda value: {"data": {"init_args": {"environment": value}}},
    "judge": lambda value: PLACES["environment"]({"class_path": "DebateEnvironment", "init_args": {"judge": value}}),
    "sandbox": lambda value: PLACES["environment"]({"class_path": "CodeEnvironment", "init_args": {"sandbox": value}}),
}
"""Places in a configuration of blocks that begin with an inner key."""


@pytest.mark.parametrize(("place", "code"), PYTHON, ids=[place for place, _ in PYTHON])
def test_python_blocks_run_and_print_their_output(
    place: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "ShellEnvironment" in code and strongest()[0] != "namespaces":
        pytest.skip("the environment shell needs namespaces")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    short = re.sub(r"iterations=\d+", "iterations=1", code).replace("num_episodes=500", "num_episodes=4")
    names: dict[str, Any] = {"__name__": "document"}
    with own_modules(place):
        exec(compile(short, place, "exec"), names)
    assert names.keys() - {"__name__", "__builtins__"}, "the block did something"
    printed = capsys.readouterr().out
    assert prints(OUTPUTS.get(code, printed), printed), f"{place} prints\n{printed}"


def prints(shown: str, printed: str) -> bool:
    """Return whether a text is the printed one, with ``...`` for any part of it."""
    return OutputChecker().check_output(shown, printed, ELLIPSIS)


def test_shown_outputs_are_found_and_compared() -> None:
    assert len(OUTPUTS) >= 8
    assert all(code in {code for _, code in PYTHON} for code in OUTPUTS)
    assert prints("reward ...\n", "reward 1.0\n")
    assert not prints("reward 0.5\n", "reward 1.0\n")


def as_configuration(block: str) -> dict[str, Any]:
    """Return a minimal configuration with the settings of a YAML block."""
    whole: dict[str, Any] = {
        "model": {"class_path": "GRPO", "init_args": {"policies": {"main": {"model": "builtin:tiny"}}}},
        "data": {"class_path": "RolloutDataModule", "init_args": {"environment": {"class_path": "MathEnvironment"}}},
    }
    for key, value in yaml.safe_load(dedented(block)).items():
        for group, given in PLACES.get(key, lambda value, key=key: {key: value})(value).items():
            if group not in whole:
                whole[group] = given
                continue
            whole[group]["class_path"] = given.get("class_path", whole[group]["class_path"])
            arguments = {name: item for name, item in given.items() if name not in ("class_path", "init_args")}
            whole[group]["init_args"].update(given.get("init_args", arguments))
    return whole


@pytest.mark.parametrize(("place", "block"), YAML, ids=[place for place, _ in YAML])
def test_yaml_blocks_are_configurations(place: str, block: str, mrlm: object) -> None:
    assert status_of(block, place) == 0


@contextmanager
def own_modules(place: str = "") -> Iterator[None]:
    """Write the reader's own modules for a while: stand-ins, and those that the page shows under their names."""
    files = {"my_rewards.py": (ROOT / "examples/questions/rewards.py").read_text(), "my_file.py": OWN_MODULE}
    for found, code in PYTHON:
        named = re.match(r"# (\w+\.py)\n", code)
        if named and found.partition(":")[0] == place.partition(":")[0]:
            files[named[1]] = code
    for name, code in files.items():
        Path(name).write_text(code)
    yield
    for name in files:
        sys.modules.pop(Path(name).stem, None)  # the next page has others


def status_of(block: str, place: str = "") -> int:
    evaluates = isinstance(yaml.safe_load(dedented(block)).get("model"), list)  # several models of `mrlm eval`
    Path("shown.yaml").write_text(dedented(block) if evaluates else yaml.safe_dump(as_configuration(block)))
    with own_modules(place):
        return parse(["mrlm", "eval" if evaluates else "fit", "--config", "shown.yaml"])


@pytest.mark.parametrize(
    "block",
    [
        "data: {curriculum: {flor: 0.2}}",
        "data: {task_settings: {sums: {grup_size: 16}}}",
        "policies: {main: {modle: builtin:tiny}}",
        "environment: {class_path: MathEnvironment, init_args: {dta: a.jsonl}}",
        "judge: {class_path: RewardModelJudge, init_args: {modl: {class_path: RewardModel}}}",
        "  sandbox: {minimun: landlock}",
        "trainer: {precison: bf16-mixed}",
        "environment: {class_path: my_file.OurEnvironment}",
    ],
)
def test_a_mistake_in_a_block_is_found(block: str, mrlm: object) -> None:
    assert status_of(block) == 2


def test_files_that_the_documents_link_to_exist() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text() if path.is_file() else ""):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name} links to {target}"
