"""The commands that read a run, on runs of the shipped program with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mrlm_environments import HarnessEnvironment

import mrlm_pl
from mrlm_pl.cli.main import main
from mrlm_pl.episode_files import read_episodes
from tests.support.servers.harness_programs import asked, posted

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "examples/gateway/two_agents.py", "{question}"]
STARTED = {"function": "./examples/gateway/two_agents.py:play", "command": json.dumps(COMMAND)}


@pytest.mark.parametrize("started", STARTED)
def test_a_run_of_a_program_is_evaluated_replayed_and_credited(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    run, report = str(tmp_path / "run"), tmp_path / "report.json"
    own, rewards = "--data.environment.init_args.", "[./examples/questions/rewards.py:{}]"
    settings = [
        "--data.groups",
        "2",
        "--data.group_size",
        "4",
        "--data.iterations",
        "2",
        "--trainer.accelerator",
        "cpu",
    ]
    settings += [f"{own}function", "null"] * (started == "command") + [f"{own}{started}", STARTED[started]]
    settings += [f"{own}rewards", rewards.format("brevity")]
    trust = ["--environment", "HarnessEnvironment"] * (started == "command")  # a run's commands are not started unasked
    said = of(capfd)
    assert main(["train", "--config", "configs/tasks/harness.yaml", "--output", run, *settings]) == 0
    [*_, last] = sorted((tmp_path / "run").rglob("iteration-*.jsonl.zst"))
    episodes = list(read_episodes(last))
    assert [(episode.error, set(episode.trajectories)) for episode in episodes] == [(None, {"solver", "checker"})] * 8

    assert main(["eval", *trust, "--model", run, "-n", "4", "--output", str(report)]) == 0
    evaluated = json.loads(report.read_text())
    assert (evaluated["environment"], evaluated["episodes"], evaluated["failed"]) == ("harness", 4, 0)
    assert main(["replay", run, *trust]) == 0
    assert "16 of 16 episodes are equal to their record" in said()
    other = ["--environment.rewards", rewards.format("exact")]
    assert main(["rescore", run, *trust, *other, "--output", str(report)]) == 0
    rescored = json.loads(report.read_text())
    assert rescored["new"] != rescored["old"]
    assert main(["recredit", run]) == 0
    again = said()
    assert re.search(r"solver: 16 turns, correlation 1\.0000, 0 sign changes", again), again
    decision = ["--episode", episodes[0].id, "--agent", "checker", "--turn", "1", "--samples", "2"]
    for options in ([], ["--message", "7"], ["--message", "7", "--rest", "replay"]):
        assert main(["whatif", run, *trust, *decision, *options]) == 0
        assert "advantage of the decision of checker at turn 1" in said()
    assert main(["arena", f"A={run}", "B=builtin:tiny", "-n", "2", *trust]) == 0
    assert re.search(r"^A minus B [+-]\d", said(), re.MULTILINE), "agents who earn the same are a team"


def of(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns what was printed since its last call."""
    return lambda: capfd.readouterr().out


def test_a_run_continues_beside_programs_with_faults(outside_the_repository: None, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "What is 1 + 2?"}]
    edited = [*said, {"role": "assistant", "content": "not said"}, *said]

    async def play(row: Mapping[str, Any], endpoint: Any) -> float:
        url, body = f"{endpoint.base_url}/chat/completions", {"model": "agent", "messages": said}
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", said)
            match row["fault"]:
                case "hangs":
                    await asyncio.sleep(3600)
                case "crashes":
                    raise OSError("boom")
                case "floods":
                    await asyncio.gather(*(asked(http, endpoint, "agent", said) for _ in range(20)))
                case "edits":
                    await asked(http, endpoint, "agent", edited)
                case "intrudes":
                    assert (await asyncio.to_thread(posted, url, body, "sk-wrong"))[0] == 401
        return 1.0

    faults = ("hangs", "crashes", "floods", "edits", "intrudes")
    environment = HarnessEnvironment(
        {"train": [{"fault": fault} for fault in faults]}, function=play, lease_seconds=3.0, max_calls=8
    )
    data = mrlm_pl.RolloutDataModule(
        environment, groups=12, group_size=2, iterations=2, retries=0, sampling=mrlm_pl.Sampling(max_tokens=4)
    )
    trainer = mrlm_pl.Trainer(default_root_dir=tmp_path, limit_val_batches=0, max_epochs=1)
    trainer.fit(mrlm_pl.GRPO({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3)}), data)
    found: dict[str, list[Any]] = {fault: [] for fault in faults}
    for path in sorted(tmp_path.rglob("iteration-*.jsonl.zst")):
        for episode in read_episodes(path):
            found[episode.task.data["fault"]].append(episode)
    assert all(found.values()), "each fault was played"
    for fault, reason in (("hangs", "made no call within 3 s"), ("crashes", "OSError: boom")):
        assert all(reason in str(episode.error) for episode in found[fault])
    for fault, (name, count) in {"floods": ("refused", 13), "edits": ("edited_histories", 1)}.items():
        assert all(episode.metrics[name] == count for episode in found[fault])
    assert all(episode.reward == 1.0 for fault in faults[2:] for episode in found[fault])
    assert environment.gateway.counts["invalid_api_key"] == len(found["intrudes"])
