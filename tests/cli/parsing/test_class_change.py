"""Naming another class than a file does: settings of both are kept, settings that the new class lacks are rejected."""

import re
from pathlib import Path

import pytest
import yaml

CONFIG = """
model: {class_path: MAGRPO, init_args: {gamma: 0.9, max_length: 77, optimization: {schedule: linear}}}
data:
  class_path: RolloutDataModule
  init_args:
    environment: {class_path: math, init_args: {kinds: [word], difficulty: [1, 2]}}
    engine: {class_path: RayPool, init_args: {workers: 3}}
"""


@pytest.fixture
def fit(mrlm):
    Path("run.yaml").write_text(CONFIG)

    def run(*arguments: str) -> tuple[int, str, str]:
        return mrlm("fit", "--config", "run.yaml", *arguments, "--print_config")

    return run


CHANGES = {
    "algorithm": (("--model", "GSPO"), "model.gamma: GSPO has no 'gamma'", "0.9 for MAGRPO"),
    "data": (
        ("--data", "TrajectoryDataModule"),
        "data.environment: TrajectoryDataModule has no 'environment'",
        "set to math for",
    ),
    "environment": (
        ("--data.environment", "parrot"),
        "data.environment.kinds: ParrotEnvironment has no 'kinds'",
        "['word'] for MathEnvironment",
    ),
    "value": (
        ("--data.environment", "code"),
        "data.environment.kinds: CodeEnvironment does not accept ['word']",
        "for MathEnvironment",
    ),
    "engine": (
        ("--data.engine", "ContinuousEngine"),
        "data.engine.workers: ContinuousEngine has no 'workers'",
        "3 for RayPool",
    ),
    "nearest": (("--data.environment", "WrappedEnvironment"), "WrappedEnvironment has no 'kinds'", "it accepts: "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_that_the_new_class_lacks_is_refused_by_name(fit, change):
    arguments, *words = CHANGES[change]
    status, out, err = fit(*arguments)
    assert status == 2, out
    assert all(word in err for word in words), err
    assert len(err.splitlines()) == 1


def test_all_settings_that_the_new_class_lacks_are_named_at_once(fit):
    status, _, err = fit("--data.environment", "coordination")
    words = "to ['word'] for MathEnvironment; nor does it take the settings of difficulty; remove them, or"
    assert (status, words in err) == (2, True), err


def test_a_callback_and_a_later_file_lose_no_setting_either(fit):
    Path("stop.yaml").write_text(
        "trainer: {callbacks: {class_path: EarlyStopping, init_args: {monitor: a, patience: 2}}}\n"
    )
    status, _, err = fit("--config", "stop.yaml", "--trainer.callbacks", "ModelCheckpoint")
    assert status == 2
    assert "trainer.callbacks.patience: ModelCheckpoint has no 'patience'" in err
    Path("other.yaml").write_text("model: {class_path: GSPO}\n")
    status, _, err = fit("--config", "other.yaml")
    assert (status, "model.gamma: GSPO has no 'gamma'" in err) == (2, True)


def test_commands_without_a_trainer_refuse_it_too(mrlm):
    Path("env.yaml").write_text("environment: {class_path: math, init_args: {kinds: [word]}}\n")
    status, _, err = mrlm("check-env", "--config", "env.yaml", "--environment", "parrot")
    assert (status, "environment.kinds: ParrotEnvironment has no 'kinds'" in err) == (2, True)


def test_settings_of_both_classes_are_kept(fit):
    status, out, err = fit("--model", "MAREINFORCE")
    assert status == 0, err
    arguments = yaml.safe_load(out)["model"]["init_args"]
    assert (arguments["gamma"], arguments["max_length"], arguments["optimization"]["schedule"]) == (0.9, 77, "linear")


def test_the_advised_option_drops_what_does_not_fit(fit):
    _, _, err = fit("--model", "GSPO")
    option, value = err.rsplit("`", 2)[1].split(" ", 1)
    status, out, err = fit(option, value.strip("'"))
    assert status == 0, err
    model = yaml.safe_load(out)["model"]
    assert model["class_path"] == "mrlm_pl.GSPO"
    assert model["init_args"]["max_length"] == 77


@pytest.mark.parametrize("form", ["option", "file"])
def test_the_advice_holds_where_a_second_file_has_named_the_class(fit, form):
    Path("other.yaml").write_text("model: {class_path: GSPO}\n")
    assert "`init_args: {}` beside its class_path" in fit("--config", "other.yaml")[2]
    named = "{class_path: GSPO, init_args: {}}"
    Path("third.yaml").write_text(f"model: {named}\n")
    last = ("--model", named) if form == "option" else ("--config", "third.yaml")
    status, out, err = fit("--config", "other.yaml", *last)
    assert (status, yaml.safe_load(out)["model"]["class_path"]) == (0, "mrlm_pl.GSPO"), err


@pytest.mark.parametrize("form", ["option", "file"])
def test_a_class_with_its_own_arguments_drops_those_that_it_does_not_take(fit, form):
    named = "{class_path: code, init_args: {max_attempts: 2}}"
    Path("code.yaml").write_text(f"data: {{init_args: {{environment: {named}}}}}\n")
    status, out, err = fit(*(("--data.environment", named) if form == "option" else ("--config", "code.yaml")))
    assert status == 0, err
    arguments = yaml.safe_load(out)["data"]["init_args"]["environment"]["init_args"]
    assert (arguments["max_attempts"], arguments["kinds"], arguments["difficulty"]) == (2, None, [1, 2])
    assert "CodeEnvironment does not take kinds, set for MathEnvironment: dropped" in err


def test_the_defaults_in_a_run_s_own_configuration_do_not_bind_another_class(fit):
    _, out, _ = fit("--model.gamma", "1.0")
    Path("run.yaml").write_text(out)
    status, out, err = fit("--model", "GSPO")
    assert status == 0, err
    assert re.search(r"GSPO does not take .*gamma.*: ignored, as they have MAGRPO's defaults", err)


def test_the_advice_names_a_class_of_the_working_folder_by_its_path(fit, monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("own_plain.py").write_text(
        "from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment\n\n\n"
        "class Plain(SingleAgentEnvironment):\n"
        "    name = 'plain'\n\n"
        "    def tasks(self, split):\n        return DatasetTasks(self.name, split, [{'q': split}])\n\n"
        "    def begin(self, task):\n        return task.data['q']\n\n"
        "    def reply(self, message):\n        return Outcome({'right': 1.0})\n"
    )
    status, _, err = fit("--data.environment", "own_plain.Plain")
    assert status == 2
    assert "Plain has no 'kinds' (it has no settings)" in err
    advised = "--data.environment={class_path: own_plain.Plain, init_args: {}}"
    assert f"`{advised.replace('=', ' ' + chr(39), 1)}'`" in err
    status, out, err = fit(advised)
    assert status == 0, err
    assert yaml.safe_load(out)["data"]["init_args"]["environment"] == {"class_path": "own_plain.Plain"}


ROLLOUTS = ("--data", "RolloutDataModule")
BEFORE = {
    "options": ("--data.environment.difficulty", "[2, 2]", "--data.environment", "math", "--data", "RolloutDataModule"),
    "path": ("--data.environment.difficulty", "[2, 2]", "--data.environment.class_path", "math", *ROLLOUTS),
    "list": ("--data.environment.difficulty", "[2, 2]", "--data.environment", "[parrot, math]", *ROLLOUTS),
    "file": ("--data.environment.difficulty", "[2, 2]", "--config", "run.yaml"),
    "file without a class": ("--config", "no_class.yaml", "--data.environment", "math", *ROLLOUTS),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.long_after(2)
def test_a_setting_may_come_before_its_class(mrlm, before):
    Path("run.yaml").write_text(CONFIG.replace(", difficulty: [1, 2]", ""))
    Path("no_class.yaml").write_text("data: {init_args: {environment: {difficulty: [2, 2]}}}\n")
    status, out, err = mrlm("fit", "--model.gamma", "0.5", *BEFORE[before], "--model", "MAGRPO", "--print_config")
    assert status == 0, err
    config = yaml.safe_load(out)
    environment = config["data"]["init_args"]["environment"]
    last = environment[-1] if before == "list" else environment
    assert last["init_args"]["difficulty"] == [2, 2]
    assert config["model"]["init_args"]["gamma"] == (0.9 if before == "file" else 0.5)  # a later file wins


@pytest.mark.parametrize(("in_file", "rate"), [("{model: builtin:tiny}", 0.5), ("{learning_rate: 0.25}", 0.25)])
def test_an_option_for_a_policy_holds_unless_a_later_file_gives_it(mrlm, in_file, rate):
    Path("first.yaml").write_text("model: {class_path: GRPO, init_args: {policies: {other: {}}}}\n")
    Path("run.yaml").write_text(f"model: {{class_path: GRPO, init_args: {{policies: {{main: {in_file}}}}}}}\n")
    words = ("--config", "first.yaml", "--model.policies.main.learning_rate", "0.5", "--config", "run.yaml")
    status, out, err = mrlm("fit", *words, *ROLLOUTS, "--data.environment", "math", "--print_config")
    assert status == 0, err
    policies = yaml.safe_load(out)["model"]["init_args"]["policies"]
    assert {name: policy["learning_rate"] for name, policy in policies.items()} == {"main": rate}


def test_a_setting_before_a_class_without_it_is_refused(mrlm):
    status, _, err = mrlm("check-env", "--environment.kind", "[word]", "--environment", "math")
    assert (status, "MathEnvironment has no 'kind'; did you mean 'kinds'?" in err) == (2, True), err


def test_a_text_or_a_switch_replaces_a_mapping_that_names_no_class(mrlm):
    settings = CONFIG.replace("kinds: [word]", "data: {train: a.jsonl}").replace(
        "engine:", "save_episodes: {last: 3}\n    engine:"
    )
    Path("run.yaml").write_text(settings + "trainer: {logger: {class_path: CSVLogger, init_args: {save_dir: a}}}\n")
    Path("b.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    options = ("--data.environment.data", "b.jsonl", "--data.save_episodes", "true", "--trainer.logger", "false")
    status, out, err = mrlm("fit", "--config", "run.yaml", *options, "--print_config")
    assert status == 0, err
    config = yaml.safe_load(out)
    data = config["data"]["init_args"]
    assert (data["environment"]["init_args"]["data"], data["save_episodes"]) == ("b.jsonl", True)
    assert config["trainer"]["logger"] is False
