"""Fixtures of all tests: a small random policy, a word environment, a quiet trainer."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment, TaskSource
from mrlm_pl.episode import Message, Task

SLOW_SECONDS = 3600

# A busy machine generates and runs examples slowly. Every run tries the same ones: a change fails for its own faults.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# The workers collect the same files, and dozens of processes import the package. Compile each file once, even if the
# environment of a container forbids it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure() -> None:
    """Restore SIGINT, which background processes of a shell, and so the tested processes, ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the later cases of a test ``long_after`` some; give slow tests without their own time limit an hour."""
    cases = Counter[str]()
    for item in items:
        if after := item.get_closest_marker("long_after"):
            test = item.nodeid.partition("[")[0]
            cases[test] += 1
            if cases[test] > after.args[0]:
                item.add_marker(pytest.mark.long)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def pytest_collection_finish() -> None:
    """Leave the million objects of imported modules and collected tests out of later collections of garbage."""
    gc.collect()
    gc.freeze()


class EchoEnvironment(SingleAgentEnvironment):
    """Pose ``n`` and reward the fraction of digits in the reply; an episode has ``turns`` replies."""

    name = "echo"

    def __init__(self, turns: int = 1, size: int = 16, fail_every: int = 0, reward: float | None = None) -> None:
        self.turns, self.size, self.fail_every, self.reward = turns, size, fail_every, reward

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": f"{split[0]}{n}"} for n in range(self.size)])

    def begin(self, task: Task) -> str:
        if self.fail_every and task.index % self.fail_every == 0:
            raise OSError("the back end is away")
        self.left = self.turns
        return f"Say {task.data['n']}"

    def reply(self, message: Message) -> Outcome:
        self.left -= 1
        text = message.content
        share = sum(letter.isdigit() for letter in text) / max(len(text), 1)
        paid = share if self.reward is None else self.reward
        return Outcome({"digits": paid}, "More" if self.left else None, success=share > 0.5)


@pytest.fixture(autouse=True)
def draws_of_its_own() -> None:
    """Seed the global generators, so that no test draws other numbers behind other tests."""
    os.environ.pop("PL_GLOBAL_SEED", None)  # of `seed_everything` in another test
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def echo() -> type[EchoEnvironment]:
    """Return the class of the word environment."""
    return EchoEnvironment


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random two-layer Llama with the built-in character tokenizer."""
    import torch
    from transformers import LlamaForCausalLM

    from mrlm_pl.policy.tiny import build_config, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        changes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "attention_dropout": 0.1}
        LlamaForCausalLM(build_config(**changes)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random GPT-2, for which the engine has no specialized decoder."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from mrlm_pl.policy.tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = build_tokenizer()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": len(tokenizer)}
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(**sizes, **tokens)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def quiet_trainer(tmp_path: Path) -> Any:
    """Return a factory of trainers that write below the test's folder and print nothing."""
    import lightning

    def make(**options: Any) -> lightning.Trainer:
        settings: Mapping[str, Any] = {
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "default_root_dir": tmp_path / "run",
        }
        return lightning.Trainer(**{**settings, **options})

    return make


@pytest.fixture
def rng() -> random.Random:
    """Return a seeded generator."""
    return random.Random(0)


@pytest.fixture
def outside_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the test's own folder, and unset the variables of launchers."""
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MRLM_DEBUG", "MRLM_RUN_FOLDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mrlm(outside_the_repository: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a runner of commands in this process: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        from mrlm_pl.cli.main import main

        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def unread(mrlm: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a runner of commands that end with their first output, as where `head` closes the pipe."""

    def end(*_: Any, file: Any = None, **__: Any) -> None:
        if file is None:
            raise SystemExit(99)

    def run(*arguments: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("builtins.print", end)
            assert mrlm(*arguments)[0] == 99

    return run
