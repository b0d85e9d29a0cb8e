"""A bug in a user's own class ends in one line with the user's file and line; mistakes in files name file and line."""

import re
from pathlib import Path

import pytest

OWN = """
from mrlm_pl.algorithms import GRPO
from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment


class Bug(SingleAgentEnvironment):
    name = "bug"

    def tasks(self, split):
        return DatasetTasks(self.name, split, [{"n": f"{split} {n}"} for n in range(9)])

    def begin(self, task):
        return task.data["n"]

    def reply(self, message):
        return Outcome({"a": 1 / 0})  # the bug


class Number(Bug):
    name = "number"

    def reply(self, message):  # begins here
        return 1.0


class Forgot(SingleAgentEnvironment):  # has no tasks
    name = "forgot"

    def begin(self, task):
        return "x"

    def reply(self, message):
        return Outcome({"a": 1.0})


class Raises(Bug):
    name = "raises"

    def __init__(self, size: int = 3):
        self.x = {}["missing"]  # raises


class Absent(Bug):
    name = "absent"

    def tasks(self, split):
        return DatasetTasks(self.name, split, open("nowhere.json").read())  # not there


class Other(Bug):
    name = "other"

    def tasks(self, split):  # of another name
        return DatasetTasks("ohter", split, [{"n": f"{split} {n}"} for n in range(9)])


class Untyped(GRPO):  # no hints
    def __init__(self, policies=None, seats=None, bonus=1.0):
        super().__init__(policies, seats)
"""
QUICK = (
    *("--data", "RolloutDataModule", "--data.groups", "1", "--data.group_size", "2", "--data.iterations", "1"),
    *("--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"),
    *("--trainer.limit_val_batches", "0"),
)


@pytest.fixture
def module(tmp_path: Path) -> str:
    name = f"mistakes_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    return name


def line_of(comment: str) -> int:
    return next(number for number, line in enumerate(OWN.splitlines(), start=1) if line.endswith(f"# {comment}"))


@pytest.mark.parametrize(
    ("cls", "fault", "comment"),
    [
        ("Bug", "ZeroDivisionError", "the bug"),
        ("Number", "reply returned 1.0 (float); return an Outcome", "begins here"),
        ("Forgot", "does not define tasks", "has no tasks"),
        ("Raises", "Raises cannot be made: KeyError: 'missing'", "raises"),
        ("Absent", "No such file or directory: 'nowhere.json'", "not there"),
        ("Other", "its tasks are made for 'ohter'; give DatasetTasks `self.name`", "of another name"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "check-env", "eval"])
@pytest.mark.long_after(6)
def test_a_bug_in_an_environment_is_told_with_file_and_line(
    mrlm, caplog, module: str, command, cls, fault, comment
) -> None:
    arguments = {
        "fit": ("--model", "GRPO", *QUICK, "--data.environment", f"{module}.{cls}"),
        "check-env": (f"{module}.{cls}",),
        "eval": ("--model", "builtin:tiny", "--environment", f"{module}.{cls}", "-n", "2"),
    }[command]
    status, out, err = mrlm(command, *arguments)
    assert status in (1, 2)
    logged = "\n".join(record.getMessage() for record in caplog.records)
    told = [line for line in (out + err + logged).splitlines() if fault in line]
    assert told, out + err
    assert len(told) == 1 or command == "check-env", "each check reports its fault"
    assert f"{module}.py:{line_of(comment)}" in told[0]
    assert "Traceback" not in out + err


def test_the_advised_check_finds_the_fault(mrlm, module: str) -> None:
    _, _, err = mrlm("fit", "--model", "GRPO", *QUICK, "--data.environment", f"./{module}.py:Number")
    (command,) = re.findall(r"try `mrlm (check-env [^`]+)`", err)
    status, out, _ = mrlm(*command.split())
    assert status == 1
    assert "reply returned 1.0 (float)" in out


def test_an_algorithm_without_type_hints_is_told_which_one_is_missing(mrlm, module: str) -> None:
    options = (*QUICK, "--data.environment", "parrot", "--model.policies.main.learning_rate", "1e-3")
    status, _, err = mrlm("fit", "--model", f"{module}.Untyped", *options)
    assert status == 2
    assert "model.policies.main.learning_rate: the parameter 'policies' of Untyped has no type hint" in err
    assert f"{module}.py:{line_of('no hints')}" in err
    assert len(err.splitlines()) == 1


def test_a_missing_type_hint_is_named_also_where_the_setting_was_made_for_another_algorithm(mrlm, module: str) -> None:
    Path("run.yaml").write_text(
        "model: {class_path: GRPO, init_args: {policies: {main: {model: 'builtin:tiny', learning_rate: 1.0e-3}}}}\n"
    )
    status, _, err = mrlm("fit", "--config", "run.yaml", "--model", f"{module}.Untyped", "--data", "RolloutDataModule")
    assert status == 2
    assert "the parameter 'policies' of Untyped has no type hint" in err
    assert len(err.splitlines()) == 1


FILE = ("--data", "TrajectoryDataModule", "--data.train", "x.jsonl")


@pytest.mark.parametrize(
    ("arguments", "advised", "said"),
    [
        (
            ("--model", "SFT", *QUICK, "--data.environment", "parrot"),
            "TrajectoryDataModule",
            "SFT does not learn from rollouts",
        ),
        (
            ("--model", "DPO", *QUICK, "--data.environment", "parrot"),
            "PreferenceDataModule",
            "DPO does not learn from rollouts",
        ),
        (("--model", "GRPO", *FILE), "RolloutDataModule", "TrajectoryDataModule is for SFT, not for GRPO;"),
        (("--model", "DPO", *FILE), "PreferenceDataModule", "TrajectoryDataModule is for SFT, not for DPO;"),
    ],
)
def test_an_algorithm_with_the_data_of_another_is_told_its_own(mrlm, arguments, advised: str, said: str) -> None:
    from mrlm_pl import data

    Path("x.jsonl").write_text('{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n')
    Path("runs/run").mkdir(parents=True)
    Path("runs/run/config.yaml").touch()
    status, _, err = mrlm("fit", *arguments)
    assert status == 2
    assert "earlier run" not in err, "a run that did not begin says nothing of its folder"
    assert [path.name for path in Path("runs").iterdir()] == ["run"]
    assert said in err
    needed = "environment ENVIRONMENT" if advised == "RolloutDataModule" else "train TRAIN"
    assert f" `--data '{{class_path: {advised}, init_args: {{}}}}' --data.{needed}`" in err
    assert advised in data.__all__


FILES = {
    "indentation": ("model:\n  class_path: GRPO\n   init_args: {}\n", "wrong.yaml, line 3"),
    "tab": ("model:\n\tclass_path: GRPO\n", "wrong.yaml, line 2"),
    "empty": ("", "wrong.yaml is empty"),
    "comments alone": ("# to do\n", "wrong.yaml is empty"),
    "list": ("- model\n", "wrong.yaml, line 1: a configuration is a mapping"),
    "twice": (
        "trainer:\n  max_epochs: 1\n  max_epochs: 2\n",
        "wrong.yaml, line 3: the key 'max_epochs' is in line 2",
    ),
    "policy key": (
        "model:\n  class_path: GRPO\n  init_args:\n    policies:\n      main:\n        lerning_rate: 1.0e-3\n",
        "did you mean 'learning_rate'? It accepts: model, learning_rate",
    ),
    "policy key's line": (
        "model:\n  class_path: GRPO\n  init_args:\n    policies:\n      main:\n        lerning_rate: 1.0e-3\n",
        "(wrong.yaml, line 6)",
    ),
    "algorithm key": ("model:\n  class_path: GRPO\n  init_args:\n    advantagee: 3\n", "(wrong.yaml, line 4)"),
    "number for settings": (
        "model:\n  class_path: GRPO\n  init_args:\n    correction: 1.0e9\n",
        "model.correction: expected settings of Correction (kind, level, cap, low, high), but the value is 1000000000",
    ),
    "null for settings": (
        "model:\n  class_path: GRPO\n  init_args:\n    kl: null\n",
        "model.kl: expected settings of KL (coefficient, estimator, placement, target, horizon), but the value is null",
    ),
    "number for one of two settings": (
        "data:\n  class_path: RolloutDataModule\n  init_args:\n    save_episodes: 5\n",
        "name them, as in `{every: VALUE}` or `--data.save_episodes.every VALUE`",
    ),
    "arguments": (
        "model:\n  class_path: GRPO\n  init_args: [1]\n",
        "wrong.yaml, line 3: init_args are a mapping, as in",
    ),
    "list of policies": ("model: {class_path: GRPO, init_args: {policies: [main]}}\n", "model.policies: expected "),
    "a policy's class without arguments": (
        "model: {init_args: {policies: {main: {class_path: x/y, init_args: null}}}}\n",
        "policies.main: model 'x/y' is neither",
    ),
    "seed": (f"seed_everything: {10**30}\n", "seed_everything"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_mistake_in_a_file_is_one_line_with_its_place(mrlm, mistake: str) -> None:
    text, told = FILES[mistake]
    Path("wrong.yaml").write_text(text)
    status, _, err = mrlm("fit", "--model", "GRPO", *QUICK, "--data.environment", "parrot", "--config", "wrong.yaml")
    assert status == 2
    assert told in err
    assert len(err.splitlines()) == 1, err


def test_the_help_of_an_algorithm_has_the_settings_of_policies(mrlm) -> None:
    status, out, _ = mrlm("fit", "--model.help", "GRPO")
    assert status == 0
    assert "--model.policies.NAME.learning_rate" in out
    assert re.search(r"--model\.policies\.NAME\.model MODEL\n\s+a hub id, `ID@REVISION` with a branch", out)
    assert "``" not in out
