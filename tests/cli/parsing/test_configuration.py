"""Forms of a configuration, and mistakes in it: exit status 2, one message, no traceback, nothing loaded."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mrlm_pl.cli.parsing.configuration import merge_arguments

CONFIG = """
model:
  class_path: ToyAlgorithm
  init_args: {rate: 0.25}
data:
  class_path: ToyData
  init_args:
    environment: parrot
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""


@pytest.fixture
def config() -> str:
    Path("toy.yaml").write_text(CONFIG)
    return "toy.yaml"


@pytest.fixture
def parsed(mrlm, config):
    """The configuration that a command line comes to."""

    def parse(*arguments):
        status, out, err = mrlm("fit", "--config", config, *arguments, "--print_config")
        assert status == 0, err
        return yaml.safe_load(out)

    return parse


@pytest.mark.parametrize("text", ["{question} Reply with a number.", "[{question}]: a number", "{groups: 3"])
def test_text_with_brackets_that_is_no_yaml_stays_text(text):
    config, _ = merge_arguments(["--data.environment.prompt", text], ["data"])
    assert config == {"data": {"environment": {"prompt": text}}}


def test_text_may_hold_any_character_in_yaml_and_in_json(parsed):
    text = "an emoji \U0001f642, a line separator\u2028, \x85 and \u00fc"
    for name, write in (("more.yaml", yaml.safe_dump), ("more.json", json.dumps)):
        Path(name).write_text(write({"data": {"init_args": {"file": text}}}))
        assert parsed("--config", name)["data"]["init_args"]["file"] == text


@pytest.mark.parametrize(
    ("name", "option", "path"),
    [
        ("ddp", "process_group_backend=gloo", "lightning.pytorch.strategies.DDPStrategy"),
        ("fsdp", "tensor_parallel_size=2", "mrlm_pl.trainer.fsdp.FSDP"),
    ],
)
def test_a_strategy_by_name_takes_arguments(parsed, name, option, path):
    strategy = parsed("--trainer.strategy", name, f"--trainer.strategy.{option}")["trainer"]["strategy"]
    argument, _, value = option.partition("=")
    assert (strategy["class_path"], str(strategy["init_args"][argument])) == (path, value)


def test_short_names_become_class_paths(parsed):
    result = parsed()
    assert result["model"]["class_path"] == "mrlm_toy.ToyAlgorithm"
    assert result["data"]["class_path"] == "mrlm_toy.ToyData"
    assert result["data"]["init_args"]["environment"]["class_path"] == "mrlm_toy.ParrotEnvironment"
    assert result["seed_everything"] == 0


@pytest.mark.parametrize("name", ["parrot", "ParrotEnvironment", "mrlm_toy.ParrotEnvironment"])
def test_environment_by_short_name_class_name_and_path(parsed, name):
    result = parsed("--data.environment", name, "--data.environment.difficulty", "[1, 2]")
    assert result["data"]["init_args"]["environment"] == {
        "class_path": "mrlm_toy.ParrotEnvironment",
        "init_args": {"difficulty": [1, 2]},
    }


def test_short_names_in_lists_and_inside_environments(parsed):
    value = json.dumps(["parrot", {"class_path": "wrapped", "init_args": {"inner": "parrot", "environment": "parrot"}}])
    first, second = parsed("--data.environment", value)["data"]["init_args"]["environment"]
    assert first["class_path"] == "mrlm_toy.ParrotEnvironment"
    assert second["class_path"] == "mrlm_toy.WrappedEnvironment"
    assert second["init_args"]["inner"]["class_path"] == "mrlm_toy.ParrotEnvironment"
    assert second["init_args"]["environment"] == "parrot"  # a text stays a text


@pytest.mark.parametrize("model", ["builtin:tiny", "Qwen/Qwen2.5-0.5B", "./runs/x", "gpt2"])
@pytest.mark.long_after(1)
def test_a_policy_may_be_its_model_alone(mrlm, model):
    Path("run.yaml").write_text(f"model: {{class_path: GRPO, init_args: {{policies: {{main: '{model}', b: {{}}}}}}}}\n")
    data = ("--data", "RolloutDataModule", "--data.environment", "parrot")
    option = ("--model", "GRPO", "--model.policies.main", model)
    for arguments in (("--config", "run.yaml"), option):
        status, out, err = mrlm(
            "fit", *arguments, *data, "--model.policies.main.learning_rate", "0.5", "--print_config"
        )
        assert status == 0, err
        policy = yaml.safe_load(out)["model"]["init_args"]["policies"]["main"]
        assert (policy["model"], policy["learning_rate"], policy["trained"]) == (model, 0.5, True)


@pytest.mark.parametrize("before", ["true", "false", "null"])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.long_after(2)
def test_an_option_for_a_setting_replaces_a_switch(mrlm, before, in_file):
    Path("run.yaml").write_text(
        "model: {class_path: GRPO}\n"
        f"data: {{class_path: RolloutDataModule, init_args: {{environment: parrot, save_episodes: {before}}}}}\n"
    )
    switch = () if in_file else ("--data.save_episodes", before)
    options = (*switch, "--data.save_episodes.last", "3", "--data.save_episodes.every", "2")
    status, out, err = mrlm("fit", "--config", "run.yaml", *options, "--print_config")
    assert status == 0, err
    found = yaml.safe_load(out)["data"]["init_args"]["save_episodes"]
    assert (found["last"], found["every"]) == (3, 2)


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        ("--learning_rate", "--model.policies.main.learning_rate"),
        ("--max_epochs", "--trainer.max_epochs"),
        ("--groups", "--data.groups"),
        ("--max_tokens", "--data.sampling.max_tokens"),
        ("--lr", "--model.policies.main.learning_rate"),
        ("--gamma", "--model.gamma"),
        ("--epochs", "--trainer.max_epochs"),
        ("--algorithm", "--model"),
        ("--modle.gamma", "--model.gamma"),
        ("--modle.x", "--model"),
    ],
)
def test_an_option_without_its_prefix_is_named(mrlm, config, given, whole):
    status, _, err = mrlm("fit", "--config", config, given, "3")
    assert status == 2
    assert f"there is no option '{given}'; did you mean '{whole}'?" in err


@pytest.mark.parametrize(("algorithm", "whole"), [("GRPO", "--model.kl"), ("DPO", "--model.beta")])
def test_an_option_without_its_prefix_is_one_of_the_chosen_algorithm(mrlm, algorithm, whole):
    status, _, err = mrlm("fit", "--model", algorithm, "--beta", "3")
    assert (status, f"there is no option '--beta'; did you mean '{whole}'?" in err) == (2, True), err


def test_later_files_and_options_override(parsed):
    Path("faster.yaml").write_text("model: {init_args: {rate: 0.75}}\ntrainer: {max_epochs: 7}\n")
    result = parsed("--config", "faster.yaml", "--trainer.max_epochs", "9")
    assert result["model"]["init_args"]["rate"] == 0.75
    assert result["trainer"]["max_epochs"] == 9


def test_a_key_that_is_twice_on_the_command_line_is_refused(mrlm, config):
    fault = "error: configuration, line 1: the key 'gamma' is in line 1 already; remove one\n"
    for value in ("{gamma: 1, gamma: 2}", '{"gamma": 1, "gamma": 2}'):
        for words in (("--config", f"{{model: {value}}}"), ("--model.kl", value)):
            assert mrlm("fit", "--config", config, *words)[::2] == (2, f"mrlm: {fault}")


def test_a_file_is_utf_8_in_every_locale():
    Path("team.yaml").write_text("# 数\nmodel: {class_path: ToyAlgorithm}\n", encoding="utf-8")
    program = "from mrlm_pl.cli.parsing.config_files import check_files; check_files(['--config', 'team.yaml'])"
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **ascii_only}, timeout=100, check=True)


def test_a_group_that_is_null_in_a_file_is_not_given():
    words = ["--environment", "math", "--config", "{environment: null, split: null}"]
    assert merge_arguments(words, ["environment"])[0] == {"environment": "math", "split": None}
    assert merge_arguments(["--environment", "null"], ["environment"])[0] == {"environment": None}


@pytest.mark.parametrize("command", ["eval", "check-env", "serve", "recredit", "fit"])
def test_a_printed_configuration_is_read_again(mrlm, tmp_path, command):
    status, printed, _ = mrlm(command, "--print_config")
    assert status == 0
    (tmp_path / "printed.yaml").write_text(printed)
    assert mrlm(command, "--config", str(tmp_path / "printed.yaml"), "--print_config")[:2] == (0, printed)


def test_an_existing_file_is_a_value(parsed):
    Path("rows.jsonl").touch()
    assert parsed("--data.file", "rows.jsonl")["data"]["init_args"]["file"] == "rows.jsonl"


def test_policy_fields_without_a_policy_in_a_file(parsed):
    result = parsed("--model.policies.a.learning_rate", "3", "--model.policies.b.model=x", "--model.policies.a.model=y")
    assert result["model"]["init_args"]["policies"] == {
        "a": {"model": "y", "learning_rate": 3.0, "weight_decay": 0.0},
        "b": {"model": "x", "learning_rate": 1e-6, "weight_decay": 0.0},
    }


def test_policy_fields_override_one_field_of_a_file(parsed):
    Path("policies.yaml").write_text("model: {init_args: {policies: {a: {model: x, weight_decay: 0.5}}}}\n")
    result = parsed("--config", "policies.yaml", "--model.policies.a.learning_rate", "3")
    assert result["model"]["init_args"]["policies"] == {"a": {"model": "x", "learning_rate": 3.0, "weight_decay": 0.5}}


def test_an_option_replaces_seats_as_a_later_file_does(parsed):
    given = ("--model", "{class_path: GRPO, init_args: {}}", "--model.seats", "{pro: first, con: second}")
    for value, expected in (("{agent: main}", {"agent": "main"}), ("{}", {})):
        assert parsed(*given, "--model.seats", value)["model"]["init_args"]["seats"] == expected
    more = parsed(*given, "--model.seats.judge", "first")["model"]["init_args"]["seats"]
    assert more == {"pro": "first", "con": "second", "judge": "first"}


def test_callbacks_by_short_name(parsed):
    result = parsed("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/weight")
    (callback,) = result["trainer"]["callbacks"]
    assert callback["init_args"]["monitor"] == "val/weight"


def test_model_help_names_parameters_and_default(mrlm):
    status, out, _ = mrlm("fit", "--model.help", "GRPO")
    assert ":class:" not in out, "also where a wrapped line divides the name"
    assert status == 0
    assert out.startswith("usage: mrlm fit [--model.policies ")
    assert re.search(r"--model\.kl\.horizon HORIZON\s.*?default:\s+10000\)", out, re.DOTALL)


def test_data_help_is_plain_and_names_only_options_that_work(mrlm):
    status, out, err = mrlm("fit", "--data.help", "RolloutDataModule")
    assert status == 0, err
    assert "--data.cross_policy.help" not in out
    assert "--data.engine.help" in out, "that of a class works"
    assert "--data.cross_policy CROSS_POLICY" in out
    assert ":class:" not in out
    assert "``" not in out
    assert "see AsyncOptions:" in out
    assert "over all ranks. It must be 1 or above. (type: int, default: 8)" in " ".join(out.split())
    assert "Optional[int]" not in " ".join(out.split())


@pytest.mark.parametrize("words", [("parrot",), ("ParrotEnvironment", "--data", "ToyData")])
def test_the_help_of_an_environment_needs_no_data_module(mrlm, words):
    status, out, err = mrlm("fit", "--data.environment.help", *words)
    assert status == 0, err
    assert "--environment.difficulty" in out


MISTAKES = {
    "option": (("--trainer.max_epoch", "3"), ("trainer.max_epoch", "'max_epochs'")),
    "abbreviation": (("--trainer.max_ep", "3"), ("trainer.max_ep:", "'max_epochs'")),
    "model class": (("--model", "ToyAlgoritm"), ("model", "'ToyAlgoritm'", "'ToyAlgorithm'")),
    "model key": (("--model.rat", "1"), ("model.rat", "ToyAlgorithm", "'rate'")),
    "model value": (("--model.rate", "fast"), ("model.rate", "a number such as 0.5", "fast")),
    "environment": (("--data.environment", "parot"), ("data.environment", "'parot'", "'parrot'")),
    "environment class": (("--data.environment", "ParrotEnvironmet"), ("data.environment", "'ParrotEnvironment'")),
    "environments": (
        ("--data.environment", '["parrot", "parot"]'),
        ("data.environment", "'parot'", "'parrot'"),
    ),
    "environment key": (
        ("--data.environment.dificulty", "[1]"),
        ("data.environment.dificulty", "ParrotEnvironment", "'difficulty'"),
    ),
    "environment value": (("--data.environment.difficulty", "[x]"), ("data.environment.difficulty", "int", "x")),
    "settings key": (("--data.sampling.temprature", "1"), ("data.sampling.temprature", "Sampling", "'temperature'")),
    "settings without a value": (
        (
            "--model={class_path: OnPolicyDistillation, init_args: {}}",
            "--model.distillation",
            "{teachers: [{}]}",
        ),
        ("model.distillation.teachers: a teacher without policy is the student itself", "or set reprompt"),
    ),
    "settings key of a policy": (
        ("--data.sampling.policies.a.temprature", "1"),
        ("data.sampling.policies.a.temprature", "PolicySampling", "'temperature'"),
    ),
    "settings value of a policy": (
        ("--data.sampling.policies.a.top_p", "2"),
        ("sampling.policies.a.top_p is 2", "above 0 and at most 1"),
    ),
    "settings value": (("--data.sampling.temperature", "-1"), ("Sampling: temperature is -1", "0 or above")),
    "policy key": (("--model.policies.a.lerning_rate", "1"), ("lerning_rate", "'learning_rate'")),
    "policy value": (
        ("--model.policies.a.learning_rate", "1e-4x"),
        ("model.policies.a.learning_rate: expected a number such as 0.5, but the value is '1e-4x'",),
    ),
    "trainer value": (("--trainer.max_epochs", "many"), ("trainer.max_epochs", "int", "many")),
    "precision": (("--trainer.precision", "bf17"), ("trainer.precision", "bf17", "bf16-mixed")),
    "strategy": (("--trainer.strategy", "ddpp"), ("trainer.strategy", "'ddpp'", "'ddp'")),
    "strategy class": (("--trainer.strategy", "a.B"), ("trainer.strategy", "class_path")),
    "accelerator": (("--trainer.accelerator", "gpuu"), ("trainer.accelerator", "'gpuu'", "'gpu'")),
    "callback": (("--trainer.callbacks+=EarlyStoping",), ("trainer.callbacks", "'EarlyStoping'", "'EarlyStopping'")),
    "file": (("--config", "absent.yaml"), ("config", "absent.yaml")),
    "file without its option": (("run.yaml",), ("unexpected argument 'run.yaml'", "`--config run.yaml`")),
    "folder": (("--config", "."), ("config: '.' is a folder; name a file, such as 'toy.yaml'",)),
    "file name": (("--config", "toi.yaml"), ("config", "toi.yaml", "did you mean 'toy.yaml'")),
    "file of another folder": (("--config", "zebra.yaml"), ("'zebra.yaml', looked for in /", "; check the path")),
    "one of several values": (
        ("--data.environment", "code", "--data.environment.sandbox.minimum", "namespces"),
        ("data.environment.sandbox.minimum", "namespces", "did you mean 'namespaces'"),
    ),
    "one of several values in a list": (
        ("--data.environment", "code", "--data.environment.kinds", "[numbers]"),
        ("data.environment.kinds", "numbers", "'number', 'text', 'list'", "did you mean 'number'"),
    ),
    "callback key without a callback": (
        ("--trainer.callbacks.episodes", "4"),
        ("no Callback is named that has 'episodes'; name its class first, as in `--trainer.callbacks CLASS`",),
    ),
    "arguments beside a class": (
        ("--data.environment", "{class_path: parrot, difficulty: [1]}"),
        ("data.environment.difficulty: put `difficulty` under `init_args`, as in `{class_path: parrot, init_args: {",),
    ),
    "help of an unknown class": (("--model.help", "ToyAlgoritm"), ("model: there is no algorithm", "'ToyAlgorithm'")),
    "class of a file, without the file": (
        ("--model", "Zebra"),
        ("there is no algorithm 'Zebra'; known are: ", "name your own class by its path, as in `my_"),
    ),
    "help of an unknown class of a class": (
        ("--data.environment.help=parot",),
        ("data.environment: there is no environment 'parot'; did you mean 'parrot'?",),
    ),
    "help of a class without its name": (("--data.environment.help",), ("name one: environments are", "parrot")),
    "help of settings": (("--data.sampling.help",), ("data.sampling: no class", "`--data.help ToyData`")),
    "help of nothing": (("--data.nosuch.help", "x"), ("data.nosuch: ToyData has no 'nosuch'",)),
    "beginning of an option": (("--seed", "3"), ("did you mean '--seed_everything'",)),
    "logger that is not installed": (
        ("--trainer.logger", "CometLogger"),
        ("CometLogger cannot be made", "pip install"),
    ),
    "callback that refuses its arguments": (
        ("--trainer.callbacks", "[{class_path: EarlyStopping, init_args: {monitor: reward, mode: largest}}]"),
        ("EarlyStopping cannot be made", "largest"),
    ),
    "configuration that is not a file": (("--config", "absent"), ("config: 'absent' is neither a file nor a mapping",)),
    "long configuration that is not a file": (
        ("--config", f"{{trainer: {{max_epoch: 3}}, {'x' * 300}: 1}}"),
        ("max_epoch", "max_epochs"),
    ),
    "configuration without a value": (("--config", ""), ("config: '' is neither a file nor a mapping",)),
    "configuration of wrong syntax": (("--config", "{a: b"), ("config: '{a: b' cannot be read",)),
    "value of wrong syntax": (("--data.file", "{a: !!int x}"), ("data.file", "!!int x")),
    "data file": (("--data.file", "absent.jsonl"), ("data.file", "absent.jsonl")),
    "seed": (("--seed_everything", "-1"), ("seed_everything", "-1")),
    "checkpoint": (("--ckpt_path", "absent.ckpt"), ("ckpt_path", "absent.ckpt")),
    "last": (("--ckpt_path", "last"), ("ckpt_path", "runs/toy")),
    "trainer combination": (
        ("--trainer.barebones", "true", "--trainer.enable_progress_bar", "true"),
        ("trainer", "barebones"),
    ),
}


@pytest.mark.parametrize(
    ("option", "name", "meant", "unusable"),
    [
        ("--trainer.callbacks", "Callbac", "LambdaCallback", {"Callback", "SaveConfig", "LoopResults"}),
        ("--trainer.callbacks", "SaveConfi", None, {"Callback", "SaveConfig", "SaveConfigCallback"}),
        ("--data", "LightningDataModul", None, {"LightningDataModule"}),
    ],
)
def test_a_message_on_an_unknown_name_offers_only_classes_that_can_be_used(mrlm, config, option, name, meant, unusable):
    status, _, err = mrlm("fit", "--config", config, option, name)
    offered = {*re.split(r"[:,]\s*", err.strip().lower().partition("known are")[2])}
    assert (status, f"did you mean {meant!r}?" in err) == (2, meant is not None), err
    assert offered
    assert not offered & {*map(str.lower, unusable)}, err


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.long_after(20)
def test_mistake_on_the_command_line(mrlm, config, mistake):
    import mrlm_toy

    arguments, words = MISTAKES[mistake]
    loaded = mrlm_toy.ToyAlgorithm.loaded
    status, _, err = mrlm("fit", "--config", config, *arguments)
    assert status == 2, err
    assert err.startswith("mrlm: error: ")
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert "Subtypes" not in err
    assert len(err.splitlines()) <= 3
    assert mrlm_toy.ToyAlgorithm.loaded == loaded
    assert not list(Path("runs").glob("*"))


FILES = {
    "group of another name": ("algorithm: {class_path: GRPO}\n", ("'algorithm.class_path'; did you mean 'model'?",)),
    "setting at the top": ("lr: 1\n", ("no key 'lr'; did you mean 'model.policies.main.learning_rate'?",)),
    "empty group": ("trainr: {}\n", ("no key 'trainr'; did you mean 'trainer'?", "(wrong.yaml, line 1)")),
    "group of empty keys": ("trainr: {max_epochs: {}}\n", ("no key 'trainr'; did you mean 'trainer'?",)),
    "group": ("trainr: {max_epochs: 3}\n", ("trainr", "'trainer'")),
    "trainer key": ("trainer: {max_epoch: 3}\n", ("trainer.max_epoch", "'max_epochs'")),
    "model key": ("model: {class_path: ToyAlgorithm, init_args: {rat: 3}}\n", ("model.rat", "'rate'")),
    "nested key": (
        "data: {class_path: ToyData, init_args: {environment: {class_path: parrot, init_args: {hard: 3}}}}\n",
        ("data.environment.hard", "difficulty"),
    ),
    "settings key": (
        "data: {class_path: ToyData, init_args: {sampling: {temprature: 1}}}\n",
        ("data.sampling.temprature", "'temperature'"),
    ),
    "nested class": ("data: {class_path: ToyData, init_args: {environment: parott}}\n", ("'parott'", "'parrot'")),
    "policy key": (
        "model: {class_path: ToyAlgorithm, init_args: {policies: {a: {lr: 3}}}}\n",
        ("model.policies", "'lr'", "learning_rate"),
    ),
    "arguments beside a class": (
        "model: {class_path: ToyAlgorithm, rate: 3}\n",
        ("model.rate: put `rate` under `init_args`", "(wrong.yaml, line 1)"),
    ),
    "key of the arguments": (
        "model: {class_path: ToyAlgorithm, init_arg: {rate: 3}}\n",
        ("model.init_arg: ", "did you mean 'init_args'?", "(wrong.yaml, line 1)"),
    ),
    "list instead of a mapping": ("trainer: []\n", ("trainer: expected a mapping", "[]", "(wrong.yaml, line 1)")),
    "class without a name": ("trainer: {callbacks: [{}]}\n", ("trainer.callbacks: no Callback is named",)),
    "configuration in a configuration": ("config: other.yaml\n", ("config",)),
    "key that is a number": ("trainer: {1: 3}\n", ("trainer.1", "max_epochs")),
    "key that is a list": ("model: {? [a, b] : 3}\n", ("wrong.yaml, line 1", "unhashable key")),
    "tag": ("trainer: {max_epochs: !!python/name:os.system x}\n", ("wrong.yaml, line 1", "constructor", "plain")),
    "tag of another value": ("trainer: {max_epochs: !!int x}\n", ("wrong.yaml", "'x'")),
    "merged scalar": ("trainer: {<<: 3}\n", ("wrong.yaml, line 1", "merging")),
    "alias within its anchor": ("trainer: &t {max_epochs: *t}\n", ("wrong.yaml", "alias")),
    "text like a date": ("trainer: {max_epoch: 2024-99-99}\n", ("trainer.max_epoch", "max_epochs")),
    "nesting": (f"trainer: {'[' * 5000}\n", ("wrong.yaml", "nested too deeply")),
    "syntax": ("trainer: {max_epochs: 3\nmodel: x\n", ("line 2",)),
}


@pytest.mark.parametrize("mistake", FILES)
def test_mistake_in_a_file(mrlm, config, mistake):
    text, words = FILES[mistake]
    Path("wrong.yaml").write_text(text)
    status, _, err = mrlm("fit", "--config", config, "--config", "wrong.yaml")
    assert status == 2, err
    for word in words:
        assert word in err
    assert "Traceback" not in err
    assert "Subtypes" not in err


def test_missing_data_is_named(mrlm):
    Path("part.yaml").write_text("model: ToyAlgorithm\n")
    status, _, err = mrlm("fit", "--config", "part.yaml")
    assert (status, "data missing in part.yaml; name one: data modules are AnswerDataModule, " in err) == (2, True), err
    assert "RolloutDataModule, " in err
    assert "; give `--data VALUE`, or a file that has it with `--config FILE`" in err
    status, _, err = mrlm("fit", "--data", "RolloutDataModule", "--data.environment", "math")
    assert (status, "model missing; name one: algorithms are ATGRPO, " in err, "GRPO, " in err) == (2, True, True), err


ENVIRONMENTS = """
from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment


class Plain(SingleAgentEnvironment):
    name = "plain"

    def tasks(self, split):
        return DatasetTasks(self.name, split, [{}])

    def begin(self, task):
        return "?"

    def reply(self, message):
        return Outcome()


class AsyncReply(Plain):
    async def reply(self, message):
        return Outcome()


class AsyncBegin(Plain):
    async def begin(self, task):
        return "?"
"""


@pytest.mark.parametrize(("name", "method"), [("AsyncReply", "reply"), ("AsyncBegin", "begin")])
def test_async_methods_of_a_single_agent_environment_are_refused_by_name(
    mrlm, config, tmp_path, monkeypatch, name, method
):
    (tmp_path / "waiting_environments.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    status, _, err = mrlm("fit", "--config", config, "--data.environment", f"waiting_environments.{name}")
    assert status == 2
    assert err.startswith(f"mrlm: error: {name}.{method} is async; write a plain function")
    assert err.endswith("subclass Environment, whose reset and step may be async\n")
    status, _, err = mrlm("check-env", "waiting_environments.Plain")
    assert "is async" not in err, "the others of the module can be used"


def test_a_module_that_cannot_be_imported_is_answered_with_its_error(mrlm, config, tmp_path, monkeypatch):
    (tmp_path / "module_that_raises.py").write_text("raise TypeError('no such luck')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, _, err = mrlm("fit", "--config", config, "--data.environment", "module_that_raises.Any")
    assert status == 2
    assert err == (
        "mrlm: error: data.environment: importing 'module_that_raises' failed: TypeError: no such luck "
        "(module_that_raises.py:1) (the value is 'module_that_raises.Any')\n"
    )


def test_plugin_that_fails_names_its_distribution(mrlm, config, tmp_path, monkeypatch):
    folder = tmp_path / "broken"
    (folder / "mrlm_broken-1.0.dist-info").mkdir(parents=True)
    (folder / "mrlm_broken-1.0.dist-info" / "METADATA").write_text("Name: mrlm-broken\nVersion: 1\n")
    (folder / "mrlm_broken-1.0.dist-info" / "entry_points.txt").write_text("[mrlm_pl.plugins]\nx = mrlm_broken\n")
    (folder / "mrlm_broken.py").write_text("import a_module_that_does_not_exist\n")
    monkeypatch.syspath_prepend(str(folder))
    status, _, err = mrlm("fit", "--config", config)
    assert status == 2
    assert "'mrlm-broken'" in err
    assert "a_module_that_does_not_exist" in err


@pytest.mark.parametrize("value", ["math", "{class_path: math}"])
def test_an_environment_at_the_top_of_a_file_is_told_its_place(mrlm, tmp_path, value):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: GRPO\nenvironment: {value}\n")
    status, _, err = mrlm("fit", "--config", str(file))
    assert status == 2
    assert f"did you mean 'data.environment'? ({file}, line 2)" in err


def test_the_help_of_an_algorithm_describes_what_its_docstring_leaves_to_another_class(mrlm):
    words = " ".join(mrlm("fit", "--model.help", "MAGRPO")[1].split())
    assert "--model.joint_mode {align,cross} `align` combines the g-th decisions of the agents; `cross`" in words
    assert "--model.normalize {true,false} divide by the standard deviation of the comparison." in words
    assert "--model.seats SEATS policy of each agent" in words


@pytest.mark.parametrize(
    ("name", "settings", "fault"),
    [
        ("helper", {"int8": "weights"}, "int8 is 'weights', but the policy is trained"),
        ("critic", {"int8": "weights"}, "int8 is 'weights', but the policy is trained"),
        ("critic", {"served_by": "localhost:1"}, "is served by localhost:1, which has its weights"),
        ("solver", {"served_by": "ftp://x", "trained": False}, "served_by 'ftp://x' is neither HOST:PORT"),
        ("helper", {"served_by": "x", "trained": False}, "served_by: the address 'x' is not HOST:PORT"),
    ],
)
@pytest.mark.long_after(2)
def test_a_policy_that_refuses_its_settings_is_named(mrlm, name: str, settings: dict, fault: str) -> None:
    policies = {"solver": {}, "helper": {"weight_decay": 0.1}, "critic": {"lora": {"rank": 2}}, name: settings}
    model = {"class_path": "MAGRPO", "init_args": {"policies": policies, "seats": {"left": name, "right": name}}}
    data = {"class_path": "RolloutDataModule", "init_args": {"environment": "halves"}}
    Path("team.yaml").write_text(yaml.safe_dump({"model": model, "data": data}, sort_keys=False))
    status, _, err = mrlm("fit", "--config", "team.yaml")
    assert (status, err.count("\n")) == (2, 1), err
    assert f"policies.{name}: model 'builtin:tiny'" in err
    assert fault in err


def test_a_refusal_by_a_class_inside_an_optional_one_of_a_list_is_told(mrlm) -> None:
    backend = {"class_path": "RetrievalServer", "init_args": {"url": "localhost:8000"}}
    tools = json.dumps([{"class_path": "WebSearch", "init_args": {"backend": backend}}])
    row = json.dumps([{"prompt": "Who?", "answer": "You"}])
    status, _, err = mrlm(
        "check-env", "question", "--environment.data", row, "--environment.rewards", "[exact_match]",
        "--environment.tools", tools,
    )  # fmt: skip
    assert (status, err.count("\n")) == (2, 1), err
    assert "url is 'localhost:8000'; give one like http://127.0.0.1:8000/retrieve" in err
