"""The extensions of examples/plugin, by import path in YAML and by a plugin's short names."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from mrlm_pl.engines import InProcessEngine, SampleRequest, Sampling
from mrlm_pl.environment import Message
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import EngineError
from mrlm_pl.policy.tiny import build_tokenizer, tiny_model_path

PLUGIN = Path(__file__).parents[3] / "examples" / "plugin"
SMALL = {"groups": 2, "group_size": 2, "iterations": 4, "validation_episodes": 2}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the package visible as an installed distribution."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN / "my_lab", site / "my_lab")
    information = site / "my_lab-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lab\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text("[mrlm_pl.plugins]\nmy_lab = my_lab\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield


def configuration(environment: str, engine: str, callback: str, reward: float) -> str:
    """Return the path of a configuration file that names the three classes."""
    data = {**SMALL, "environment": environment, "engine": engine, "sampling": {"max_tokens": 4}}
    goal = {"class_path": callback, "init_args": {"reward": reward, "patience": 2}}
    trainer = {"accelerator": "cpu", "max_epochs": 1, "limit_val_batches": 0, "callbacks": [goal]}
    content = {"model": "GRPO", "data": {"class_path": "RolloutDataModule", "init_args": data}, "trainer": trainer}
    Path("own.yaml").write_text(yaml.safe_dump(content))
    return "own.yaml"


def iterations_of(run: str) -> int:
    return len(list(Path(run, "episodes").iterdir()))


@pytest.mark.parametrize("by", ["path", "name"])
@pytest.mark.long_after(1)
def test_all_are_used_from_yaml(by: str, mrlm) -> None:
    package = "my_lab." if by == "path" else ""
    names = [f"{package}{name}" for name in ("Sums", "PlainEngine", "RewardGoal")]
    status, _, errors = mrlm("fit", "--config", configuration(*names, reward=-1.0), "--trainer.default_root_dir", "run")
    assert status == 0, errors
    assert iterations_of("run") == 2, "the goal was reached in the first two iterations"
    status, _, errors = mrlm("train", "--output", "run", "--resume")
    assert (status, iterations_of("run")) == (0, 2), errors


def test_an_unreached_goal_does_not_stop_the_run(mrlm) -> None:
    config = configuration("sums", "PlainEngine", "RewardGoal", reward=2.0)
    status, _, errors = mrlm("fit", "--config", config, "--trainer.default_root_dir", "run")
    assert status == 0, errors
    assert iterations_of("run") == SMALL["iterations"]


@pytest.mark.parametrize("by", ["path", "name"])
@pytest.mark.long_after(1)
def test_the_algorithm_and_its_rule_are_used_from_yaml(by: str, mrlm) -> None:
    package = "my_lab." if by == "path" else ""
    config = configuration("sums", "PlainEngine", "RewardGoal", reward=2.0)
    small = ("--data.iterations", "1", "--trainer.default_root_dir")
    status, _, errors = mrlm("fit", "--config", config, "--model", f"{package}MedianGRPO", *small, "own")
    assert status == 0, errors
    rule = ("--model.advantage", f"{package}median_advantages")
    status, _, errors = mrlm("fit", "--config", config, *rule, *small, "rule")
    assert status == 0, errors
    weights = [Path(run, "policies", "main", "model.safetensors").read_bytes() for run in ("own", "rule")]
    assert weights[0] == weights[1], "the same rule in two ways"
    assert "advantage: my_lab.median_advantages" in Path("rule/config.yaml").read_text()


def test_the_rule_subtracts_the_median_of_each_group() -> None:
    from my_lab import median_advantages

    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 2.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    # Deviations from the median are -1, 0, 4, with a mean absolute value of 5 / 3.
    assert median_advantages(rewards, groups).tolist() == pytest.approx([-0.6, 0.0, 2.4, 0.0, 0.0], abs=1e-5)


def test_the_environment_keeps_the_contract() -> None:
    from my_lab import Sums

    check_environment(Sums())
    environment = Sums(largest=9)
    task = environment.tasks("train")[0]
    first, second = task.data["terms"]
    right, wrong = Message("assistant", f"{first}+{second}={first + second}"), Message("assistant", "about 10")
    environment.reset(task)
    won = environment.step({"agent": right})
    assert (won.done, won.rewards) == (True, {"agent": 1.0})
    environment.reset(task)
    hint = environment.step({"agent": wrong})
    assert (hint.done, hint.rewards) == (False, {"agent": 0.0})
    assert environment.step({"agent": right}).rewards == {"agent": 0.5}


def test_the_engine_agrees_with_the_built_in_engine() -> None:
    from my_lab import PlainEngine

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path()).eval()
    context = tuple(build_tokenizer().encode("12+30?"))
    request = SampleRequest(context, "main", 3, Sampling(temperature=0.0, max_tokens=6))
    found = []
    for engine in (PlainEngine(), InProcessEngine()):
        engine.load("main", model, 7)
        found.append(asyncio.run(engine.sample([request]))[0])
        engine.close()
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-4)
    assert found[0].version == 7
    own = PlainEngine()
    own.load("main", model, 1)
    with pytest.raises(EngineError, match="set top_p to 1"):
        own.generate(SampleRequest(context, "main", 3, Sampling(top_p=0.5)))
    with pytest.raises(EngineError, match="'other' is not loaded; there are: main"):
        own.generate(SampleRequest(context, "other", 3, Sampling()))


@pytest.mark.parametrize("file", sorted((PLUGIN / "my_lab").glob("*.py")), ids=lambda path: path.stem)
def test_an_extension_has_at_most_sixty_lines(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 60
