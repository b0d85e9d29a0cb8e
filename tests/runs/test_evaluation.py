"""`evaluate` and `collect` from Python: kinds of models and environments."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from mrlm_environments import CoordinationGame, MathEnvironment

import mrlm_pl
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError

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
    assert by_name.to_dict() == mrlm_pl.evaluate(policy, MathEnvironment(), **SHORT).to_dict()


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


def test_turns_are_generated_in_the_precision_of_the_run_where_the_machine_has_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "policies").mkdir(parents=True)
    (run / "policies/main").symlink_to(model_folder)
    (run / "config.yaml").write_text(yaml.safe_dump({"trainer": {"precision": "auto"}}))
    (run / "precision.json").write_text('{"precision": "bf16-mixed"}')
    files = (tmp_path / f"{number}.jsonl" for number in itertools.count())

    def logprobs(model: Path, **options: Any) -> list[tuple[float, ...]]:
        file = mrlm_pl.collect(model, "math", output=next(files), **SHORT, **options)
        return [row.logprobs for episode in read_episodes(file.path) for row in episode.rows()]

    full, half = logprobs(model_folder), logprobs(model_folder, precision="bf16-mixed")
    assert full != half
    for has, expected in ((True, half), (False, full)):
        monkeypatch.setattr("mrlm_pl.runs.evaluation.computes_bf16", lambda device, has=has: has)
        assert logprobs(run) == expected
        assert logprobs(run, precision="32-true") == full
        assert logprobs(run, precision="bf16-mixed") == half


def test_mistakes_name_the_value_and_the_remedy(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no environment 'mth'; did you mean 'math'"):
        mrlm_pl.evaluate(model_folder, "mth")
    with pytest.raises(ConfigurationError, match="records none, as a model or a script's run; give it as"):
        mrlm_pl.evaluate(model_folder)
    with pytest.raises(ConfigurationError, match="there is no run folder 'nothing' that has one; give it as"):
        mrlm_pl.replay("nothing")
    two = {"first": mrlm_pl.Policy(str(model_folder)), "second": mrlm_pl.Policy(str(model_folder))}
    with pytest.raises(ConfigurationError, match="agent 'row' has no seat among the policies"):
        mrlm_pl.evaluate(two, CoordinationGame())
    with pytest.raises(ConfigurationError, match=r"seats name the policies \['third'\]"):
        mrlm_pl.evaluate(two, CoordinationGame(), seats={"row": "third"})
    with pytest.raises(ConfigurationError, match="must be a multiple of samples_per_task"):
        mrlm_pl.evaluate(model_folder, "math", num_episodes=3, samples_per_task=2)


def test_episodes_are_collected_and_half_a_file_continues(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.runs.collection.CHUNK", 2)
    policy = mrlm_pl.Policy(str(model_folder))
    file = mrlm_pl.collect(policy, "math", output="whole.jsonl", **SHORT)
    assert (file.played, file.kept, file.failed) == (6, 6, 0)
    add = type(file).add
    calls = iter((True, False))

    def stop(self: Any, *arguments: Any) -> None:
        if not next(calls):
            raise KeyboardInterrupt
        add(self, *arguments)

    monkeypatch.setattr(type(file), "add", stop)
    with pytest.raises(KeyboardInterrupt):
        mrlm_pl.collect(policy, "math", output="half.jsonl", **SHORT)
    monkeypatch.setattr(type(file), "add", add)
    with pytest.raises(ConfigurationError, match="is half of a collection with other options"):
        mrlm_pl.collect(policy, "math", output="half.jsonl", **{**SHORT, "num_episodes": 8})
    assert mrlm_pl.collect(policy, "math", output="half.jsonl", **SHORT).kept == 6
    texts = [
        [row.messages for episode in mrlm_pl.read_episodes(name) for row in episode.rows()]
        for name in ("whole.jsonl", "half.jsonl")
    ]
    assert texts[0] == texts[1]
