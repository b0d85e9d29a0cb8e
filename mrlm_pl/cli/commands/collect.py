"""``mrlm collect``: play episodes with a model and keep them in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from mrlm_pl.cli.commands.evaluate import add_model_options, add_sampling_options, sampling_of
from mrlm_pl.cli.parsing.environment_option import environment_parser, read_with_run, shown_settings
from mrlm_pl.cli.parsing.parser import CommandParser
from mrlm_pl.environment import SPLITS
from mrlm_pl.errors import ConfigurationError


def run(arguments: Sequence[str]) -> int:
    """Exit status 0 after the episodes are written.

    Raises:
        ConfigurationError: a mistake in the options, or the file holds something else.
        RolloutError: every episode failed.
    """
    from mrlm_pl.runs import collect

    parser = collect_parser()
    read = read_with_run(parser, arguments)
    options = parser.instantiate(read.config)
    name = read.name_of(options.environment)
    if options.temperatures and options.temperature is not None:
        raise ConfigurationError("temperatures and temperature are both given; leave one of them out")
    print(f"mrlm: collecting in {name} ({shown_settings(read.config.environment)})", file=sys.stderr)
    file = collect(
        options.model,
        options.environment,
        output=options.output,
        num_episodes=options.num_episodes,
        filter_reward=options.filter_reward,
        split=options.split,
        seed=options.seed,
        samples_per_task=options.samples_per_task,
        sampling=sampling_of(options, read.run.sampling),
        temperatures=options.temperatures,
        max_turns=options.max_turns,
        seats=options.seats,
        device=options.device,
        name=name,
        settings=read.environment_settings(),
    )
    failed = f", {file.failed} failed" if file.failed else ""
    print(f"{file.kept} of {file.played} episodes in {file.path}{failed}")
    return 0


def collect_parser() -> CommandParser:
    """The parser of ``mrlm collect``."""
    text = "Play episodes with a run or a model and keep them in a file; in the run's own environment by default."
    parser = environment_parser("collect", text, required=False)
    add_model_options(parser)
    parser.add_argument("-n", "--num_episodes", type=PositiveInt, default=100, help="Episodes to play.")
    parser.add_argument("--output", type=str, required=True, help="JSON-lines file, .jsonl or .jsonl.gz.")
    parser.add_argument(
        "--filter_reward", type=float | None, default=None, help="Keep episodes with this reward or more only."
    )
    parser.add_argument("--split", choices=SPLITS, default="train", help="Split of the tasks.")
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="Of the choice of tasks and of the sampling.")
    text = "Episodes of each task, at each temperature."
    parser.add_argument("--samples_per_task", type=PositiveInt, default=1, help=text)
    add_sampling_options(parser, "the run's training")
    text = "Several temperatures, in place of --temperature: each task is played at each of them."
    parser.add_argument("--temperatures", type=NonNegativeFloat, nargs="+", default=[], help=text)
    return parser
