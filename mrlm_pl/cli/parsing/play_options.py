"""The parsers of the commands that play episodes; a help needs them alone, and no torch."""

from __future__ import annotations

import argparse

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from mrlm_pl.cli.parsing.environment_option import environment_parser
from mrlm_pl.cli.parsing.parser import CommandParser
from mrlm_pl.engines.base import PolicySampling, Precision, Sampling
from mrlm_pl.environment import SPLITS
from mrlm_pl.environment.check import Level
from mrlm_pl.runs.records.run import MAX_TURNS

TASK_OPTIONS = ("num_episodes", "split", "seed", "samples_per_task")
"""Options that choose the tasks."""

PLAY_OPTIONS = (*TASK_OPTIONS, "max_turns", "seats", "device", "precision")
"""Options that are arguments of both ``evaluate`` and ``collect``."""


def eval_parser() -> CommandParser:
    """Return the parser of ``mrlm eval``."""
    text = "Score a run or a model on an environment, by default the run's own; several give a table."
    parser = _playing_parser("eval", text, episodes=200, split="test", source="the run's validation")
    parser.usage = "mrlm eval --model MODEL [MODEL ...] [--environment NAME [NAME ...]] [options]"
    add = parser.add_argument
    add("--output", type=str | None, help="JSON file for the report, or for a table, with its reports next to it.")
    add("--served_by", type=dict[str, str], default={}, help="Servers that play policies: '{main: HOST:PORT}'.")
    add("--compare", type=str | None, help="Earlier report on the same tasks, or a run's evaluation_before.json.")
    return parser


def arena_parser() -> CommandParser:
    """Return the parser of ``mrlm arena``."""
    text = "Play runs or models against each other in every seating of an environment, by default the first run's."
    parser = _playing_parser("arena", text, episodes=100, split="test", source="the first run's validation")
    parser.usage = "mrlm arena NAME=MODEL NAME=MODEL ... [--environment NAME] [options]"
    parser.add_argument("--output", type=str | None, help="JSON file for the report.")
    parser.add_argument("--max_seatings", type=PositiveInt, default=64, help="Maximum number of seatings.")
    return parser


def collect_parser() -> CommandParser:
    """Return the parser of ``mrlm collect``."""
    text = "Play episodes with a run or a model and write them to a file; default environment: the run's."
    parser = _writing_parser("collect", text)
    parser.add_argument("--filter_reward", type=float | None, help="Keep only episodes with this reward or more.")
    text = "Several temperatures, instead of --temperature; each task is played at each of them."
    parser.add_argument("--temperatures", type=NonNegativeFloat, nargs="+", default=[], help=text)
    return parser


def gateway_parser() -> CommandParser:
    """Return the parser of ``mrlm gateway``."""
    parser = _writing_parser("gateway", "Serve a model to programs that post to /episodes, and write their episodes.")
    parser.add_argument("--at_once", type=PositiveInt, default=64, help="Maximum number of concurrent episodes.")
    return parser


def _writing_parser(command: str, text: str) -> CommandParser:
    parser = _playing_parser(command, text, episodes=100, split="train", source="the run's training")
    parser.usage = f"mrlm {command} --model MODEL --output FILE [--environment NAME] [options]"
    parser.add_argument("--output", type=str, required=True, help="JSON-lines file, .jsonl, .jsonl.zst or .jsonl.gz.")
    return parser


def _playing_parser(command: str, text: str, *, episodes: int, split: str, source: str) -> CommandParser:
    """Return a parser with the shared options of ``eval`` and ``collect``: model, tasks, and ``source``'s sampling."""
    parser = environment_parser(command, text)
    hidden = argparse.SUPPRESS if command == "arena" else None  # its words name the models, it seats them in every way
    add = parser.add_argument
    add("--model", type=str, required=True, help=hidden or "Run folder, model folder, hub id or builtin:tiny.")
    add("--seats", type=dict[str, str], default={}, help=hidden or "Policy of each agent; default: the run's seats.")
    add("--device", type=str, default="auto", help="cpu, cuda:0, ...; auto prefers an accelerator.")
    text = "Precision of generation; default: that of the run's training if the machine has bf16, else 32-true."
    add("--precision", type=Precision | None, help=text)
    total = "Episodes per seating." if hidden else "Total number of episodes."
    add("-n", "--num_episodes", type=PositiveInt, default=episodes, help=total)
    add("--split", choices=SPLITS, default=split, help="Split of the tasks.")
    add("--seed", type=NonNegativeInt, default=0, help="Seed for choosing tasks and for sampling.")
    each = "Episodes per task, at each temperature." if command == "collect" else "Episodes per task."
    add("--samples_per_task", type=PositiveInt, default=1, help=each)
    for name, kind, meaning in (
        ("--temperature", float | None, "0 is greedy"),
        ("--top_p", float | None, "Probability mass to sample from"),
        ("--top_k", int | None, "Number of tokens to sample from; 0 is all"),
        ("--max_tokens", PositiveInt | None, "Maximum number of tokens in a turn"),
        ("--max_context", PositiveInt | None, "Maximum number of tokens in an agent's context"),
    ):
        default = getattr(Sampling(), name[2:])
        meaning = f"{meaning}; default: that of {source}, else {'the window' if default is None else default}."
        add(name, type=kind, help=meaning)
    text = "Sampling settings of individual policies, which override the others: '{NAME: {temperature: 0.7}}'."
    add("--policy_sampling", type=dict[str, PolicySampling], default={}, help=text)
    text = f"Decisions after which an episode is truncated; default: the run's, else {MAX_TURNS}."
    add("--max_turns", type=PositiveInt | None, help=text)
    return parser


def replay_parser() -> CommandParser:
    """Return the parser of ``mrlm replay``."""
    return _record_parser("replay", "Replay the episodes of a run, and compare them with their record.")


def rescore_parser() -> CommandParser:
    """Return the parser of ``mrlm rescore``."""
    text = "Replay the episodes of a run in an environment with other rewards, without generation."
    return _record_parser("rescore", text)


def whatif_parser() -> CommandParser:
    """Return the parser of ``mrlm whatif``."""
    text = "Replace a decision of a recorded episode, play the rest, and compare the returns."
    parser = _record_parser("whatif", text)
    add = parser.add_argument
    add("--agent", type=str, required=True, help="Agent that decided.")
    add("--turn", type=NonNegativeInt, required=True, help="Number of environment steps before the decision.")
    add("--message", type=str | None, help="Text that replaces the decision; default: new samples.")
    add("--samples", type=PositiveInt, default=16, help="Number of continuations of each decision.")
    add("--rest", choices=("play", "replay"), default="play", help="Sample later decisions, or replay them.")
    add("--own_reward", action="store_true", help="Count the agent's own reward, not the team's mean.")
    add("--policies", type=str | None, help="Run or model that decides; default: the run.")
    add("--served_by", type=dict[str, str], default={}, help="Servers that play policies, as in '{POLICY: HOST:PORT}'.")
    add("--device", type=str, default="auto", help="cpu, cuda:0, ...; auto prefers an accelerator.")
    return parser


def _record_parser(command: str, text: str) -> CommandParser:
    """Return a parser of a command that reads the episodes of a run."""
    parser = environment_parser(command, text)
    parser.usage = f"mrlm {command} RUN [--environment NAME] [--environment.ARGUMENT VALUE ...] [options]"
    add = parser.add_argument
    add("--model", type=str, required=True, help="Run folder; may be given as the first argument.")
    add("--episodes", type=str | None, help="File or folder of episodes; default RUN/episodes.")
    if command != "whatif":
        add("--iteration", type=NonNegativeInt | None, help="Only the episodes of this iteration, counted from 0.")
    add("--episode", type=str | None, help="Id of an episode.")
    add("--output", type=str | None, help="JSON file for the report.")
    return parser


def check_env_parser() -> CommandParser:
    """Return the parser of ``mrlm check-env``."""
    parser = environment_parser("check-env", "Check that an environment keeps the contract.")
    parser.usage = "mrlm check-env ENVIRONMENT [--environment.ARGUMENT VALUE ...] [options]"
    add = parser.add_argument
    add("--model", type=str | None, help="Run, or a run's configuration file, whose environment is checked.")
    add("--level", type=Level, default="contract", help="contract, or semantic: also its rewards and observations.")
    add("--data", type=str | None, help="Rows (a file or a hub name) whose reference solutions are played.")
    add("--output", type=str | None, help="JSON report; with --data a JSONL file of the usable rows.")
    return parser
