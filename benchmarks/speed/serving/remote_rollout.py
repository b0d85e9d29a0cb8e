"""Compare episodes, and episodes per second, with environments on a server and in process.

    python benchmarks/speed/serving/remote_rollout.py [--environment math coordination] [--groups 32] [--repeats 7]
        [--json FILE]

The built-in tiny model plays the same episodes with both, in turns, as in ``mrlm fit``; all tokens, rewards and
log-probabilities must be equal. The ratio is the median of the ratios of adjacent runs. The server is ``mrlm serve`` on
the same machine and shares its cores, so CPU seconds of both processes are printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from remote_load import Server, own_cpu_seconds

from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.runs.plugins import environments_by_name, import_environment
from mrlm_pl.serving import RemoteEnvironment


def specs(environment: Environment, groups: int, group_size: int) -> list[EpisodeSpec]:
    """Return the same episodes for both sides."""
    source = environment.tasks("train")
    return [
        EpisodeSpec(f"{group}-{member}", source[group], str(group), seed=group * group_size + member)
        for group in range(groups)
        for member in range(group_size)
    ]


def outcome(episode: Episode) -> Any:
    """Return the parts of episodes that must be equal on both sides."""
    return (episode.trajectories, episode.stop_reason, episode.success, episode.metrics, episode.error)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return medians of both sides for one environment."""
    import_environment(name)
    server = Server("--environments", name)
    local, remote = environments_by_name()[name](), RemoteEnvironment(server.target, name)
    policy, engine = Policy("builtin:tiny"), InProcessEngine()
    policy.load()
    engine.load("main", policy.model.eval(), 0)
    seat = Seat("main", policy.chat, Sampling(max_tokens=arguments.new_tokens), policy.context_window)
    seats = dict.fromkeys(local.agents, seat)
    sides: dict[str, Environment] = {"local": local, "remote": remote}
    players = {side: EpisodePlayer({name: made}, seats, engine) for side, made in sides.items()}
    played = {side: specs(made, arguments.groups, arguments.group_size) for side, made in sides.items()}
    figures: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
    outcomes: dict[str, list[Any]] = {}
    try:
        for repeat in range(arguments.repeats + 1):
            for side, player in players.items():
                started, cpu, theirs = time.perf_counter(), own_cpu_seconds(), server.cpu_seconds()
                episodes = player.play_blocking(played[side])
                seconds = time.perf_counter() - started
                cpu, theirs = own_cpu_seconds() - cpu, server.cpu_seconds() - theirs
                outcomes[side] = [outcome(episode) for episode in episodes]
                if repeat:
                    figures[side].append((len(episodes) / seconds, cpu, theirs))
            if outcomes["local"] != outcomes["remote"]:
                raise SystemExit(f"{name}: the episodes differ")
    finally:
        for player in players.values():
            player.close()
        engine.close()
        server.stop()
    row: dict[str, Any] = {"environment": name, "episodes": len(played["local"])}
    for side, rows in figures.items():
        row[f"{side}_episodes_per_second"] = round(statistics.median(figure[0] for figure in rows), 1)
        row[f"{side}_cpu_seconds"] = round(statistics.median(figure[1] for figure in rows), 3)
    row["server_cpu_seconds"] = round(statistics.median(figure[2] for figure in figures["remote"]), 3)
    pairs = zip(figures["remote"], figures["local"], strict=True)
    row["ratio"] = round(statistics.median(theirs[0] / ours[0] for theirs, ours in pairs), 3)
    return row


def main() -> None:
    """Run the command line's measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", nargs="+", default=["math", "coordination"])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7, help="measured runs of each side, after one warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(name, arguments) for name in arguments.environment]
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
