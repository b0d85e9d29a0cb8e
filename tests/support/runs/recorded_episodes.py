"""Episodes of any environment, played by a script."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrlm_pl.engines.base import Engine, Sample, SampleRequest, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode, Task
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.tiny import build_tokenizer
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer

WORDS = ("I do not know.", "", "7", "C", "B", "pro wins", "<tool_call>{not json</tool_call>", "check", "bet", "5")


class Speaker(Engine):
    """Says the texts that are planned for each agent of each episode."""

    def __init__(self, plans: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        self.tokenizer = build_tokenizer()
        self.left = {
            f"{id}/{agent}": itertools.cycle(texts) for id, plan in plans.items() for agent, texts in plan.items()
        }

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return [self._sample(next(self.left[request.session])) for request in requests]

    def _sample(self, text: str) -> Sample:
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        return Sample(ids, (-0.25,) * len(ids), "stop", 3, "speaker")

    def load(self, policy: str, weights: Any, version: int) -> None:
        raise AssertionError("the player loads no weights")


Gold = Callable[[Task], Mapping[str, Sequence[str]] | None]


def recorded(
    environment: Environment, count: int, max_turns: int = 6, gold: Gold | None = None, context_window: int = 2048
) -> list[Episode]:
    """Episodes in which half of the replies are the best known ones, unknown to a server, and half are words."""
    gold = gold or environment.gold
    draw, tasks = random.Random(0), environment.tasks("train")
    specs, plans = [], {}
    for number in range(count):
        task = tasks[number if tasks.size is None else number % tasks.size]
        specs.append(EpisodeSpec(f"e{number}", task, f"g{number // 2}", seed=number, iteration=number // 10))
        best = gold(task) if number % 2 else None
        plans[f"e{number}"] = best or {agent: draw.choices(WORDS, k=8) for agent in environment.agents}
    chat = ChatFormat(build_tokenizer())
    seats = {agent: Seat("main", chat, Sampling(), context_window) for agent in environment.agents}
    player = EpisodePlayer({environment.name: environment}, seats, Speaker(plans), max_turns=max_turns)
    try:
        return player.play_blocking(specs)
    finally:
        player.close()
