"""Classes of the working folder, and of plugins, by every form of name that the commands take."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = '''
from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment


class Rhyme(SingleAgentEnvironment):
    """Rhyme a word.

    Args:
        words: how many.
    """

    name = "rhyme"

    def __init__(self, words: int = 40) -> None:
        self.words = words

    def tasks(self, split):
        return DatasetTasks(self.name, split, [{"n": f"{split} {n}"} for n in range(self.words)])

    def begin(self, task):
        return task.data["n"]

    def reply(self, message):
        return Outcome({"right": 1.0})
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a file of the user's; each test gets a module name of its own."""
    (tmp_path / f"own_{tmp_path.name.replace('-', '_')}.py").write_text(ENVIRONMENT)
    return tmp_path


@pytest.fixture
def module(folder: Path) -> str:
    return next(folder.glob("own_*.py")).stem


@pytest.mark.parametrize("form", ["{}.Rhyme", "./{}.py:Rhyme", "{}.py:Rhyme", "below/{}.py:Rhyme"])
def test_a_class_of_the_working_folder_is_found(mrlm, folder: Path, module: str, form: str) -> None:
    if form.startswith("below"):
        (folder / "below").mkdir()
        (folder / f"{module}.py").rename(folder / "below" / f"{module}.py")
    name = form.format(module)
    status, out, err = mrlm("check-env", name, "--environment.words", "30")
    assert status == 0, out + err
    options = ("--model", "ToyAlgorithm", "--data", "ToyData", "--data.environment", name)
    status, out, err = mrlm("fit", *options, "--data.environment.words", "3", "--print_config")
    assert status == 0, err
    assert f"class_path: {module}.Rhyme" in out


def test_an_annotation_for_type_checkers_alone_is_left_to_the_parser(mrlm, folder: Path) -> None:
    text = ENVIRONMENT.replace("words: int = 40", "words: 'Number' = 40").replace(
        "\n\nclass Rhyme",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from numbers import Number\n\n\nclass Rhyme",
    )
    (folder / "own_checked.py").write_text(text)
    status, out, err = mrlm("check-env", "own_checked.Rhyme")
    assert status == 0, out + err


def test_a_new_process_finds_it_too(folder: Path, module: str) -> None:
    script = Path(sys.executable).with_name("mrlm")
    done = subprocess.run([script, "check-env", f"{module}.Rhyme"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_server_finds_it_and_hosts_it_under_its_name(folder: Path, module: str, monkeypatch) -> None:
    from mrlm_pl.cli.commands.serve import hosted_environments
    from mrlm_pl.runs.plugins import use_working_folder

    use_working_folder()
    Path("settings.yaml").write_text(f"./{module}.py:Rhyme: {{words: 7}}\n")
    hosted = hosted_environments([], {f"./{module}.py:Rhyme": {"words": 7}}, allow_settings=False)
    assert hosted["rhyme"]({}).tasks("train").size == 7
    assert list(hosted_environments(["parrot", "CoordinationGame"], {}, allow_settings=False)) == [
        "parrot",
        "coordination",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}.Ryhme", ("has no 'Ryhme'; did you mean 'Rhyme'?",)),
        ("{}x.Rhyme", ("there is no module '{}x'; did you mean '{}'?",)),
        ("nowhere_at_all.Rhyme", ("there is no module 'nowhere_at_all'", "working folder or on PYTHONPATH")),
        ("./{}x.py:Rhyme", ("there is no file", "did you mean '{}.py'?")),
        ("./{}.py", ("'./{}.py' is a file; name a class in it: ./{}.py:Rhyme",)),
        ("json.JSONDecoder", ("JSONDecoder",)),
    ],
)
@pytest.mark.parametrize("command", ["check-env", "serve", "fit"])
def test_a_wrong_path_is_answered_in_one_line_with_what_was_meant(mrlm, module: str, command, name, words) -> None:
    name = name.format(module)
    arguments = {
        "check-env": (name,),
        "serve": ("--environments", name, "--port", "0"),
        "fit": ("--model", "ToyAlgorithm", "--data", "ToyData", "--data.environment", name),
    }[command]
    status, _, err = mrlm(command, *arguments)
    assert status == 2, err
    assert len(err.splitlines()) == 1, err
    for word in words:
        assert word.format(*[module] * 2) in err


@pytest.mark.parametrize("command", ["check-env", "serve"])
def test_the_advised_name_is_right(mrlm, command: str) -> None:
    option = ("--environments",) if command == "serve" else ()
    _, _, err = mrlm(command, *option, "parot")
    (advised,) = re.findall(r"did you mean '(\w+)'", err)
    status, out, err = mrlm("check-env", advised)
    assert status == 0, out + err
    (known,) = re.findall(r"(?:They|Known) are:? (.+)$", mrlm(command, *option, "parot")[2], re.MULTILINE)
    assert {"parrot", "math", "coordination"} <= set(known.split(", "))


def test_a_file_named_like_another_module_is_refused(mrlm, folder: Path) -> None:
    (folder / "json.py").write_text(ENVIRONMENT)
    status, _, err = mrlm("check-env", "./json.py:Rhyme")
    assert status == 2
    assert "'./json.py:Rhyme': another module is named 'json'; rename the file" in err


@pytest.mark.parametrize(
    ("text", "line", "fault"),
    [
        ("x = 1\nimport not_there_at_all\n", 2, "ModuleNotFoundError"),
        ("def f(:\n", 1, "SyntaxError"),
        ("\n\n1/0\n", 3, "Zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_with_its_line(
    mrlm, folder: Path, text: str, line: int, fault: str
) -> None:
    name = f"broken_{fault.lower()}"
    (folder / f"{name}.py").write_text(text)
    status, _, err = mrlm("check-env", f"{name}.Rhyme")
    assert status == 2
    assert f"importing '{name}' failed: {fault}" in err
    assert f"{name}.py:{line}" in err
    assert len(err.splitlines()) == 1


def test_a_plugin_without_a_list_of_exports_brings_its_own_classes(mrlm, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "site"
    (folder / "mrlm_unlisted-1.0.dist-info").mkdir(parents=True)
    (folder / "mrlm_unlisted-1.0.dist-info" / "METADATA").write_text("Name: mrlm-unlisted\nVersion: 1\n")
    (folder / "mrlm_unlisted-1.0.dist-info" / "entry_points.txt").write_text("[mrlm_pl.plugins]\nx = mrlm_unlisted\n")
    (folder / "mrlm_unlisted.py").write_text(ENVIRONMENT.replace('"rhyme"', '"unlisted"'))
    monkeypatch.syspath_prepend(str(folder))
    status, out, err = mrlm("check-env", "unlisted")
    assert status == 0, out + err
    facts = json.loads(mrlm("info", "--json")[1])
    assert "unlisted" in [item["name"] for item in facts["environments"]]
