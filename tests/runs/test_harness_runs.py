"""The commands that read a run, on runs of the shipped program with OpenAI's client."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mrlm_pl.cli.main import main
from mrlm_pl.episode_files import read_episodes

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
    assert re.search(r"solver: 16 turns, correlation 1\.0000, 0 signs change", again), again
    decision = ["--episode", episodes[0].id, "--agent", "checker", "--turn", "1", "--samples", "2"]
    for options in ([], ["--message", "7"], ["--message", "7", "--rest", "replay"]):
        assert main(["whatif", run, *trust, *decision, *options]) == 0
        assert "advantage of the decision of checker at turn 1" in said()
    assert main(["arena", f"A={run}", "B=builtin:tiny", "-n", "2", *trust]) == 0
    assert re.search(r"Elo B -?\d+", said())


def of(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that returns what was printed since its last call."""
    return lambda: capfd.readouterr().out
