"""``mrlm gateway``: programs that were started elsewhere open episodes, which are written to a file."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import HarnessEnvironment, MathEnvironment

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.collection import serve_gateway
from tests.support.harness_programs import posted

ROWS = [{"n": n} for n in range(4)]


def chat(opened: Any, agent: str, text: str) -> str:
    body = {"model": agent, "messages": [{"role": "user", "content": text}]}
    status, reply = posted(f"{opened['base_url']}/chat/completions", body, opened["api_key"])
    assert status == 200, reply
    return str(reply["choices"][0]["message"]["content"])


def program(address: str) -> int:
    """Open an episode, play it, and return the number of its row."""
    _, opened = posted(f"{address}/episodes", {})
    number = int(opened["row"]["n"])
    draft = chat(opened, "solver", f"{number}+1?")
    final = chat(opened, "checker", f"{number}+1? {draft}")
    if number == 3:
        assert posted(f"{opened['url']}/end", {"error": "it gave up"})[0] == 200
    else:
        assert posted(f"{opened['url']}/reward", {"solver": number})[0] == 200
        assert posted(f"{opened['url']}/end", {"output": final})[0] == 200
    return number


def test_programs_open_episodes_side_by_side(tmp_path: Path) -> None:
    environment = HarnessEnvironment({"train": ROWS}, agents=["solver", "checker"])
    numbers: list[int] = []

    def start(address: str) -> None:
        def play() -> None:
            with ThreadPoolExecutor(4) as pool:
                numbers.extend(pool.map(program, [address] * 4))

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        threads.append(thread)

    threads: list[threading.Thread] = []
    file = serve_gateway(
        "builtin:tiny",
        environment,
        output=tmp_path / "episodes.jsonl",
        listening=start,
        num_episodes=4,
        sampling=Sampling(max_tokens=4),
        device="cpu",
    )
    threads[0].join(60)
    assert sorted(numbers) == [0, 1, 2, 3]
    assert (file.played, file.kept, file.failed) == (4, 3, 1)
    episodes = list(read_episodes(tmp_path / "episodes.jsonl"))
    assert sorted(episode.task.data["n"] for episode in episodes) == [0, 1, 2]
    for episode in episodes:
        assert episode.rewards() == {"solver": float(episode.task.data["n"]), "checker": 0.0}
        (solver,) = episode.trajectories["solver"]
        assert solver.messages[0].content == f"{episode.task.data['n']}+1?"
        assert all(value < 0 for value, sampled in zip(solver.logprobs, solver.action_mask, strict=True) if sampled)


@pytest.mark.parametrize(
    "environment", [MathEnvironment(), HarnessEnvironment([{"n": 1}], ["true"])], ids=["math", "own"]
)
def test_other_environments_are_refused(environment: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither command nor function"):
        serve_gateway("builtin:tiny", environment, output=tmp_path / "a.jsonl", listening=print)
