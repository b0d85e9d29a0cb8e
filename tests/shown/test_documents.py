"""What the documents show is run: Python blocks as programs, `mrlm fit` lines down to their configuration."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mrlm_pl.cli.main import COMMANDS as COMMAND_TABLE
from mrlm_pl.cli.main import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{path.name}:{path.read_text()[: match.start()].count(chr(10)) + 1}", match.group(2))
        for path in DOCUMENTS
        for match in BLOCK.finditer(path.read_text())
        if match.group(1) == language
    ]


CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "servers")
PYTHON = blocks("python")
COMMANDS = [
    (place, line.partition("#")[0].strip())
    for place, text in blocks("bash")
    for line in text.splitlines()
    if line.startswith("mrlm ")
]
FITS = [(place, line) for place, line in COMMANDS if line.split()[1] in ("fit", "validate") and "a.yaml" not in line]


@pytest.mark.parametrize(("place", "code"), PYTHON, ids=[place for place, _ in PYTHON])
def test_python_blocks_run(place: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "runs/quickstart" in code:
        from mrlm_pl.episode import Episode, Message, Task, Trajectory
        from mrlm_pl.episode_files import write_episodes

        row = Trajectory("agent", "main", (), (), (), (), (Message("user", "2+2?"),))
        episode = Episode("0", Task("math", "train", 0), "g", 0, 0, {"agent": (row,)}, "answered")
        write_episodes(tmp_path / "runs/quickstart/episodes/iteration-000000.jsonl.gz", [episode])
    monkeypatch.chdir(tmp_path)
    exec(compile(code, place, "exec"), {"__name__": "document"})


@pytest.mark.parametrize(("place", "line"), FITS, ids=[f"{place} {line}" for place, line in FITS])
def test_fit_lines_parse(place: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [word for word in shlex.split(line)[1:] if not word.startswith("--print_config")]
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main([*arguments, "--print_config"]))
    assert stop.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_parses(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(main(["fit", "--config", str(path), "--print_config"]))
    assert stop.value.code == 0, capsys.readouterr().err


def test_the_documents_name_only_commands_that_exist() -> None:
    known = set(COMMAND_TABLE)
    assert {line.split()[1] for _, line in COMMANDS} <= known
    assert len(COMMANDS) > 8, "the pattern finds the lines"


def test_files_that_the_documents_link_to_exist() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name} links to {target}"
