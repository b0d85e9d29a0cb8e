"""An environment of a server is named on the command line and in files like any other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mrlm_environments.math.environment import MathEnvironment

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.server import EnvironmentServer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    server = EnvironmentServer(Offer({"math": lambda settings: MathEnvironment((1, 1), ["algebra"])}, 0, 20.0))
    loop = EventLoopThread()
    loop.submit(server.start()).result(100)
    yield f"127.0.0.1:{server.port}"
    loop.submit(server.stop()).result(100)
    loop.close()


FRESH = "{class_path: RemoteEnvironment, init_args: {}}"  # drops the settings of a file's own environment


def flags(target: str, before: str = "", environment: str = "RemoteEnvironment") -> list[str]:
    options = {"environment": environment, "environment.address": target, "environment.name": "math"}
    return [word for name, value in options.items() for word in (f"--{before}{name}", value)]


@pytest.mark.long
def test_the_commands_that_play_take_its_class_name(mrlm, target):
    words = flags(target)[2:]
    status, out, err = mrlm("check-env", "RemoteEnvironment", *words)
    assert (status, out.splitlines()[-1]) == (0, "math: 7 of 7 checks passed, 3 do not apply"), err
    status, out, err = mrlm("eval", "--model", "builtin:tiny", "--num-episodes", "4", *flags(target))
    assert status == 0, err
    assert "environment    math (test, seed 0)" in out
    status, out, err = mrlm("collect", "--model", "builtin:tiny", "-n", "3", "--output", "c.jsonl", *flags(target))
    assert status == 0, err
    kinds = [json.loads(line)["task"]["data"]["kind"] for line in Path("c.jsonl").read_text().splitlines()]
    assert kinds == ["algebra"] * 3, "the server's settings count"


def test_a_run_takes_it_by_flags_in_place_of_its_own(mrlm, target):
    options = {
        "--config": str(ROOT / "configs/quickstart.yaml"),
        "--data.groups": "1",
        "--data.iterations": "1",
        "--trainer.default_root_dir": "run",
        "--trainer.callbacks": "null",
        "--trainer.enable_progress_bar": "false",
        "--trainer.accelerator": "cpu",
    }
    status, _, err = mrlm(
        "fit", *(word for option in options.items() for word in option), *flags(target, "data.", FRESH)
    )
    assert status == 0, err
    assert Path("run/policies/main/model.safetensors").is_file()
    assert "class_path: mrlm_pl.RemoteEnvironment" in Path("run/config.yaml").read_text()


def test_a_file_names_it_with_several_addresses(mrlm, capsys):
    Path("remote.yaml").write_text(
        "model: {class_path: GRPO}\n"
        "data:\n  class_path: RolloutDataModule\n  init_args:\n    environment:\n"
        "      class_path: RemoteEnvironment\n      init_args: {address: ['a:1', 'b:2'], name: chess}\n"
    )
    status, out, _ = mrlm("fit", "--config", "remote.yaml", "--print_config")
    assert status == 0
    assert "        - a:1\n        - b:2\n        name: chess\n" in out


def test_mistakes_are_answered_with_what_is_near(mrlm):
    status, _, err = mrlm("check-env", "RemoteEnvironmnt", "--environment.name", "math")
    assert status == 2
    assert "there is no environment 'RemoteEnvironmnt'; did you mean 'RemoteEnvironment'?" in err
    status, _, err = mrlm("check-env", "RemoteEnvironment", "--environment.adress", "a:1")
    assert status == 2
    assert "RemoteEnvironment has no 'adress'; did you mean 'address'?" in err


def test_it_is_found_without_torch():
    code = (
        "import sys; from mrlm_pl.runs.plugins import import_environment; import_environment('RemoteEnvironment');"
        "print('mrlm_pl.serving' in sys.modules, sorted({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "True []"
