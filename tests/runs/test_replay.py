"""Recorded episodes played again: every environment, here and over gRPC, with changed graders and broken records."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import Halves

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import DatasetTasks, Environment, Outcome, SingleAgentEnvironment
from mrlm_pl.episode import Episode, Message, Origin, Task
from mrlm_pl.episode_files import write_episodes
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.reward_models.scorer import Conversation, TextScore, TextScorer
from mrlm_pl.rollout.replay import differences
from mrlm_pl.runs import replay, rescore
from mrlm_pl.runs.console import EpisodeProgress
from mrlm_pl.runs.plugins import environments_by_name, import_environment
from mrlm_pl.runs.records.run import recorded_iterations
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.server import EnvironmentServer
from tests.support.runs.recorded_episodes import recorded
from tests.support.servers.environment_servers import Served

SHIPPED = [
    "alfworld",
    "centralized",
    "class_completion",
    "code",
    "collaborative_coding",
    "collaborative_reasoning",
    "coordination",
    "debate",
    "halves",
    "helpers",
    "knowledge_graph",
    "kuhn_poker",
    "length_ratio",
    "math",
    "plan_path",
    "proposer",
    "question",
    "scored",
    "shell",
    "sql",
    "tic_tac_toe",
    "tools",
    "webshop",
    "word_emission",
    "writing",
]

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(80)]


def equals(reply: str, row: dict[str, str]) -> float:
    return float(reply == row["answer"])


class Lengths(TextScorer):
    """Scores the number of characters of the last reply."""

    def score(self, messages: Conversation) -> TextScore:
        return TextScore(float(len(messages[-1].content)) / 50)


SETTINGS: dict[str, dict[str, Any]] = {
    "centralized": {"environment": Halves()},
    "question": {"data": ROWS, "rewards": [equals], "gold": "{answer}"},
    "scored": {"environment": Halves(), "scorer": Lengths()},
}
"""Of environments that play rows or another environment."""


def written(folder: Path, episodes: Sequence[Episode]) -> Path:
    write_episodes(folder / "episodes.jsonl.gz", episodes)
    return folder / "episodes.jsonl.gz"


@pytest.fixture
def served() -> Iterator[Callable[..., RemoteEnvironment]]:
    """A client of an environment that this process serves."""
    servers: list[Served] = []
    clients: list[RemoteEnvironment] = []

    def serve(cls: type[Environment], **settings: Any) -> RemoteEnvironment:
        loop = EventLoopThread()
        name = cls(**settings).name  # of the environment within, where there is one
        server = EnvironmentServer(Offer({name: lambda _: cls(**settings)}, processes=0, step_seconds=60.0))
        loop.submit(server.start()).result(60)
        servers.append(Served(server, loop))
        clients.append(RemoteEnvironment(servers[-1].target, name))
        return clients[-1]

    yield serve
    for client in clients:
        client.close()
    for server in servers:
        server.stop()


@pytest.fixture(params=["here", "over gRPC"])
def make(request: pytest.FixtureRequest, served: Callable[..., RemoteEnvironment]) -> Callable[..., Environment]:
    return served if request.param == "over gRPC" else lambda cls, **settings: cls(**settings)


def test_all_environments_are_here() -> None:
    import_environment("math")
    shipped = {
        name
        for name, cls in environments_by_name().items()
        if "mrlm_environments" in cls.__module__ and ".adapters." not in cls.__module__
    }
    assert shipped == {*SHIPPED, "harness"}, "tests/runs/test_harness_runs.py replays programs"


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.long_after(3)
def test_twenty_episodes_of_every_environment_are_equal_to_their_record_here_and_over_grpc(
    name: str, served: Callable[..., RemoteEnvironment], tmp_path: Path
) -> None:
    import_environment(name)
    cls, settings = environments_by_name()[name], SETTINGS.get(name, {})
    here, there = recorded(cls(**settings), 20), recorded(served(cls, **settings), 20, gold=cls(**settings).gold)
    assert not any(episode.failed for episode in (*here, *there))
    assert len({episode.to_json() for episode in here}) == 20
    assert [differences(one, other) for one, other in zip(here, there, strict=True)] == [[]] * 20
    for played, again in ((here, served(cls, **settings)), (there, cls(**settings))):
        report = replay("builtin:tiny", again, episodes=written(tmp_path, played))
        assert report.changed == {}
        assert report.equal == 20


class Dice(SingleAgentEnvironment):
    """Rewards each digit that is said, times ``scale``; ``drift`` makes it another one each time it is made."""

    name = "dice"
    made = 0

    def __init__(self, scale: float = 1.0, turns: int = 2, drift: bool = False) -> None:
        Dice.made += 1
        self.scale, self.turns, self.offset = scale, turns, Dice.made if drift else 0

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(7)])

    def begin(self, task: Task) -> str:
        self.left = self.turns
        return f"Say {task.data['n'] + self.offset}"

    def reply(self, message: Message) -> Outcome:
        self.left -= 1
        digits = float(message.content) if message.content.isdigit() else 0.0
        last = self.left == 0
        return Outcome({"digit": self.scale * digits}, None if last else "again", success=digits > 5 if last else None)


def dice(folder: Path, **settings: Any) -> tuple[list[Episode], Path]:
    environment = Dice(**settings)
    played = recorded(environment, 12)
    return played, written(folder, played)


def test_a_planted_nondeterminism_is_found(make: Callable[..., Environment], tmp_path: Path) -> None:
    played, path = dice(tmp_path, drift=True)
    report = replay("builtin:tiny", make(Dice, drift=True), episodes=path)
    assert report.equal == 0
    assert sorted(report.changed) == sorted(episode.id for episode in played)
    assert all("token_ids" in places[0] or "messages" in places[0] for places in report.changed.values())


def test_a_changed_grader_is_found(make: Callable[..., Environment], tmp_path: Path) -> None:
    played, path = dice(tmp_path)
    earned = {episode.id for episode in played if episode.reward}
    assert 0 < len(earned) < 12
    report = replay("builtin:tiny", make(Dice, scale=2.0), episodes=path)
    assert set(report.changed) == earned
    assert report.equal == 12 - len(earned)
    assert any("reward" in place for places in report.changed.values() for place in places)


def test_a_temperature_that_the_environment_measures_is_compared(tmp_path: Path) -> None:
    class Heated(Dice):
        def reply(self, message: Message) -> Outcome:
            return dataclasses.replace(super().reply(message), metrics={"temperature": self.scale})

    path = written(tmp_path, recorded(Heated(), 12))
    assert replay("builtin:tiny", Heated(), episodes=path).equal == 12
    changed = replay("builtin:tiny", Heated(scale=2.0), episodes=path).changed
    assert len(changed) == 12
    assert all("metrics.temperature: 1.0, 2.0" in places for places in changed.values())


@pytest.mark.parametrize("turns", [1, 3])
def test_an_episode_that_ends_earlier_or_later_differs(tmp_path: Path, turns: int) -> None:
    _, path = dice(tmp_path)
    report = replay("builtin:tiny", Dice(turns=turns), episodes=path)
    assert report.equal == 0
    if turns == 3:
        assert any("not_recorded" in place for place in report.changed["e0"])


def test_other_rewards_are_compared_in_pairs(tmp_path: Path) -> None:
    played, path = dice(tmp_path)
    report = rescore("builtin:tiny", Dice(scale=3.0), episodes=path)
    old = sum(episode.reward for episode in played) / 12
    assert report.episodes == 12
    assert report.old == pytest.approx(old)
    assert report.new == pytest.approx(3 * old)
    assert report.ci95[0] < 2 * old < report.ci95[1]
    assert report.rewards[played[0].id] == (played[0].reward, 3 * played[0].reward)
    assert (report.gained, report.lost) == ((), ())


def test_episodes_that_change_sides_are_named(tmp_path: Path) -> None:
    played = recorded(Dice(turns=2), 60)
    report = rescore("builtin:tiny", Dice(turns=1), episodes=written(tmp_path, played))
    first = {episode.id: episode.trajectories["agent"][0].messages[1].content for episode in played}
    won = {id for id, said in first.items() if said == "7"}
    before = {episode.id for episode in played if episode.success}
    assert set(report.gained) == won - before
    assert set(report.lost) == before - won
    assert won - before
    assert before - won


def test_episodes_that_end_early_and_branches_are_told(
    tmp_path: Path, mrlm: Callable[..., tuple[int, str, str]]
) -> None:
    played, _ = dice(tmp_path)
    branch = dataclasses.replace(played[0], id="branch", origin=Origin("e0", ("agent",), 0))
    failed = dataclasses.replace(played[1], error="broken", trajectories={}, stop_reason="error")
    greedy = dataclasses.replace(played[0], id="greedy", excluded="greedy")
    path = written(tmp_path, [branch, failed, greedy, *played[2:]])
    report = rescore("builtin:tiny", Dice(turns=3), episodes=path)
    assert (report.episodes, report.cut, report.failed) == (10, 10, 1)
    named = ("builtin:tiny", "--environment", "tests.runs.test_replay.Dice", "--episodes", str(path))
    _, _, err = mrlm("rescore", *named, "--environment.turns", "3")
    assert "10 episodes ended early" in err
    assert "1 episode had failed: left out" in err


def test_failures_are_counted_and_not_played(tmp_path: Path) -> None:
    played, _ = dice(tmp_path)
    failed = dataclasses.replace(played[0], error="broken", trajectories={}, stop_reason="error")
    report = replay("builtin:tiny", Dice(), episodes=written(tmp_path, [failed, *played[1:]]))
    assert (report.equal, report.failed) == (11, 1)


def test_an_iteration_or_an_episode_is_chosen(tmp_path: Path) -> None:
    _, path = dice(tmp_path)
    assert replay("builtin:tiny", Dice(), episodes=path, iteration=1).equal == 2
    assert replay("builtin:tiny", Dice(), episodes=path, episode="e3").equal == 1


def test_a_missing_iteration_episode_environment_or_file_is_named(tmp_path: Path) -> None:
    _, path = dice(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no episode of iteration 7 of 'dice'"):
        replay("builtin:tiny", Dice(), episodes=path, iteration=7)
    with pytest.raises(ConfigurationError, match=r"'e3' of iteration 1 of 'dice'$"):
        replay("builtin:tiny", Dice(), episodes=path, episode="e3", iteration=1)
    with pytest.raises(ConfigurationError, match=r"no episode of 'math'; there are \{'dice': 12\}"):
        replay("builtin:tiny", "math", episodes=path)
    with pytest.raises(DataError, match="there are no episodes at"):
        replay("builtin:tiny", Dice(), episodes=tmp_path / "nothing")


def test_half_a_file_is_an_error_after_its_whole_episodes(tmp_path: Path) -> None:
    _, path = dice(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="cannot be read"):
        replay("builtin:tiny", Dice(), episodes=path)


@pytest.mark.long
def test_a_run_without_exported_policies_is_replayed(mrlm: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    run = tmp_path / "run"
    settings = ("--data.iterations", "1", "--data.groups", "2", "--data.group_size", "2")
    assert mrlm("fit", "--config", str(config), *settings, "--output", str(run))[0] == 0
    shutil.rmtree(run / "policies")
    status, out, _ = mrlm("replay", run.name)
    assert (status, out) == (0, "4 of 4 episodes are equal to their record\n")
    status, out, err = mrlm("replay", str(run), "--episode", "no such episode")
    assert status == 2
    assert "no episode with id 'no such episode'" in err
    assert "did you mean '0-1-1'?" in mrlm("replay", str(run), "--episode", "0-1-1-0")[2]


@pytest.mark.parametrize("command", ["replay", "rescore", "whatif"])
def test_a_run_that_is_left_out_is_asked_for(mrlm: Callable[..., tuple[int, str, str]], command: str) -> None:
    status, _, err = mrlm(command, "--episodes", "episodes.jsonl")
    assert status == 2
    assert err.startswith("mrlm: error: RUN missing: the episodes are played in a run's environment; give it first")
    assert f"`mrlm {command} RUN`" in err
    assert mrlm(command, "--help")[0] == 0


def test_the_commands_say_what_differs(
    mrlm: Callable[..., tuple[int, str, str]], served: Callable[..., RemoteEnvironment], tmp_path: Path
) -> None:
    _, path = dice(tmp_path)
    place = ("--environment.address", served(Dice).addresses[0].target, "--environment.name", "dice")
    remote = ("builtin:tiny", "--environment", "RemoteEnvironment", *place, "--episodes", str(path))
    assert mrlm("replay", *remote)[:2] == (0, "12 of 12 episodes are equal to their record\n")
    named = ("builtin:tiny", "--environment", "tests.runs.test_replay.Dice", "--episodes", str(path))
    status, out, _ = mrlm("replay", *named, "--environment.scale", "2", "--output", str(tmp_path / "report.json"))
    assert status == 1
    assert "(recorded, replayed): " in out
    assert json.loads((tmp_path / "report.json").read_text())["changed"]
    status, _, err = mrlm("replay", *named, "--output", f"{path}/report.json")
    assert (status, f"error: output: '{path}/report.json' cannot be written: " in err) == (2, True)
    status, out, _ = mrlm("rescore", *named, "--environment.scale", "2")
    assert status == 0
    assert out.startswith("reward ")
    assert "over 12 episodes" in out


@pytest.mark.parametrize("command", ["replay", "rescore"])
def test_reports_are_written_before_they_are_printed(unread: Callable[..., None], tmp_path: Path, command: str) -> None:
    _, path = dice(tmp_path)
    named = ("builtin:tiny", "--environment", "tests.runs.test_replay.Dice", "--episodes", str(path))
    unread(command, *named, "--output", "report.json")
    assert json.loads(Path("report.json").read_text())["failed"] == 0


def test_the_class_that_plays_is_named(mrlm: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    _, path = dice(tmp_path)
    Path("stricter.py").write_text(
        "from tests.runs.test_replay import Dice\n\n\n"
        "class Own(Dice):\n    def __init__(self, title: str = 'Dice') -> None:\n        super().__init__()\n"
    )
    own = ("builtin:tiny", "--environment", "./stricter.py:Own", "--episodes", str(path))
    for setting, shown in (((), "defaults"), (("--environment.title", "Würfel ⚅"), 'title "Würfel ⚅"')):
        status, _, err = mrlm("rescore", *own, *setting)
        assert (status, f"mrlm: playing again in dice, stricter.Own ({shown})\n" in err) == (0, True), err


def test_progress_counts_the_chosen_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.runs.records.replay.CHUNK", 2)
    episodes = recorded(Halves(), 3)
    path, seen = written(tmp_path, episodes), list[tuple[int, int]]()
    report = replay("builtin:tiny", Halves, episodes=path, progress=lambda *counts: seen.append(counts))
    number = len(episodes)
    assert (report.equal, seen) == (number, [(min(done, number), number) for done in range(0, number + 2, 2)])


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with EpisodeProgress() as progress:
        for done in range(1001):
            progress(done, 1000)
    out, err = capsys.readouterr()
    first, *lines = err.splitlines()
    assert (out, first, len(lines)) == ("", "mrlm: playing 1,000 episodes", 19)
    assert lines[0].startswith("mrlm: episodes   50/1000  0:00:0")


@pytest.mark.parametrize("value", [b"nan", b"inf", b"\xff", b"x"])
def test_metrics_that_cannot_be_read_count_no_iterations(tmp_path: Path, value: bytes) -> None:
    metrics = tmp_path / "metrics.csv"
    metrics.write_bytes(b"progress/iteration\n3\n")
    assert recorded_iterations(tmp_path) == 3
    metrics.write_bytes(b"progress/iteration\n" + value + b"\n")
    assert recorded_iterations(tmp_path) == 0
