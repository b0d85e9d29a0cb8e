"""`evaluate` and `collect` from Python: kinds of models and environments."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mrlm_environments import CoordinationGame, HarnessEnvironment, MathEnvironment
from torch.distributed import checkpoint

import mrlm_pl
from mrlm_pl.engines import InProcessEngine
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.runs.collection import serve_gateway
from mrlm_pl.runs.records.run import recorded_settings

SHORT: dict[str, Any] = {"num_episodes": 6, "sampling": mrlm_pl.Sampling(max_tokens=4), "device": "cpu"}


def test_a_model_and_an_environment_may_be_given_in_every_form(model_folder: Path) -> None:
    class Easy(MathEnvironment):
        def __init__(self) -> None:
            super().__init__(difficulty=[1, 1])

    policy = mrlm_pl.Policy(str(model_folder))
    policy.load()
    reports = [
        mrlm_pl.evaluate(model, environment, **SHORT)
        for model in (str(model_folder), model_folder, policy, {"agent": policy})
        for environment in (Easy(), Easy)
    ]
    assert [report.episodes for report in reports] == [6] * 8
    assert len({report.mean_reward for report in reports}) == 1
    assert {report.environment for report in reports} == {"math"}
    assert policy.network.training, "its mode is restored"
    by_name = mrlm_pl.evaluate(policy, "math", **SHORT)
    instance = mrlm_pl.evaluate(policy, MathEnvironment(), **SHORT)
    assert (by_name.settings, instance.settings) == ({}, None), "arguments of an instance are not known"
    assert by_name.to_dict() == {**instance.to_dict(), "settings": {}, "changed_settings": "defaults"}


def test_a_run_brings_its_environment_sampling_and_seats(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run/policies").mkdir(parents=True)
    (tmp_path / "run/policies/main").symlink_to(model_folder)
    environment = {"class_path": "mrlm_environments.MathEnvironment", "init_args": {"difficulty": [2, 2]}}
    settings = {"environment": environment, "validation_sampling": {"max_tokens": 3}, "max_turns": 5}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({"data": {"init_args": settings}}))
    run = mrlm_pl.evaluate(tmp_path / "run", num_episodes=4, device="cpu")
    level = MathEnvironment(difficulty=[2, 2])
    given = mrlm_pl.evaluate(model_folder, level, num_episodes=4, sampling=mrlm_pl.Sampling(max_tokens=3), device="cpu")
    assert [item["messages"] for item in run.transcripts] == [item["messages"] for item in given.transcripts]


TEAM = """
model:
  class_path: GRPO
  init_args:
    policies: {full: {learning_rate: 0.01}, low: {learning_rate: 0.01, lora: {rank: 2}}}
    seats: {pro: full, con: low}
data:
  class_path: RolloutDataModule
  init_args: {environment: {class_path: debate}, groups: 1, group_size: 2, iterations: 3, sampling: {max_tokens: 4}}
trainer: {accelerator: cpu, limit_val_batches: 0}
"""


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.long
def test_a_run_that_has_not_finished_plays_with_its_last_checkpoint(
    mrlm: Any, capsys: pytest.CaptureFixture[str], shards: bool
) -> None:
    Path("team.yaml").write_text(TEAM)
    assert mrlm("fit", "--config", "team.yaml", "--output", "run")[0] == 0
    whole = mrlm_pl.evaluate("run", **SHORT)
    assert "not finished" not in capsys.readouterr().err
    run, last = Path("run"), Path("run/checkpoints/last.ckpt")
    if shards:
        saved = torch.load(last, weights_only=True)
        last.unlink()
        checkpoint.save({"state_dict": saved["state_dict"]}, checkpoint_id=last, no_dist=True)
        torch.save({**saved, "state_dict": {}}, last / "meta.pt")
    _train_on(run)
    found = mrlm_pl.evaluate("run", **SHORT)
    message = "mrlm: the policies have the weights of run/checkpoints/last.ckpt, of iteration 3\n"
    assert capsys.readouterr().err.count(message) == 1, "once for both policies"
    assert found.to_dict() == {**whole.to_dict(), "checkpoint": "iteration 3"}
    (run / "policies").rename(run / "none")
    assert mrlm_pl.evaluate("run", **SHORT).to_dict() == found.to_dict()
    assert mrlm("eval", "--model", "run", "-n", "2")[0] == 0
    assert mrlm("eval", "--model", "run", "builtin:tiny", "-n", "2", "--output", "table.json")[0] == 0
    assert "kept" in mrlm("eval", "--model", "run", "builtin:tiny", "-n", "2", "--output", "table.json")[1]


def _train_on(run: Path) -> None:
    """Leave a run as one that was killed after it had trained on: a later checkpoint than the exported policies."""
    (run / "state.json").write_text('{"state": "interrupted"}')
    for path in run.glob("policies/*/model.safetensors"):
        path.unlink()
        os.utime(path.with_name("config.json"), (0, 0))


def test_turns_are_generated_in_the_precision_of_the_run_where_the_machine_has_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "policies").mkdir(parents=True)
    (run / "policies/main").symlink_to(model_folder)
    (run / "state.json").write_text('{"state": "finished", "precision": "bf16-mixed"}')
    files = (tmp_path / f"{number}.jsonl" for number in itertools.count())

    def logprobs(model: Path, **options: Any) -> list[tuple[float, ...]]:
        file = mrlm_pl.collect(model, "math", output=next(files), **SHORT, **options)
        return [row.logprobs for episode in read_episodes(file.path) for row in episode.rows()]

    full, half = logprobs(model_folder), logprobs(model_folder, precision="bf16-mixed")
    assert full != half
    for has, expected in ((True, half), (False, full)):
        monkeypatch.setattr("mrlm_pl.runs.seated_model.computes_bf16", lambda device, has=has: has)
        assert logprobs(run) == expected
        assert logprobs(run, precision="32-true") == full
        assert logprobs(run, precision="bf16-mixed") == half
        assert mrlm_pl.evaluate(run, "math", **SHORT).precision == ("bf16-mixed" if has else "32-true")
    assert mrlm_pl.evaluate(run, "math", precision="bf16-mixed", **SHORT).precision == "bf16-mixed"
    with pytest.raises(ConfigurationError, match="precision is 'bf16'; "):
        mrlm_pl.evaluate(run, "math", precision="bf16", **SHORT)  # type: ignore[arg-type]
    (run / "state.json").write_text("{")
    assert logprobs(run) == full


def test_weights_in_memory_keep_their_dtype_unless_a_precision_is_given(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, dtypes = mrlm_pl.Policy(str(model_folder)), []
    policy.load()
    policy.network.to(torch.bfloat16)

    def engine(dtype: Any) -> InProcessEngine:
        dtypes.append(dtype)
        return InProcessEngine(dtype)

    monkeypatch.setattr("mrlm_pl.runs.seated_model.InProcessEngine", engine)
    for precision in (None, "bf16-mixed", "32-true"):
        assert mrlm_pl.evaluate(policy, "math", precision=precision, **SHORT).failed == 0
    assert dtypes == [None, torch.bfloat16, torch.float32]


def test_a_precision_reaches_the_gateway_and_the_arena(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def engine(dtype: Any) -> Any:
        given.append(dtype)
        raise KeyboardInterrupt

    monkeypatch.setattr("mrlm_pl.runs.seated_model.InProcessEngine", engine)
    model: Any = str(model_folder)
    for play in (
        lambda: mrlm_pl.runs.arena({"A": model, "B": model}, "coordination", precision="bf16-mixed", device="cpu"),
        lambda: serve_gateway(
            model, HarnessEnvironment({"train": [{}]}), output="a.jsonl", listening=print, precision="bf16-mixed"
        ),
    ):
        with pytest.raises(KeyboardInterrupt):
            play()
    assert given == [torch.bfloat16] * 2


def test_turns_beyond_the_context_window_are_told_once(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mrlm_pl.policy.policy.context_window", lambda _: 4)
    mrlm_pl.evaluate(model_folder, "math", **SHORT)
    mrlm_pl.runs.arena({"A": str(model_folder), "B": str(model_folder)}, "coordination", **SHORT)
    told = [record.args for record in caplog.records if "context window of policy" in record.getMessage()]
    assert told == [("sampling", 4, name, 4) for name in ("main", "A.main", "B.main")]


def test_each_seating_of_an_arena_is_played_by_its_players(monkeypatch: pytest.MonkeyPatch) -> None:
    games = list[Any]()
    monkeypatch.setattr("mrlm_pl.runs.evaluation.arena_report", lambda _, played, **__: games.extend(played))
    players = {"A": "builtin:tiny", "B": "builtin:tiny"}
    mrlm_pl.runs.arena(players, "coordination", **SHORT)
    found = [
        {agent: row.policy for episode in episodes for agent, (row,) in episode.trajectories.items()}
        for _, episodes in games
    ]
    assert found == [{"row": f"{row}.main", "column": f"{column}.main"} for row in "AB" for column in "AB"]
    assert [seating for seating, _ in games] == [{"row": row, "column": column} for row in "AB" for column in "AB"]
    with pytest.raises(ConfigurationError, match=r"make 4 seatings of .* episodes, and 3 are the most; give fewer"):
        mrlm_pl.runs.arena(players, "coordination", max_seatings=3, **SHORT)


def test_a_model_stands_for_a_policy_of_a_team(model_folder: Path) -> None:
    team = {"row": mrlm_pl.Policy(str(model_folder)), "column": mrlm_pl.Policy("builtin:tiny")}
    named = {"row": str(model_folder), "column": "builtin:tiny"}
    reports = [mrlm_pl.evaluate(model, "coordination", **SHORT) for model in (team, named)]
    assert reports[0].to_dict()["transcripts"] == reports[1].to_dict()["transcripts"]


def test_mistakes_name_the_value_and_the_remedy(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no environment 'mth'; did you mean 'math'"):
        mrlm_pl.evaluate(model_folder, "mth")
    with pytest.raises(
        ConfigurationError,
        match="a script's run or a run on files; give it as `--environment NAME`, in Python as `environment=NAME`",
    ):
        mrlm_pl.evaluate(model_folder)
    with pytest.raises(
        ConfigurationError, match="'nothing' has none: it is a model, or no run folder here; give it as"
    ):
        mrlm_pl.replay("nothing")
    two = {"first": mrlm_pl.Policy(str(model_folder)), "second": mrlm_pl.Policy(str(model_folder))}
    with pytest.raises(ConfigurationError, match="agent 'row' has no seat among the policies"):
        mrlm_pl.evaluate(two, CoordinationGame())
    with pytest.raises(ConfigurationError, match="seat 'row' names policy 'third', which does not exist"):
        mrlm_pl.evaluate(two, CoordinationGame(), seats={"row": "third"})
    with pytest.raises(ConfigurationError, match=r"model holds <class .*Policy'>; give a run folder"):
        mrlm_pl.evaluate(mrlm_pl.Policy, "math")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"sampling is 0\.5; give Sampling or a mapping"):
        mrlm_pl.evaluate(model_folder, "math", sampling=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="must be a multiple of samples_per_task"):
        mrlm_pl.evaluate(model_folder, "math", num_episodes=3, samples_per_task=2)


def test_episodes_are_collected_and_half_a_file_continues(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.runs.collection.CHUNK", 2)
    policy = mrlm_pl.Policy(str(model_folder))
    file = mrlm_pl.collect(policy, "math", output="whole.jsonl", **SHORT)
    assert (file.played, file.kept, file.failed, str(file)) == (6, 6, 0, "6 of 6 episodes in whole.jsonl")
    add = type(file).add
    calls = iter((True, False))

    def stop(self: Any, *arguments: Any) -> None:
        if not next(calls):
            raise InterruptedError
        add(self, *arguments)

    monkeypatch.setattr(type(file), "add", stop)
    with pytest.raises(InterruptedError):
        mrlm_pl.collect(policy, "math", output="half.jsonl", **SHORT)
    monkeypatch.setattr(type(file), "add", add)
    with pytest.raises(ConfigurationError, match="is half of a collection with other options"):
        mrlm_pl.collect(policy, "math", output="half.jsonl", **{**SHORT, "num_episodes": 8})
    with pytest.raises(ConfigurationError, match="is half of a collection with other options"):
        mrlm_pl.collect(policy, "math", output="half.jsonl", precision="bf16-mixed", **SHORT)
    assert mrlm_pl.collect(policy, "math", output="half.jsonl", precision="32-true", **SHORT).kept == 6
    texts = [
        [row.messages for episode in mrlm_pl.read_episodes(name) for row in episode.rows()]
        for name in ("whole.jsonl", "half.jsonl")
    ]
    assert texts[0] == texts[1]


def test_a_run_with_a_reward_of_a_file_is_evaluated_from_python(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text("def exact(reply, row):\n    return 0.5\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 1?"}\n')
    arguments = {
        "data": {"test": str(tmp_path / "rows.jsonl")},
        "prompt": "{question}",
        "rewards": [f"{tmp_path}/own_rewards.py:exact"],
    }
    (tmp_path / "run/policies").mkdir(parents=True)
    (tmp_path / "run/policies/main").symlink_to(model_folder)
    environment = {"class_path": "mrlm_environments.QuestionEnvironment", "init_args": arguments}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"environment": environment}}}))
    report = mrlm_pl.evaluate(tmp_path / "run", "question", **{**SHORT, "num_episodes": 1})
    assert (report.failed, report.mean_reward) == (0, 0.5)


def test_the_settings_of_a_run_name_the_environment_of_a_server(tmp_path: Path) -> None:
    remote = {"class_path": "RemoteEnvironment", "init_args": {"address": "127.0.0.1:1", "name": "math"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"environment": remote}}}))
    assert recorded_settings(tmp_path) == {"math": {"address": "127.0.0.1:1", "name": "math"}}


class _Faulty(MathEnvironment):
    def __init__(self, fault: str) -> None:
        super().__init__(difficulty=(1, 1))
        self.fault = fault

    def _raise_in(self, method: str) -> None:
        if self.fault == method:
            raise OSError("no such place")

    def close(self) -> None:
        self._raise_in("close")

    def bounds(self, task: mrlm_pl.Task) -> tuple[float, float] | None:
        self._raise_in("bounds")
        return super().bounds(task)

    def majority(self, task: mrlm_pl.Task, replies: Any) -> bool | None:
        self._raise_in("majority")
        return super().majority(task, replies)

    def reply(self, message: mrlm_pl.Message) -> mrlm_pl.Outcome:
        self._raise_in("reply")
        return super().reply(message)


@pytest.mark.parametrize("method", ["close", "bounds", "majority"])
def test_episodes_that_were_played_keep_their_report_if_the_environment_fails_afterwards(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"num_episodes": 4, "samples_per_task": 2, "sampling": {"max_tokens": 4}}
    report = mrlm_pl.evaluate("builtin:tiny", _Faulty(method), **options)
    assert report.mean_reward == mrlm_pl.evaluate("builtin:tiny", _Faulty("no method"), **options).mean_reward
    told = [record.getMessage() for record in caplog.records if "OSError: no such place" in record.getMessage()]
    assert 1 <= len(told) <= 3  # copies are closed too
    assert all("clos" in text or method in text for text in told)


def test_an_evaluation_whose_episodes_all_fail_raises_the_first_error() -> None:
    with pytest.raises(RolloutError, match=r"every episode of 'math' failed; the first: OSError in step .*no such"):
        mrlm_pl.evaluate("builtin:tiny", _Faulty("reply"), num_episodes=2, sampling=mrlm_pl.Sampling(max_tokens=4))


def test_an_async_close_is_awaited() -> None:
    closed = []

    class Async(MathEnvironment):
        async def close(self) -> None:
            closed.append(self)

    environment = Async(difficulty=(1, 1))
    mrlm_pl.evaluate("builtin:tiny", environment, num_episodes=2, sampling=mrlm_pl.Sampling(max_tokens=4))
    assert environment in closed
