"""``mrlm init``: the package that it writes is found, tested and trained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.documents import ROOT

Command = Callable[..., tuple[int, str, str]]


def run(*words: str, folder: Path, path: Path) -> str:
    """Return the output of a Python program with a folder on its path."""
    search = os.pathsep.join([str(path), *(str(ROOT / part) for part in ("", "environments", "callbacks"))])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_package_is_written_with_every_name_filled_in(mrlm: Command) -> None:
    status, out, err = mrlm("init", "two-words", "--output", "deep/lab")
    assert status == 0, err
    assert "  deep/lab/two_words/environment.py" in out
    assert 'cd deep/lab && pip install -e ".[test]"' in out
    files = [path for path in Path("deep/lab").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if "$" in path.read_text(errors="replace")]


@pytest.mark.long
def test_its_environment_is_found_by_name_and_keeps_the_contract(mrlm: Command, tmp_path: Path) -> None:
    assert mrlm("init", "two-words", "--output", "deep/lab")[0] == 0
    information = Path("deep/lab/two_words-0.1.0.dist-info")
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: two-words\nVersion: 0.1.0\n")
    project = Path("deep/lab/pyproject.toml").read_text()
    entry = project.partition('[project.entry-points."mrlm_pl.plugins"]\n')[2].partition("\n")[0].replace('"', "")
    (information / "entry_points.txt").write_text(f"[mrlm_pl.plugins]\n{entry}\n")
    words = ("-m", "mrlm_pl.cli.main", "check-env", "two_words", "--level", "semantic")
    checked = run(*words, folder=tmp_path, path=Path("deep/lab").resolve())
    assert "ok   oracle: gold replies earn 1 on 8 tasks" in checked
    assert "FAIL" not in checked


@pytest.mark.parametrize("name", ["My-Lab", "json", "class", "a b", "-lab", "lab-", "9lab", "mrlm_pl", "tests"])
def test_a_name_that_cannot_be_imported_is_refused(name: str, mrlm: Command) -> None:
    status, _, err = mrlm("init", "--", name)
    assert (status, f"{name!r}" in err) == (2, True), err
    assert not Path(name).exists()


@pytest.mark.parametrize("name", ["debate", "length-ratio", "mrlm", "pytest-xdist"])
def test_a_name_that_would_hide_another_is_refused(name: str, mrlm: Command) -> None:
    """Two environments of one name are an error of every command; an installed package would be replaced."""
    status, _, err = mrlm("init", name)
    assert (status, f"environment or package is named {name!r}; choose another name" in err) == (2, True), err
    assert not Path(name).exists()


def test_a_folder_that_exists_is_refused(mrlm: Command) -> None:
    Path("lab").mkdir()
    Path("lab/mine.txt").write_text("mine")
    status, _, err = mrlm("init", "their-lab", "--output", "lab")
    assert (status, err) == (2, "mrlm: error: output: 'lab' exists; name another folder with `--output`\n")
    assert [path.name for path in Path("lab").iterdir()] == ["mine.txt"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("hatchling") is None, reason="the package is built with hatchling: pip install hatchling")
def test_it_installs_with_pip_passes_its_tests_and_trains(mrlm: Command, tmp_path: Path) -> None:
    status, _, err = mrlm("init", "my-lab")
    assert status == 0, err
    site = tmp_path / "site"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run("-m", "pip", "install", *options, "--target", str(site), "./my-lab", folder=Path.cwd(), path=tmp_path)
    Path("pyproject.toml").write_text("[tool.pytest.ini_options]\nabsent_option = 1\n")  # above the package
    tested = run("-m", "pytest", "-q", folder=Path("my-lab"), path=site)
    assert "6 passed" in tested
    assert "Unknown config option" not in tested
    run("-m", "mypy", folder=Path("my-lab"), path=site)
    small = ("--data.iterations", "2", "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "0")
    run("-m", "mrlm_pl.cli.main", "fit", "--config", "my-lab/config.yaml", *small, folder=Path.cwd(), path=site)
    assert Path("runs/config/policies/main/config.json").is_file()
    assert "MyLabAlgorithm" in run("-m", "mrlm_pl.cli.main", "info", folder=Path.cwd(), path=site)
