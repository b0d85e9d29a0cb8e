"""``mrlm collect``: play episodes with a model and keep them in a file."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveInt

from mrlm_pl.cli.commands.evaluate import (
    add_model_options,
    add_sampling_options,
    player_of,
    sampling_of,
    seated,
    tell_of_few,
)
from mrlm_pl.cli.parsing.environment_option import environment_parser, read_with_run, shown_settings
from mrlm_pl.cli.parsing.parser import CommandParser
from mrlm_pl.durable_files import progress_note, replacing
from mrlm_pl.environment import SPLITS, Environment
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError, RolloutError, StorageError
from mrlm_pl.runs.recorded_run import RecordedRun

if TYPE_CHECKING:
    from mrlm_pl.rollout.play import EpisodeSpec
    from mrlm_pl.rollout.player import EpisodePlayer

CHUNK = 64
"""Episodes of one temperature that are played together, and with those of the others written at once."""

TEMPERATURE = "temperature"
"""Among an episode's metrics: the temperature that all of its turns were sampled at."""


def run(arguments: Sequence[str]) -> int:
    """Exit status 0 after the episodes are written.

    Raises:
        ConfigurationError: a mistake in the options, or the file holds something else.
        RolloutError: every episode failed.
    """
    parser = collect_parser()
    read = read_with_run(parser, arguments)
    options = parser.instantiate(read.config)
    environment: Environment = options.environment
    model = seated(options, read.run, environment)
    output = Path(options.output)
    if output.is_dir() or not {".jsonl", ".gz"} & set(output.suffixes):
        raise ConfigurationError(f"output: {str(output)!r} must be a file that ends in .jsonl or .jsonl.gz")
    name, settings = read.name_of(environment), shown_settings(read.config.environment)
    print(f"mrlm: collecting in {name} ({settings})", file=sys.stderr)
    progress = Progress(output, _fingerprint(read.config))
    print(_collect(model, environment, name, options, progress))
    return 0


def collect_parser() -> CommandParser:
    """The parser of ``mrlm collect``."""
    text = "Play episodes with a run or a model and keep them in a file; in the run's own environment by default."
    parser = environment_parser("collect", text, required=False)
    add_model_options(parser)
    parser.add_argument("-n", "--num-episodes", type=PositiveInt, default=100, help="Episodes to play.")
    parser.add_argument("--output", type=str, required=True, help="JSON-lines file, .jsonl or .jsonl.gz.")
    parser.add_argument(
        "--filter-reward", type=float | None, default=None, help="Keep episodes with this reward or more only."
    )
    parser.add_argument("--split", choices=SPLITS, default="train", help="Split of the tasks.")
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="Of the choice of tasks and of the sampling.")
    text = "Episodes of each task, at each temperature."
    parser.add_argument("--samples-per-task", type=PositiveInt, default=1, help=text)
    add_sampling_options(parser, "the run's training")
    text = "Several temperatures, in place of --temperature: each task is played at each of them."
    parser.add_argument("--temperatures", type=NonNegativeFloat, nargs="+", default=[], help=text)
    return parser


class Progress:
    """What has been written to a file, so that a killed collection goes on where it was.

    Beside the file lies ``FILE.progress`` while it is being written: how many episodes were played, and how long the
    file was then. What a kill left beyond that is cut off, so that no episode is lost or told twice.

    Args:
        path: the file.
        fingerprint: what the episodes depend on.

    Raises:
        ConfigurationError: the file is there already, or belongs to a collection with other options.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.played = self.kept = self.failed = self.size = 0
        self._note = progress_note(path)
        if self._note.is_file():
            found = json.loads(self._note.read_text(encoding="utf-8"))
            if found["fingerprint"] != fingerprint:
                raise ConfigurationError(
                    f"output: {str(path)!r} is half of a collection with other options; repeat it with those, or "
                    f"remove {str(self._note)!r} and the file"
                )
            self.played, self.kept, self.failed, self.size = (
                found[key] for key in ("played", "kept", "failed", "size")
            )
            if self.size > (path.stat().st_size if path.is_file() else 0):
                raise ConfigurationError(
                    f"output: {str(path)!r} is shorter than when {str(self._note)!r} was written; put it back, or "
                    "remove both to begin anew"
                )
            print(f"mrlm: going on with {path} after {self.played} episodes", file=sys.stderr)
        elif path.exists():
            raise ConfigurationError(f"output: {str(path)!r} exists; name another file, or remove it")

    def add(self, episodes: Sequence[Episode], kept: Sequence[Episode]) -> None:
        """Append the kept ones of the episodes that were played."""
        text = "".join(episode.to_json() + "\n" for episode in kept).encode()
        data = gzip.compress(text, mtime=0) if self.path.suffix == ".gz" and text else text
        if not self.played:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write_note()  # before the file, which without a note would be taken for a finished one
        try:
            with self.path.open("ab") as file:
                file.truncate(self.size)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if self.path.is_file():
                os.truncate(self.path, self.size)
            raise StorageError(
                f"output: {str(self.path)!r} cannot be written: {error.strerror or error}; it keeps the {self.kept} "
                "episodes from before; free space on the disk, then repeat the command to continue"
            ) from error
        self.played += len(episodes)
        self.kept += len(kept)
        self.failed += sum(episode.failed for episode in episodes)
        self.size += len(data)
        self._write_note()

    def _write_note(self) -> None:
        keys = ("fingerprint", "played", "kept", "failed", "size")
        with replacing(self._note) as draft:
            draft.write_text(json.dumps({key: getattr(self, key) for key in keys}), encoding="utf-8")

    def finish(self) -> None:
        """The file is complete."""
        self._note.unlink(missing_ok=True)


def _collect(model: RecordedRun, environment: Environment, name: str, options: Any, progress: Progress) -> str:
    sampling = sampling_of(options, model.sampling)
    planned = _plan(environment, name, options, sampling.temperature)
    temperatures = list(dict.fromkeys(temperature for _, temperature in planned))
    tell_of_few(len(planned), options)
    reason = ""
    with player_of(model, environment, name, options, sampling) as player:
        chunk = CHUNK * len(temperatures)
        for start in range(progress.played, len(planned), chunk):
            episodes = _play(player, planned[start : start + chunk])
            played = [episode for episode in episodes if not episode.failed]
            reason = reason or next((str(episode.error) for episode in episodes if episode.failed), "")
            threshold = options.filter_reward
            kept = [episode for episode in played if threshold is None or episode.reward >= threshold]
            progress.add(episodes, kept)
            print(f"\rmrlm: {progress.played}/{len(planned)} played, {progress.kept} kept", end="", file=sys.stderr)
    print(file=sys.stderr)
    if progress.failed == progress.played:
        raise RolloutError(f"every episode of {name!r} failed; the first: {reason}")
    progress.finish()
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.kept} of {progress.played} episodes in {progress.path}{failed}"


def _plan(environment: Environment, name: str, options: Any, temperature: float) -> list[tuple[EpisodeSpec, float]]:
    """The episodes to play, task after task, each with its temperature."""
    from mrlm_pl.evaluation.report import evaluation_specs

    given, samples = list(options.temperatures), options.samples_per_task
    if given and options.temperature is not None:
        raise ConfigurationError("temperatures and temperature are both given; leave one of them out")
    if len(set(given)) < len(given):
        raise ConfigurationError(f"temperatures: {given} names one twice; --samples-per-task says how often each")
    if given and options.num_episodes % (samples * len(given)):
        raise ConfigurationError(
            f"num_episodes {options.num_episodes} must be a multiple of {samples * len(given)}: samples_per_task "
            f"{samples} at each of {len(given)} temperatures"
        )
    given = given or [temperature]
    each = samples * len(given)
    specs = evaluation_specs(environment, options.num_episodes, options.split, options.seed, each, name)
    return [(spec, given[number % each // samples]) for number, spec in enumerate(specs)]


def _play(player: EpisodePlayer, planned: Sequence[tuple[EpisodeSpec, float]]) -> list[Episode]:
    """The planned episodes, in order, with :data:`TEMPERATURE` among their metrics."""
    found: dict[str, Episode] = {}
    for temperature in dict.fromkeys(temperature for _, temperature in planned):
        player.seats = {
            agent: replace(seat, sampling=replace(seat.sampling, temperature=temperature))
            for agent, seat in player.seats.items()
        }
        for episode in player.play_blocking([spec for spec, own in planned if own == temperature]):
            found[episode.id] = replace(episode, metrics={**episode.metrics, TEMPERATURE: temperature})
    return [found[spec.id] for spec, _ in planned]


def _fingerprint(config: Any) -> str:
    """Hash of everything that the episodes in the file depend on."""
    given = {key: value for key, value in config.as_dict().items() if key not in ("output", "config")}
    return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()[:16]
