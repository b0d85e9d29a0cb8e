"""GRPO on code and on tool calls, small and whole: what reaches the learner, and that it learns from it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments.code.environment import CodeEnvironment
from mrlm_environments.tools.environment import ToolEnvironment

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Engine, InProcessEngine, Sampling
from mrlm_pl.engines.base import Sample, SampleRequest
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.policy import Policy
from mrlm_pl.policy.tiny import build_tokenizer

TOKENIZER = build_tokenizer()


class ScriptedEngine(Engine):
    """Says what ``reply`` makes of the context's text; every second request of a first turn is careless."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        samples = []
        for request in requests:
            member = int(request.session.partition("/")[0].rpartition("-")[2])
            text = self.reply(TOKENIZER.decode(request.token_ids), careful=member % 2 == 0)
            ids = (*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id)
            samples.append(Sample(ids, (-1.0,) * len(ids), "stop", 0, "scripted"))
        return samples

    def load(self, policy: str, weights: Any, version: int) -> None:
        pass


def calling(context: str, careful: bool) -> str:
    """Call the calculator, then repeat its result; or answer 0 at once."""
    said = re.search(r"<\|tool\|>(.*?)<\|end\|>", context)
    if said:
        return f"<answer>{said.group(1)}</answer>"
    question = re.search(r"<\|user\|>(.*?)=\?<\|end\|>", context)
    assert question is not None
    call = {"name": "calculator", "arguments": {"expression": question.group(1)}}
    return f"<tool_call>{json.dumps(call)}</tool_call>" if careful else "<answer>0</answer>"


def coding(context: str, careful: bool) -> str:
    """Add the number; or leave out the function."""
    found = re.search(r"returns x plus (\d+)\.", context)
    number = found.group(1) if found else "0"
    return f"def f(x): return x+{number}" if careful else f"x+{number}"


def fit(environment: Any, engine: Engine | None, trainer: Any, **options: Any) -> tuple[GRPO, list[Episode]]:
    algorithm = GRPO({"main": Policy("builtin:tiny", learning_rate=1e-3)}, kl={"coefficient": 0.01})
    settings: dict[str, Any] = {"groups": 2, "group_size": 4, "iterations": 2, "sampling": Sampling(max_tokens=96)}
    data = RolloutDataModule(environment, engine=engine, **{**settings, **options})
    trainer.fit(algorithm, data)
    return algorithm, list(read_episodes(Path(trainer.default_root_dir) / "episodes"))


def acted(row: Any) -> str:
    """The tokens that the learner trains on, as text."""
    return TOKENIZER.decode([token for token, acts in zip(row.token_ids, row.action_mask, strict=True) if acts])


def moved(algorithm: GRPO) -> bool:
    before = Policy("builtin:tiny")
    before.load()
    pairs = zip(before.model.parameters(), algorithm.policies["main"].model.parameters(), strict=True)
    return any(not torch.equal(old.detach(), new.detach()) for old, new in pairs)


def test_tool_turns_reach_the_learner_as_the_agent_saw_and_said_them(quiet_trainer: Any) -> None:
    environment = ToolEnvironment(tools=["calculator"], max_turns=3)
    algorithm, episodes = fit(environment, ScriptedEngine(calling), quiet_trainer())
    assert len(episodes) == 16
    for episode in episodes:
        (row,) = episode.rows()
        text = TOKENIZER.decode(row.token_ids)
        assert text.startswith('<|system|>{"name": "calculator"')
        if int(episode.id.rpartition("-")[2]) % 2:
            assert acted(row) == "<answer>0</answer><|end|>"
            assert episode.reward == 0.0
            continue
        value = str(eval(episode.task.data["question"].removesuffix("=?")))  # of the environment's own making
        assert [message.role for message in row.messages] == ["user", "assistant", "tool", "assistant"]
        assert row.messages[2].content == value
        assert f"</tool_call><|end|><|tool|>{value}<|end|><|assistant|><answer>" in text
        assert acted(row).endswith(f"</tool_call><|end|><answer>{value}</answer><|end|>")
        assert [turn.reward for turn in row.turns] == pytest.approx([0.1, 0.5 + 0.3 + 0.2 * (1 - 1 / 3) - 0.1])
        assert episode.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    assert moved(algorithm)


def test_programs_are_graded_and_the_learner_moves(quiet_trainer: Any) -> None:
    environment = CodeEnvironment(kinds=["number"], difficulty=(1, 1))
    algorithm, episodes = fit(environment, ScriptedEngine(coding), quiet_trainer())
    solved = 0
    for episode in episodes:
        (row,) = episode.rows()
        careful = int(episode.id.rpartition("-")[2]) % 2 == 0
        if not careful:
            assert (episode.reward, episode.stop_reason) == (-0.5, "invalid_program")
        elif " x plus " in episode.task.data["prompt"]:
            solved += 1
            assert (episode.reward, episode.success) == (2.0, True)
        else:
            assert 0 <= episode.reward <= 2
        assert acted(row) == row.messages[-1].content + "<|end|>"
    assert moved(algorithm)
    assert solved, "the tasks of this seed have an addition among them"


def test_log_probabilities_of_later_turns_are_those_of_the_whole_row(quiet_trainer: Any) -> None:
    environment = ToolEnvironment(tools=["calculator"], max_turns=3)
    engine = Prefilled()
    trainer = quiet_trainer()
    fit(environment, engine, trainer, iterations=1, sampling=Sampling(max_tokens=12))
    engine.close()
    policy = Policy("builtin:tiny")
    policy.load()
    rows = [row for episode in read_episodes(Path(trainer.default_root_dir) / "episodes") for row in episode.rows()]
    assert all(len(row.turns) == 3 for row in rows)
    assert {message.role for row in rows for message in row.messages} == {"user", "assistant", "tool"}
    for row in rows:
        with torch.no_grad():
            logits = policy.model.eval()(torch.tensor([row.token_ids])).logits[0]
        exact = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(row.token_ids[1:])[:, None])[:, 0]
        for turn in row.turns[1:]:
            sampled = torch.tensor(row.logprobs[turn.start : turn.stop])
            torch.testing.assert_close(sampled, exact[turn.start - 1 : turn.stop - 1], atol=1e-4, rtol=0)


class Prefilled(InProcessEngine):
    """The real engine, but every first turn is a call that the tiny model would not have made."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        samples = await super().sample(requests)
        if any("<|tool|>" in TOKENIZER.decode(request.token_ids) for request in requests):
            return samples
        forced = []
        for request, sample in zip(requests, samples, strict=True):
            text = calling(TOKENIZER.decode(request.token_ids), careful=True)
            ids = (*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id)
            forced.append(Sample(ids, (-1.0,) * len(ids), "stop", sample.version, sample.engine))
        return forced
