"""Small run folders as a run would leave them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.compressed_files import packed, unpacked
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.episode_files import write_episodes

CONFIGURATION = {
    "seed_everything": 0,
    "model": {"class_path": "mrlm_pl.GRPO", "init_args": {"policies": {"main": {"model": "builtin:tiny"}}}},
    "data": {"class_path": "RolloutDataModule", "init_args": {"environment": {"class_path": "MathEnvironment"}}},
}


def episode(
    name: str,
    text: str = "4",
    *,
    iteration: int = 0,
    task: int = 0,
    rewards: Sequence[float] = (0.0, 1.0),
    **other: Any,
) -> Episode:
    """Return an episode of two agents that act one after the other, with three prompt tokens and two sampled ones each.

    Args:
        name: id of the episode; its group is the part before the dash.
        text: reply of both agents.
        iteration: iteration of the rollout.
        task: index of the task.
        rewards: rewards of the two agents.
        other: other fields of the episode.
    """
    rows = {
        agent: (
            Trajectory(
                agent,
                "main",
                (4, 27, 2, 23, 2),
                (False, False, False, True, True),
                (0.0, 0.0, 0.0, -0.5, -0.25),
                (Turn(agent, index, 3, 5, reward, {"score": reward}, "stop", "main", iteration, "in_process"),),
                (Message("user", f"question {task}"), Message("assistant", text)),
            ),
        )
        for index, (agent, reward) in enumerate(zip(("first", "second"), rewards, strict=True))
    }
    fields = {"stop_reason": "answered", "success": sum(rewards) > 0, **other}
    return Episode(name, Task("math", "train", task, 7), name.partition("-")[0], 2**60, iteration, rows, **fields)


def write_run(
    folder: Path,
    iterations: Sequence[Sequence[Episode]],
    configuration: Mapping[str, Any] = CONFIGURATION,
    rewards: Sequence[float] = (),
) -> Path:
    """Write a run folder and return it.

    Args:
        folder: folder to make.
        iterations: episodes of each iteration.
        configuration: content of ``config.yaml``.
        rewards: ``rollout/reward`` of each row of ``metrics.csv``; empty writes none.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("# lightning.pytorch==2.6.6\n" + yaml.safe_dump(dict(configuration)))
    for number, episodes in enumerate(iterations):
        write_episodes(folder / "episodes" / f"iteration-{number:06d}.jsonl.zst", episodes)
    if rewards:
        with (folder / "metrics.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "progress/iteration", "progress/episodes", "rollout/reward"])
            writer.writerows([step, step + 1.0, 4.0 * (step + 1), reward] for step, reward in enumerate(rewards))
    return folder


def with_credit(path: Path, **values: float) -> None:
    """Give each turn in a file of episodes further numbers, as newer records have them."""
    records = [json.loads(line) for line in b"".join(unpacked(path)).splitlines()]
    for record in records:
        for rows in record["trajectories"].values():
            for turn in (turn for row in rows for turn in row["turns"]):
                turn.update(values)
    path.write_bytes(packed(path, "".join(json.dumps(record) + "\n" for record in records).encode()))


HOSTILE = (
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "<svg onload=\"document.title='pwned'\">",
    "<iframe src=\"javascript:parent.document.title='pwned'\"></iframe>",
    "<a href=\"javascript:document.title='pwned'\">click</a>",
    "\"><script>document.title='pwned'</script>",
    "'); document.title='pwned'; ('",
    "</pre></div></main><script>document.title='pwned'</script>",
    "</script><script>document.title='pwned'</script>",
    "<style>* { display: none }</style>",
    '<meta http-equiv=refresh content="0;url=https://evil.example">',
    "<base href=https://evil.example>",
    "<form action=https://evil.example><input autofocus onfocus=\"document.title='pwned'\">",
    "{{constructor.constructor(\"document.title='pwned'\")()}}",
    "\x1b[2J\x1b]0;pwned\x07\x1b[31mred",
    "\u202egnp.exe\u202c \u2066hidden\u2069 \u200bzero",
    "word" * 20_000,
    "<!-- --!> <script>document.title='pwned'</script> -->",
    "&lt;script&gt; &#x3c;script&#x3e;document.title='pwned'&#x3c;/script&#x3e;",
    "[bold red]markup[/bold red] [link=https://evil.example]x[/link] \ud800",
)
"""Messages that a model could write; each must stay text."""
