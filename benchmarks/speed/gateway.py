"""Compare tokens per second of two agents through the gateway with the same two agents written as an environment.

    python benchmarks/speed/gateway.py [--episodes 200] [--repeats 5] [--json FILE]

Both sides run in turns in one process, with equal tokens, which is checked: a random Llama with the built-in tokenizer,
and two agents that speak in turn, each with its whole conversation. A program is a coroutine that calls the endpoint
over HTTP, so the figures leave out the start of processes; its own work counts, on the same cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import torch
from mrlm_environments import HarnessEnvironment
from transformers import LlamaForCausalLM

from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.environment import SPLITS, DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.tiny import build_config, build_tokenizer
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer

sys.path.insert(0, str(Path(__file__).parents[1]))
from provenance import provenance

AGENTS = ("one", "two")


class Talk(Environment):
    """Two agents that answer each other for some turns each."""

    name = "harness"
    agents = AGENTS

    def __init__(self, rows: int, turns: int) -> None:
        self.rows, self.turns = rows, turns

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"topic": f"Topic {row}."} for row in range(self.rows)])

    def reset(self, task: Task) -> Observations:
        self.said = 0
        return {"one": [Message("user", task.data["topic"])]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        ((_, message),) = actions.items()
        self.said += 1
        if self.said == 2 * self.turns:
            return Step(rewards={"one": 1.0}, done=True, stop_reason="ended")
        return Step({AGENTS[self.said % 2]: [Message("user", message.content)]})


def program(turns: int) -> Any:
    """Return the same talk as a program."""

    async def talk(row: Mapping[str, Any], endpoint: Any) -> dict[str, float]:
        conversations: dict[str, list[dict[str, str]]] = {agent: [] for agent in AGENTS}
        heard = row["topic"]
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for number in range(2 * turns):
                agent = AGENTS[number % 2]
                conversations[agent].append({"role": "user", "content": heard})
                body = {"model": agent, "messages": conversations[agent]}
                async with http.post(f"{endpoint.base_url}/chat/completions", json=body) as response:
                    reply = (await response.json())["choices"][0]["message"]
                conversations[agent].append(reply)
                heard = reply["content"]
        return {"one": 1.0}

    return talk


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return medians of both sides and of their ratio in adjacent runs."""
    torch.manual_seed(0)
    tokenizer, size = build_tokenizer(), arguments.hidden
    shape = {"hidden_size": size, "intermediate_size": 3 * size, "num_hidden_layers": arguments.layers}
    engine, chat = InProcessEngine(), ChatFormat(tokenizer)
    engine.load("main", LlamaForCausalLM(build_config(**shape)).eval(), 0)
    seats = {agent: Seat("main", chat, Sampling(max_tokens=arguments.max_tokens), 2048) for agent in AGENTS}
    native = Talk(arguments.episodes, arguments.turns)
    rows = [{"topic": f"Topic {row}."} for row in range(arguments.episodes)]
    data = {split: rows for split in SPLITS}  # noqa: C420 (shared on purpose)
    served = HarnessEnvironment(data, function=program(arguments.turns), agents=AGENTS, lease_seconds=600)
    sides = {
        name: EpisodePlayer({"harness": environment}, seats, engine, step_timeout=1200)
        for name, environment in (("native", native), ("gateway", served))
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(arguments.repeats + 1):
        spoken = {}
        for name, player in sides.items():
            tasks = player.environments["harness"].tasks("train")
            specs = [EpisodeSpec(f"{repeat}-{n}", tasks[n], str(n), seed=n) for n in range(arguments.episodes)]
            started, cpu_started = time.perf_counter(), time.process_time()
            episodes = player.play_blocking(specs)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            spoken[name] = [sampled(episode) for episode in episodes]
            if repeat:
                speeds[name].append(sum(map(len, spoken[name])) / seconds)
                cpu[name].append(cpu_seconds)
        if spoken["native"] != spoken["gateway"]:
            raise RuntimeError("both sides should sample equal tokens")
    for player in sides.values():
        player.close()
    engine.close()
    ratios = [ours / theirs for ours, theirs in zip(speeds["gateway"], speeds["native"], strict=True)]
    return {
        "tokens": sum(map(len, spoken["native"])),
        **{f"{name}_tokens_per_second": round(statistics.median(found), 1) for name, found in speeds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "cpu_ratio": round(statistics.median(a / b for a, b in zip(cpu["native"], cpu["gateway"], strict=True)), 3),
    }


def sampled(episode: Episode) -> list[int]:
    """Return the sampled tokens of an episode."""
    if episode.error is not None:
        raise RuntimeError(episode.error)
    rows = [zip(row.token_ids, row.action_mask, strict=True) for row in episode.rows()]
    return [token for row in rows for token, own in row if own]


def main() -> None:
    """Run the command line's measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200, help="at once")
    parser.add_argument("--turns", type=int, default=3, help="of each agent")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side, after one warm-up")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    found = measure(arguments)
    print(json.dumps(found, indent=2))
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        Path(arguments.json).write_text(json.dumps({**provenance(), "settings": settings, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
