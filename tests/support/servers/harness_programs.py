"""Programs of a ``HarnessEnvironment``, and a player of it that says planned texts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import mrlm_environments
from mrlm_environments import HarnessEnvironment

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.tiny import build_tokenizer
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from tests.support.runs.recorded_episodes import Speaker

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(TOKENIZER)
Plan = Mapping[str, Sequence[str]]

PRELUDE = """\
import json, os, sys, urllib.request
row = json.load(sys.stdin)
def post(url, body, key=os.environ["OPENAI_API_KEY"]):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
def ask(agent, *texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    body = {"model": agent, "messages": messages}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]
"""
"""Beginning of a program: its row, and calls with the standard library alone."""


def script(code: str) -> list[str]:
    """Return the command of a program with this code after :data:`PRELUDE`."""
    return [sys.executable, "-I", "-S", "-c", (PRELUDE + code).replace("{", "{{").replace("}", "}}")]


async def native(row: Mapping[str, Any], endpoint: Any) -> None:
    """Play an environment of ours as a program would: each observation is a call with the whole conversation."""

    environment = getattr(mrlm_environments, row["environment"])()
    conversations: dict[str, list[dict[str, Any]]] = {}
    observations, done = environment.reset(Task(**row["task"])), False
    async with aiohttp.ClientSession() as http:
        while not done:
            actions = {}
            for agent, messages in observations.items():
                said = conversations.setdefault(agent, [])
                said += [{"role": message.role, "content": message.content} for message in messages]
                said.append(await asked(http, endpoint, agent, said))
                actions[agent] = message_of(said[-1])
            step = environment.step(actions)
            rewards = {agent: step.components.get(agent, value) for agent, value in step.rewards.items()}
            async with http.post(f"{endpoint.url}/reward", json=rewards) as response:
                assert response.status == 200, await response.text()
            observations, done = step.observations, step.done


async def asked(http: aiohttp.ClientSession, endpoint: Any, agent: str, messages: Sequence[Any], **more: Any) -> Any:
    """Return the reply to a call, or the error as the protocol has it."""
    headers = {"Authorization": f"Bearer {endpoint.agent_key(agent)}"}
    body = {"model": "any", "messages": list(messages), **more}
    async with http.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
        found = await response.json()
        return found["choices"][0]["message"] if response.status == 200 else found["error"]


def message_of(reply: Mapping[str, Any]) -> Any:
    """Return the message of a reply without calls."""
    return Message("assistant", reply["content"])


def posted(url: str, body: Any, key: str = "") -> tuple[int, Any]:
    """Return the status and the JSON of a request."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(found.strip()) and not found.strip().startswith("Z")


def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def player_of(environment: Any, plans: Sequence[Plan], cls: type[EpisodePlayer] = EpisodePlayer) -> EpisodePlayer:
    """Return a player that says the planned texts of each agent of each episode, which are named e0, e1, ..."""
    seats = {agent: Seat(agent, CHAT, Sampling(max_tokens=64), 2048) for agent in environment.agents}
    speaker = Speaker({f"e{number}": plan for number, plan in enumerate(plans)})
    return cls({environment.name: environment}, seats, speaker, retries=0)


def played(environment: Any, plans: Sequence[Plan]) -> list[Episode]:
    """Return an episode for each plan."""
    tasks = environment.tasks("train")
    specs = [EpisodeSpec(f"e{n}", tasks[n % (tasks.size or n + 1)], f"g{n}", seed=n) for n in range(len(plans))]
    player = player_of(environment, plans)
    try:
        return player.play_blocking(specs)
    finally:
        player.close()


def harness(function: Any = None, rows: int | Sequence[Mapping[str, Any]] = 1, **options: Any) -> HarnessEnvironment:
    """Return an environment whose program is a function, and whose rows have numbers."""
    given = [{"n": n} for n in range(rows)] if isinstance(rows, int) else [dict(row) for row in rows]
    return HarnessEnvironment({"train": given}, function=function, **options)
