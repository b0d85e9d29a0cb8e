"""Typos are reported before torch is imported; signatures from the source equal those of the parser."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonargparse._parameter_resolvers import get_signature_parameters

from mrlm_pl.cli.parsing.early_check import (
    FOLDERS,
    PACKAGE,
    SETTINGS,
    check,
    check_environment_names,
    environment_names,
    parameters,
)
from mrlm_pl.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
TYPOS = {
    "--model=GRPOO": "did you mean 'GRPO'?",
    "--data.seed=3": "data.seed: set it by `seed_everything` (`--seed_everything`)",
    "--trainer.output": "trainer.output: set it by `output` (`--output`)",
    "--trainer.resume": "trainer.resume: set it by `resume` (`--resume`)",
    "--model=MAGRPO --model.discount": "did you mean 'gamma'?",
    "--data=RolloutModule": "did you mean 'RolloutDataModule'?",
    "--data.environment=mathh": "did you mean 'math'?",
    "--data.environment.dificulty": "'difficulty'",
    "--data.environment=code --data.environment.sandbx": "'sandbox'",
    "--config=configs/quikstart.yaml": "did you mean 'configs/quickstart.yaml'?",
    "--config=quickstart.yaml": "did you mean 'configs/quickstart.yaml'?",
    "--config=configs/grpo_mth.yaml": "did you mean 'configs/",
    "--model.clip.loww": "'low'",
    "--model.lr": "give it as `--model.policies.main.learning_rate VALUE`",
    "--model.kl.coeficient": "'coefficient'",
    "--model.stop_at_k": "'stop_at_kl'",
    "--model.policies.main.lerning_rate": "'learning_rate'",
    "--data.environment=SumsEnvironment": "did you mean 'SqlEnvironment'? Otherwise name your own class by its ",
    "--model.policies.mian.learning_rate": "there is no policy 'mian'; did you mean 'main'?",
    "--data.sampling.temprature": "'temperature'",
    "--data.grups": "'groups'",
    "--data.num_generations": "did you mean 'group_size'?",
    "--model.kl_coef": "did you mean 'kl'?",
    "--model.policies.main.peft_config": "did you mean 'lora'?",
    "--trainer.eval_steps": "did you mean 'val_check_interval'?",
    "--trainer.gradient_accumulation_steps": "did you mean 'accumulate_grad_batches'?",
    "--trainer.report_to": "did you mean 'logger'?",
    "--trainer.max_epoch": "'max_epochs'",
}


ENVIRONMENTS = {
    "eval --model builtin:tiny --environment mathh": "did you mean 'math'?",
    "collect --model builtin:tiny --output a.jsonl --environment=mathh": "did you mean 'math'?",
    "serve --environments sql,mathh": "did you mean 'math'?",
    "check-env mathh": "did you mean 'math'?",
    "eval --model builtin:tiny --environment math --environment=debate": "environment is given as 'math' and 'debate'; "
    "give one, or, where the command takes several, `--environment math debate`",
    "serve --environments math --environments sql": "where the command takes several, `--environments math,sql`",
}


ANSWERED = {
    f"fit --config configs/quickstart.yaml {option} 1": answer for option, answer in TYPOS.items()
} | ENVIRONMENTS


ALL = """
import contextlib, io, json, sys
from mrlm_pl.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as told:
        status = main(words.split())
    heavy = sorted({'torch', 'transformers', 'lightning', 'jsonargparse'} & set(sys.modules))
    print(json.dumps([status, heavy, told.getvalue()]))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    """Return status, heavy modules and message of each typo, from one process."""
    command = [sys.executable, "-c", ALL, json.dumps(list(ANSWERED))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return dict(zip(ANSWERED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("words", ANSWERED)
def test_a_typo_is_answered_without_torch(words: str, answers: dict[str, list[Any]]) -> None:
    status, heavy, told = answers[words]
    assert (status, heavy) == (2, []), told
    assert ANSWERED[words] in told
    assert len(told.splitlines()) == 1


def test_a_typo_in_a_file_has_its_line_and_one_in_an_option_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrlm_pl.cli.parsing.early_check.plugin_entry_points", list)  # tests have their own plugin
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  class_path: RolloutDataModule\n  init_args:\n    environment: mathh\n")
    with pytest.raises(ConfigurationError, match=r"did you mean 'math'\? .+ \(.*run.yaml, line 4\)"):
        check(["--config", str(file)])
    file.write_text("data:\n  class_path: RolloutDataModule\n  init_args:\n    environment: math\n")
    with pytest.raises(ConfigurationError, match=r"did you mean 'code'\? .+:MyClass`$"):
        check(["--config", str(file), "--data.environment", "coode"])


FROZEN = """
model:
  class_path: GRPO
  init_args:
    seats: {agent: solver}
    policies:
      solver: {model: "builtin:tiny"}
      judge:
        trained: false
        lora: {rank: 8}
"""


def test_a_setting_of_a_policy_is_told_with_the_name_of_the_configured_one() -> None:
    policies = "{class_path: GRPO, learning_rate: 1, init_args: {policies: {solver: {}}}}"
    with pytest.raises(ConfigurationError, match=r"give it as `--model\.policies\.solver\.learning_rate VALUE`"):
        check(["--model", policies])


def test_a_frozen_policy_with_adapters_is_named(tmp_path: Path, mrlm) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(FROZEN)
    words = ("fit", "--config", str(file), "--data", "RolloutDataModule", "--data.environment", "math")
    status, _, err = mrlm(*words)
    assert (status, "policies.judge: " in err) == (2, True)
    assert "it has lora but is not trained; set `lora: null`, or `trained: true`" in err
    given = ("--model.policies.solver.trained=false", "--model.policies.solver.lora.rank=8")
    assert "policies.solver: " in mrlm(*words, "--model.policies.judge.lora=null", *given)[2]


@pytest.mark.parametrize("first", ["--environment.text=", ""])
def test_a_word_may_be_longer_than_a_file_name(first: str) -> None:
    check_environment_names([first + 300 * "x", "--model", 300 * "y"])


def test_the_source_has_the_parameters_of_environments() -> None:
    import mrlm_environments

    from mrlm_pl.environment import Environment

    seen = 0
    for name in mrlm_environments.__all__:
        cls = getattr(mrlm_environments, name)
        if isinstance(cls, type) and issubclass(cls, Environment):
            read = parameters(name)
            seen += read is not None
            assert read is None or set(read) == {item.name for item in get_signature_parameters(cls, None)}, name
    assert seen >= 10


@pytest.mark.parametrize("group", FOLDERS)
def test_the_source_has_the_parameters_that_the_parser_finds(group: str) -> None:
    import importlib

    package = importlib.import_module(f"mrlm_pl.{FOLDERS[group]}")
    seen = 0
    for name in package.__all__:
        cls = getattr(package, name)
        if not inspect.isclass(cls):
            continue
        read = parameters(name)
        if read is not None:
            seen += 1
            assert set(read) >= {item.name for item in get_signature_parameters(cls, None)}, name
    assert seen >= 5


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_source_has_the_fields_of_settings(setting: str) -> None:
    from mrlm_pl import engines, losses, policy
    from mrlm_pl.learner import optimization
    from mrlm_pl.learner.policies import reference

    name = SETTINGS[setting]
    cls = next(
        vars(module)[name] for module in (reference, optimization, losses, policy, engines) if name in vars(module)
    )
    assert tuple(parameters(name) or ()) == tuple(inspect.signature(cls).parameters)


RUN = "--model GRPO --data RolloutDataModule"
CONFIG = f"--config {ROOT / 'configs' / 'quickstart.yaml'}"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--model some.where.Else --model.anything 1 --data Unknown --data.anything 1", "there is no module 'some'"),
        (f"{RUN} --data.environment parrot --data.environment.anything 1", "ParrotEnvironment has no 'anything'"),
        (f"--model.help GRPO {RUN} --model.nothing 1", "GRPO has no 'nothing'"),
        (
            f"{CONFIG} --data.iterations many",
            "error: data.iterations: expected an integer such as 2, but the value is 'many'\n",
        ),
        (
            f"{CONFIG} --trainer.max_epochs two",
            "error: trainer.max_epochs: expected an integer such as 2, but the value is 'two'\n",
        ),
        (
            f"{CONFIG} --checkpoint.minutes soon",
            "error: checkpoint.minutes: expected a number such as 0.5, but the value is 'soon'\n",
        ),
        (
            f"{CONFIG} --model.policies.main.learning_rate fast",
            "rate: expected a number such as 0.5, but the value is 'fast'\n",
        ),
    ],
)
def test_what_cannot_be_told_is_left_to_the_parser(
    words: str, answer: str, mrlm: Callable[..., tuple[int, str, str]]
) -> None:
    check(words.split())
    assert answer in mrlm("fit", *words.split())[2]


def test_a_wrong_value_of_the_checkpoint_in_a_file_has_its_line(
    tmp_path: Path, mrlm: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("checkpoint:\n  minutes: soon\n")
    answer = (
        f"mrlm: error: checkpoint.minutes: expected a number such as 0.5, but the value is 'soon' ({file}, line 2)\n"
    )
    assert mrlm("fit", *CONFIG.split(), "--config", str(file)) == (2, "", answer)


def test_an_unknown_key_in_a_file_of_a_command_without_a_trainer_is_answered_alike(
    tmp_path: Path, mrlm: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "collect.yaml"
    file.write_text("split: test\nnum_episode: 3\n")
    status, _, err = mrlm("collect", "--model", "builtin:tiny", "--environment", "math", "--config", str(file))
    assert status == 2
    assert err == f"mrlm: error: collect has no key 'num_episode'; did you mean 'num_episodes'? ({file}, line 2)\n"


@pytest.mark.parametrize("value", ["3", "1e-5", ".inf", "null", "1_0"])
def test_numbers_of_any_form_are_left_to_the_parser(value: str) -> None:
    config = str(ROOT / "configs" / "quickstart.yaml")
    check(["--config", config, "--data.iterations", value, "--trainer.gradient_clip_val", value])
    with pytest.raises(ConfigurationError, match="did you mean 'iterations'"):  # the same value, for another key
        check(["--config", config, "--data.iteratons", value])


def test_the_last_class_on_the_command_line_has_the_keys() -> None:
    check(["--model", "GRPO", "--model", "PPO", "--model.value_clip", "1"])
    check(["--model", "PPO", "--model.value_clip", "1", "--model", "GRPO"])  # earlier arguments are left to the parser
    with pytest.raises(ConfigurationError, match="PPO has no 'critic'; did you mean 'critics'"):
        check(["--model", "GRPO", "--model", "PPO", "--model.critic", "1"])


def test_a_class_with_its_arguments_in_one_word() -> None:
    check(["--model={class_path: GRPO, init_args: {}}", "--model.clip.low", "0.1"])
    with pytest.raises(ConfigurationError, match="GRPO has no 'nothing'"):
        check(["--model={class_path: GRPO, init_args: {}}", "--model.nothing", "1"])


def test_a_file_s_key_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  class_path: mrlm_pl.algorithms.GRPO\n  init_args:\n    policies:\n      a: {lorra: 1}\n")
    with pytest.raises(ConfigurationError, match=r"model.policies.a.lorra: .*'lora'.*run.yaml, line 5\)"):
        check(["--config", str(file)])
    assert (PACKAGE / "algorithms").is_dir()


def test_the_names_of_environments_are_those_of_the_classes_and_no_judges_or_tools() -> None:
    import mrlm_environments

    from mrlm_pl.environment import Environment

    short, names = environment_names()
    exported = (getattr(mrlm_environments, name) for name in mrlm_environments.__all__)
    classes = [cls for cls in exported if isinstance(cls, type) and issubclass(cls, Environment)]
    assert short == {cls.name: cls.__name__ for cls in classes}
    assert {"debate", "DebateEnvironment", "RemoteEnvironment"} <= {*names}
    assert not {"RuleJudge", "Calculator"} & {*names}, "`ledger` was answered by RuleJudge"
