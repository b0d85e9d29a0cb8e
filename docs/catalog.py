"""Write the catalog of environments, ``docs/environments/catalog.md``, from the classes: ``python -m docs.catalog``.

Agents, turns, tools and splits are those of an environment with default settings; rewards are measured on its first
training tasks.
"""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import mrlm_environments

from mrlm_pl.environment import Environment
from mrlm_pl.environment.tasks import SPLITS
from mrlm_pl.environment.trial import Replies, play_copy
from mrlm_pl.episode import Task
from mrlm_pl.episode_files import write_episodes
from mrlm_pl.viewer.export import export_page
from mrlm_pl.viewer.runs import find_runs
from tests.support.runs.recorded_episodes import recorded

PAGE = Path(__file__).parent / "environments" / "catalog.md"
PAGES = {
    "math": "README.md#math",
    "class_completion": "collaborative_coding.md",
    "length_ratio": "writing.md",
    **dict.fromkeys(
        ("coordination", "halves", "helpers", "kuhn_poker", "plan_path", "tic_tac_toe", "word_emission"), "games.md"
    ),
}
"""Pages of environments whose page is not named like them."""

TASKS = 4
TURNS = ("max_turns", "turns", "rounds", "max_attempts")
"""Arguments that bound the replies of an agent."""

HEAD = f"""\
# Catalog

Every environment that needs no settings, with its defaults. Rewards are an agent's return, in {TASKS} training
tasks: for empty replies, and for the best replies that the environment knows. The last column opens two episodes in the
viewer: one with arbitrary replies, one with the best ones. No problem is in two splits. The environments are part of
mrlm (Apache-2.0; the house's floor plans are ALFWorld's, MIT); published data has its authors' license.

    python -m docs.catalog

"""
COLUMNS = (
    "environment",
    "class",
    "agents",
    "turns",
    "tools",
    "tasks",
    "empty replies earn",
    "best replies earn",
    "episodes",
)


def environments() -> Iterator[Environment]:
    """Yield every environment that needs no argument, by name."""
    found = (getattr(mrlm_environments, name) for name in mrlm_environments.__all__)
    classes = [cls for cls in found if inspect.isclass(cls) and issubclass(cls, Environment)]
    for cls in sorted(classes, key=lambda cls: cls.name):
        needed = [item for item in inspect.signature(cls).parameters.values() if item.default is item.empty]
        if not needed:
            yield cls()


def row(environment: Environment) -> str:
    """Return an environment's row of the table."""
    name = environment.name
    page = PAGES.get(name, f"{name}.md")
    agents = ", ".join(f"`{agent}`" for agent in environment.agents)
    tools = {tool.name: None for agent in environment.agents for tool in environment.tools(agent)}
    sizes = [f"{environment.tasks(split).size or 'generated'} {split}" for split in SPLITS]
    source = environment.tasks("train")
    tasks = [source[index] for index in range(TASKS)]
    empty = [play(environment, task, "") for task in tasks]
    known = [(task, replies) for task in tasks if (replies := environment.gold(task)) is not None]
    best = [play(environment, task, replies) for task, replies in known]
    cells = [
        f"[{name}]({page})",
        f"`{type(environment).__name__}`",
        agents,
        turns(environment, [*empty, *best]),
        ", ".join(f"`{tool}`" for tool in tools) or "-",
        ", ".join(sizes) if source.size else "generated",
        rewards(empty),
        rewards(best) if best else "-",
        f'<a href="episodes/{name}.html">open</a>',
    ]
    return f"| {' | '.join(cells)} |\n"


Earned = tuple[Mapping[str, float], Mapping[str, int]]
"""Rewards and replies by agent of one episode."""


def play(environment: Environment, task: Task, replies: Replies) -> Earned:
    """Play an episode with the replies of each agent in order, then its last one again."""
    played = play_copy(environment, task, replies, max_turns=64)
    earned = {agent: sum(step.rewards.get(agent, 0.0) for step in played.steps) for agent in environment.agents}
    return earned, Counter(agent for due in played.observed for agent in due)


def turns(environment: Environment, played: Sequence[Earned]) -> str:
    """Return the most replies of an agent: a setting, or the number in the played episodes."""
    for name, parameter in inspect.signature(type(environment)).parameters.items():
        if name in TURNS:
            return f"{parameter.default} (`{name}`)"
    return str(max(number for _, spoken in played for number in spoken.values()))


def rewards(played: Sequence[Earned]) -> str:
    """Return the lowest and the highest reward of an agent."""
    found = [round(reward, 2) + 0.0 for earned, _ in played for reward in earned.values()]
    low, high = min(found), max(found)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def page() -> str:
    """Return the whole page."""
    rows = [f"| {' | '.join(COLUMNS)} |\n", f"|{'---|' * len(COLUMNS)}\n"]
    return HEAD + "".join([*rows, *map(row, environments())])


def episodes(environment: Environment) -> str:
    """Return the viewer's page with an episode of words and one of the best replies that the environment knows."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / environment.name
        played = recorded(environment, 2, max_turns=20, context_window=1 << 16)
        write_episodes(run / "episodes" / "iteration-000000.jsonl.zst", played)
        (shown,) = find_runs([str(run)]).values()
        return export_page({environment.name: shown})


def write_pages_of_episodes(folder: Path) -> None:
    """Write the pages that the catalog links into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for environment in environments():
        (folder / f"{environment.name}.html").write_text(episodes(environment), encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
