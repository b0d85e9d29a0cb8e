"""Classes of the working folder, and of plugins, by every form of name that the commands take."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks.timer import Interval

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
    """A working folder with a file of the user's; each test gets its own module name."""
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


def test_a_default_that_is_a_text_by_its_base_class_is_printed_as_text(mrlm) -> None:
    timer = "[{class_path: Timer, init_args: {duration: '00:01:00:00'}}]"  # whose `interval` is an enumeration's
    options = ("--model", "ToyAlgorithm", "--data", "ToyData", "--trainer.callbacks", timer, "--print_config")
    status, out, err = mrlm("fit", *options)
    assert status == 0, err
    assert "interval: step\n" in out
    with pytest.raises(yaml.representer.RepresenterError):  # other programs in the process keep PyYAML's dumper
        yaml.safe_dump(Interval.step)


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
    ("name", "remedy"), [("my-rhymes", "my_rhymes.py"), ("rhymes.v2", "rhymes_v2.py"), ("2048", "_2048.py")]
)
def test_a_file_that_is_no_module_is_refused(mrlm, folder: Path, name: str, remedy: str) -> None:
    (folder / f"{name}.py").write_text(ENVIRONMENT)
    status, _, err = mrlm("check-env", f"./{name}.py:Rhyme")
    assert status == 2
    assert f"{name!r} is no name of a Python module; rename the file, as in {remedy}" in err


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


@pytest.fixture
def install(tmp_path: Path, monkeypatch) -> Callable[[str, str], None]:
    """Return a function that makes a module visible as a plugin."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def installed(name: str, text: str) -> None:
        information = tmp_path / "site" / f"{name}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: 1\n")
        (information / "entry_points.txt").write_text(f"[mrlm_pl.plugins]\nx = {name}\n")
        (tmp_path / "site" / f"{name}.py").write_text(text)

    return installed


@pytest.mark.parametrize("source", ["collections.abc", "typing"])
@pytest.mark.parametrize("annotation", ["Callable", "list[Callable] | None", "Callable[..., float]"])
def test_a_parameter_of_functions_needs_no_signature(mrlm, folder: Path, module: str, source: str, annotation: str):
    path = folder / f"{module}.py"
    own = path.read_text().replace("words: int = 40", f"score: {annotation}, words: int = 40")
    own = own.replace("self.words =", f"assert callable(score[0] if {'list' in annotation} else score); self.words =")
    path.write_text(f"from {source} import Callable\n{own}\n\ndef half(text):\n    return 0.5\n")
    function = f"[./{module}.py:half]" if "list" in annotation else f"{module}.half"
    status, out, err = mrlm("check-env", f"{module}.Rhyme", "--environment.score", function)
    assert status == 0, out + err


def test_a_plugin_without_a_list_of_exports_brings_its_own_classes(mrlm, install) -> None:
    install("mrlm_unlisted", ENVIRONMENT.replace('"rhyme"', '"unlisted"'))
    status, out, err = mrlm("check-env", "unlisted")
    assert status == 0, out + err
    facts = json.loads(mrlm("info", "--json")[1])
    assert "unlisted" in [item["name"] for item in facts["environments"]]


@pytest.fixture
def questions(outside_the_repository) -> tuple[str, ...]:
    """Return a command that asks questions and rewards the replies by the function whose name follows."""
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(60)]
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("check-env", "QuestionEnvironment", "--environment.data", "sums.jsonl", "--environment.rewards")


@pytest.mark.parametrize("name", ["brief_reply", "mrlm_toy.brief_reply", "{call: brief_reply, weight: 2}"])
def test_a_function_of_a_plugin_is_found_by_its_name(mrlm, questions, name: str) -> None:
    status, out, err = mrlm(*questions, f"[{name}]")
    assert status == 0, out + err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("brief_repyl", "no plugin exports a function 'brief_repyl'; did you mean 'brief_reply'? Otherwise give its"),
        ("xyz", "no plugin exports a function 'xyz'; give its import path, as in `my_module.my_function` or `./my_f"),
        ("ParrotEnvironment", "no plugin exports a function 'ParrotEnvironment'; "),
        ("Marks", "no plugin exports a function 'Marks'; "),
        ("marks", "several functions are named 'marks'; give the path of one: mrlm_marks.marks, mrlm_other_marks.mark"),
    ],
)
def test_a_name_of_no_function_or_of_several_is_answered_in_one_line(mrlm, questions, install, name, told) -> None:
    function = "from collections.abc import Callable\nMarks = Callable[[str], float]\ndef marks(reply, row): return 1\n"
    install("mrlm_marks", function + "__all__ = ['Marks', 'marks']\n")
    install("mrlm_other_marks", function)
    status, _, err = mrlm(*questions, f"[{name}]")
    assert (status, told in err, len(err.splitlines())) == (2, True, 1), err


def test_a_function_that_two_plugins_export_is_one(mrlm, questions, install) -> None:
    install("mrlm_shared", "def shared(reply, row):\n    return 1\n")
    install("mrlm_sharing", "from mrlm_shared import shared\n\n__all__ = ['shared']\n")
    status, out, err = mrlm(*questions, "[shared]")
    assert status == 0, out + err


def test_another_choice_of_a_parameter_is_no_function(mrlm, install) -> None:
    install("mrlm_centered", "def group_centered(rewards, groups):\n    return rewards\n")
    command = ("fit", "--model", "GRPO", "--data", "ToyData", "--print_config", "--model.advantage")
    status, out, err = mrlm(*command, "group_centered")
    assert (status, "advantage: group_centered" in out) == (0, True), out + err
    status, _, err = mrlm(*command, "brief_repyl")
    assert "did you mean 'brief_reply'?" in err
    assert status == 2


@pytest.mark.parametrize("calls", [False, True])
def test_help_and_errors_list_the_options_of_the_loss_where_it_is_used(mrlm, calls: bool) -> None:
    name = f"own_loss_{calls}".lower()
    Path(f"{name}.py").write_text(
        "from mrlm_pl import GRPO\n\n\nclass OwnLoss(GRPO):\n"
        f"{'    uses_loss = True' if calls else ''}\n\n"
        "    def token_losses(self, logp, old_logp, rows):\n        return -rows.advantages * logp, {}\n"
    )
    status, out, err = mrlm("fit", "--model.help", f"./{name}.py:OwnLoss")
    assert (status, "--model.kl.coefficient" in out) == (0, True), err
    options = ("--model.loss ", "--model.loss_settings ", "--model.clip.low ")
    assert [option in out for option in options] == [calls] * 3
    _, _, err = mrlm("fit", "--model", f"./{name}.py:OwnLoss", "--model.absent_one", "1")
    assert ("loss, loss_settings, clip, " in err, "reduction, " in err) == (calls, True), err


def test_another_class_does_not_get_a_loss_that_it_does_not_use(mrlm) -> None:
    Path("own_losses.py").write_text(
        "from mrlm_pl import GRPO\n\n\nclass OwnLoss(GRPO):\n"
        "    def token_losses(self, logp, old_logp, rows):\n        return -rows.advantages * logp, {}\n"
    )
    Path("old.yaml").write_text("model: {class_path: GRPO, init_args: {loss: sapo, gamma: 0.5}}\n")
    command = ("fit", "--config", "old.yaml", "--data", "ToyData", "--print_config", "--model")
    status, _, err = mrlm(*command, "./own_losses.py:OwnLoss")
    assert (status, "OwnLoss does not accept 'sapo', which was set for GRPO; remove it" in err) == (2, True), err
    status, out, err = mrlm(*command, "{class_path: own_losses.OwnLoss, init_args: {}}")
    assert (status, "sapo" in out, "gamma: 0.5" in out) == (0, False, True), err


@pytest.mark.parametrize("option", ["--model", "--data.environment"])
def test_a_function_in_place_of_a_class_is_refused_by_name(mrlm, option: str) -> None:
    module = f"own_rules_of_{option.rpartition('.')[2].strip('-')}"
    Path(f"{module}.py").write_text("def rule(rewards, groups):\n    return rewards\n")
    Path("run.yaml").write_text("model: {class_path: GRPO, init_args: {gamma: 0.5}}\ndata: {class_path: ToyData}\n")
    status, _, err = mrlm("fit", "--config", "run.yaml", option, f"./{module}.py:rule")
    assert (status, f"{module}.rule is a function, not a class" in err, len(err.splitlines())) == (2, True, 1), err
