"""Each configuration begins with its goal and command and is listed; folders are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import CONFIGS, ROOT, code_of, commands, header

RUN = [path for path in CONFIGS if path.parent.name != "servers"]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_it_begins_with_its_goal_and_its_command(path: Path) -> None:
    text = header(path)
    assert not text.startswith(" "), "the goal comes first"
    own = [words for words in commands(code_of(text)) if path.relative_to(ROOT).as_posix() in words]
    assert own, "and then the command"
    assert own[-1][:3] == ["mrlm", "fit", "--config"]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_it_begins_with_the_commands_that_write_the_models_that_it_reads(path: Path) -> None:
    written = {words[words.index("--output") + 1] for words in commands(code_of(header(path))) if "--output" in words}
    for folder in re.findall(r"model: (runs/[\w-]+)", path.read_text()):
        assert folder in written, f"the command that writes {folder} is missing"


def test_every_configuration_is_in_the_list() -> None:
    listed = (ROOT / "configs" / "README.md").read_text()
    assert [path.name for path in CONFIGS if f"{path.name}`" not in listed] == []


def test_folders_have_at_most_twelve_entries() -> None:
    folders = [ROOT / "configs", *(path for path in (ROOT / "configs").rglob("*") if path.is_dir())]
    assert {folder.name: len(list(folder.iterdir())) for folder in folders if len(list(folder.iterdir())) > 12} == {}
