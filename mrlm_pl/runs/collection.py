"""Play episodes with a model and keep them in a file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mrlm_pl.compressed_files import packed
from mrlm_pl.durable_files import check_new, check_writable, progress_note, write_json
from mrlm_pl.engines import ContinuousEngine
from mrlm_pl.engines.base import Precision, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError, RolloutError, StorageError, counted, tell
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.runs.console import EpisodeProgress
from mrlm_pl.runs.seated_model import Model, SeatedModel, generation_precision, sampling_from
from mrlm_pl.settings import PositiveInt, check_arguments

CHUNK = 64
"""Number of episodes of one temperature that are played together, and written together with those of the others."""

NOTE_FIELDS = ("fingerprint", "played", "kept", "failed", "size")
"""Attributes of a :class:`CollectionFile` that its progress note holds."""

TEMPERATURE = "temperature"
"""Metric of an episode with the temperature at which all of its turns were sampled."""


@check_arguments
def collect(
    model: Model,
    environment: str | type[Environment] | Environment | None = None,
    *,
    output: str | Path,
    num_episodes: PositiveInt = 100,
    filter_reward: float | None = None,
    split: str = "train",
    seed: int = 0,
    samples_per_task: PositiveInt = 1,
    sampling: Sampling | None = None,
    temperatures: Sequence[float] = (),
    max_turns: int | None = None,
    seats: Mapping[str, str] | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> CollectionFile:
    """Play episodes and write them to a file. Called again after a kill, it continues the file.

    Args:
        model: run folder, model folder, hub id or ``builtin:tiny``; a policy, or several by name.
        environment: environment to play; see :func:`mrlm_pl.runs.evaluate`.
        output: file to write, ``.jsonl``, ``.jsonl.zst`` or ``.jsonl.gz``.
        num_episodes: number of episodes to play.
        filter_reward: lowest reward of the episodes to keep.
        split: split of the tasks.
        seed: seed of the choice of tasks and of the sampling.
        samples_per_task: number of episodes of each task, at each temperature.
        sampling: sampling settings of the turns; None takes the run's training settings, else the defaults.
        temperatures: temperatures at each of which every task is played, instead of that of ``sampling``.
        max_turns: see :func:`mrlm_pl.runs.evaluate`.
        seats: policy of each agent.
        device: device of policies whose weights are read.
        precision: precision in which turns are generated.
        name: name of the environment in the run.
        settings: arguments of an environment that is given as an instance; an unfinished file continues only with equal
            ones.

    Raises:
        ConfigurationError: as :func:`mrlm_pl.runs.evaluate`; the file exists, or is the unfinished file of another
            collection.
        RolloutError: every episode failed.
        StorageError: the file cannot be written, for example because the disk is full.
    """
    seated = SeatedModel(model, environment, seats, name, precision=precision)
    sampling = sampling or sampling_from(seated.run.sampling, {})
    task_temperatures = _task_temperatures(temperatures, num_episodes, samples_per_task)
    samples_each = samples_per_task * len(task_temperatures)
    specs = seated.specs(num_episodes, split, seed, samples_each)
    planned = [
        (spec, task_temperatures[number % samples_each // samples_per_task]) for number, spec in enumerate(specs)
    ]
    arguments = settings or seated.arguments or {}
    played = (type(seated.environment).__qualname__, arguments, asdict(sampling), task_temperatures)
    numbers = (num_episodes, samples_per_task, split, seed, filter_reward, max_turns)
    file = _collection_file(output, seated, device, [*played, *numbers])
    with seated.player(sampling, max_turns, device) as player, EpisodeProgress() as progress:
        progress(0, len(planned))
        chunk = CHUNK * len(task_temperatures)

        async def play_all() -> None:
            for start in range(file.played, len(planned), chunk):
                episodes = await _play(player, planned[start : start + chunk])
                complete = [episode for episode in episodes if not episode.failed]
                file.add(
                    episodes,
                    [episode for episode in complete if filter_reward is None or episode.reward >= filter_reward],
                )
                progress(file.played, len(planned))

        player.run_blocking(play_all)  # once: at its end the engine frees copies of large weights
    if file.failed == file.played:
        raise RolloutError(f"every episode of {seated.name!r} failed; the first: {file.reason}")
    file.finish()
    return file


@check_arguments
def serve_gateway(
    model: Model,
    environment: Environment,
    *,
    output: str | Path,
    listening: Callable[[str], object],
    num_episodes: int = 100,
    at_once: PositiveInt = 64,
    split: str = "train",
    seed: int = 0,
    samples_per_task: int = 1,
    sampling: Sampling | None = None,
    max_turns: int | None = None,
    seats: Mapping[str, str] | None = None,
    device: str = "auto",
    precision: Precision | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> CollectionFile:
    """Serve policies to programs, each as its own episode, and write the episodes in the order of their tasks.

    Args:
        model: model to serve; for it and the arguments not listed here see :func:`mrlm_pl.runs.evaluate`.
        environment: a ``HarnessEnvironment`` without command and function.
        output: file to write; see :func:`collect`.
        listening: function that is called with the address of the endpoint.
        num_episodes: total number of episodes, after which the endpoint closes.
        at_once: maximum number of concurrent episodes.
        settings: arguments of the environment; an unfinished file continues only with equal ones.

    Raises:
        ConfigurationError: as :func:`collect`, or the environment has no endpoint or starts its programs.
        RemoteError: the address cannot be used.
    """
    from mrlm_pl.serving.gateway.server import Gateway

    gateway = getattr(environment, "gateway", None)
    if not isinstance(gateway, Gateway) or gateway.programs:
        fault = f"environment {environment.name!r} does not wait for programs that were started elsewhere"
        remedy = "use HarnessEnvironment with neither command nor function (`--environment.command null`)"
        raise ConfigurationError(f"{fault}; {remedy}")
    seated = SeatedModel(model, environment, seats, name, precision=precision)
    specs = seated.specs(num_episodes, split, seed, samples_per_task)
    sampling = sampling or sampling_from(seated.run.sampling, {})
    numbers = (num_episodes, samples_per_task, split, seed, max_turns)
    file = _collection_file(output, seated, device, [dict(settings or {}), asdict(sampling), *numbers])
    with gateway.kept(), seated.player(sampling, max_turns, device) as player:
        player.retries, player.caller.timeout = 0, float("inf")  # a program asks when it likes; leases bound the rest
        if player.engine.takes_chunks:
            player.engine = ContinuousEngine(player.engine)
        listening(gateway.start())
        slots, played, written = asyncio.Semaphore(at_once), dict[int, Episode](), file.played

        async def play(number: int) -> None:
            nonlocal written
            async with slots:
                (played[number],) = await player.play([specs[number]])
            while written in played:
                episode = played.pop(written)
                file.add([episode], [] if episode.failed else [episode])
                written += 1

        async def play_all() -> None:
            await asyncio.gather(*map(play, range(file.played, len(specs))))

        player.run_blocking(play_all)
    file.finish()
    return file


class CollectionFile:
    """A file of episodes that a killed collection continues.

    ``FILE.progress`` is next to the file while that is written: the number of played episodes and the length of the
    file then. Text beyond that length, left by a kill, is cut off, so that no episode is lost or written twice.

    Args:
        path: path of the file.
        dependencies: everything that decides the episodes.

    Attributes:
        played: number of episodes that were played.
        kept: number of episodes that were written.
        failed: number of episodes that failed.
        reason: error of the first failed episode in this process.

    Raises:
        ConfigurationError: the file is there already, or belongs to a collection with other options.
    """

    def __init__(self, path: Path, dependencies: Sequence[Any]) -> None:
        if path.is_dir() or not path.name.endswith((".jsonl", ".jsonl.zst", ".jsonl.gz")):
            fault = f"output: {str(path)!r} must be a file that ends in .jsonl, .jsonl.zst or .jsonl.gz"
            raise ConfigurationError(fault)
        self.path = path
        text = json.dumps(dependencies, sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.played = self.kept = self.failed = self.size = 0
        self.reason = ""
        self._note = progress_note(path)
        if self._note.is_file():
            note = json.loads(self._note.read_text(encoding="utf-8"))
            if note["fingerprint"] != self.fingerprint:
                remedy = f"repeat it with those, or remove {str(self._note)!r} and the file"
                raise ConfigurationError(f"output: {str(path)!r} is half of a collection with other options; {remedy}")
            for key in NOTE_FIELDS:
                setattr(self, key, note[key])
            if self.size > (path.stat().st_size if path.is_file() else 0):
                fault = f"output: {str(path)!r} is shorter than when {str(self._note)!r} was written"
                raise ConfigurationError(f"{fault}; put it back, or remove both to start again")
            tell(f"continuing {path} after {counted(self.played, 'episode')}")
            check_writable("output", path)
        else:
            check_new("output", path)

    def __repr__(self) -> str:
        return f"{self.kept} of {counted(self.played, 'episode')} in {self.path}"

    def add(self, episodes: Sequence[Episode], kept: Sequence[Episode]) -> None:
        """Append the kept ones of the episodes that were played."""
        data = packed(self.path, "".join(episode.to_json() + "\n" for episode in kept).encode())
        if not self.played:
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
            fault = f"output: {str(self.path)!r} cannot be written: {error.strerror or error}"
            remedy = "free space on the disk, then repeat the command to continue"
            raise StorageError(f"{fault}; it keeps the {self.kept} episodes from before; {remedy}") from error
        self.played += len(episodes)
        self.kept += len(kept)
        errors = [episode.error for episode in episodes if episode.error is not None]
        self.failed += len(errors)
        self.reason = self.reason or next(iter(errors), "")
        self.size += len(data)
        self._write_note()

    def _write_note(self) -> None:
        write_json(self._note, {key: getattr(self, key) for key in NOTE_FIELDS})

    def finish(self) -> None:
        """Mark the file as complete."""
        self._note.unlink(missing_ok=True)


def _collection_file(path: str | Path, seated: SeatedModel, device: str, dependencies: Sequence[Any]) -> CollectionFile:
    """Return the file of a model's episodes, which depend on the model and the dependencies."""
    precision = generation_precision(seated.run, seated.precision, device)
    model = (seated.label, seated.run.seats, seated.name, device, precision)
    return CollectionFile(Path(path), [*model, *dependencies])


def _task_temperatures(temperatures: Sequence[float], num_episodes: int, samples_per_task: int) -> list[float | None]:
    """Return the temperatures at which each task is played; a single None is the temperature of the sampling.

    Raises:
        ConfigurationError: one is named twice, or the episodes cannot be divided evenly.
    """
    distinct: list[float | None] = list(dict.fromkeys(temperatures)) or [None]
    if len(temperatures) > len(distinct):
        raise ConfigurationError(f"temperatures: {[*temperatures]} names one twice; raise --samples-per-task instead")
    samples_each = samples_per_task * len(distinct)
    if len(temperatures) and num_episodes % samples_each:
        factors = f"samples_per_task {samples_per_task} at each of {len(distinct)} temperatures"
        raise ConfigurationError(f"num_episodes {num_episodes} must be a multiple of {samples_each}: {factors}")
    return distinct


async def _play(player: EpisodePlayer, planned: Sequence[tuple[EpisodeSpec, float | None]]) -> list[Episode]:
    """Return the planned episodes, in order, with :data:`TEMPERATURE` among their metrics.

    Episodes whose policies sample at several temperatures do not have it. A planned temperature of None takes the
    seats' temperature.
    """
    by_id: dict[str, Episode] = {}
    for temperature in dict.fromkeys(temperature for _, temperature in planned):
        if temperature is not None:
            player.seats = {
                agent: replace(seat, sampling=replace(seat.sampling, temperature=temperature))
                for agent, seat in player.seats.items()
            }
        sampled = {seat.sampling.temperature for seat in player.seats.values()}
        metrics = {TEMPERATURE: sampled.pop()} if len(sampled) == 1 else {}
        for episode in await player.play(
            [spec for spec, spec_temperature in planned if spec_temperature == temperature]
        ):
            by_id[episode.id] = replace(episode, metrics={**episode.metrics, **metrics})
    return [by_id[spec.id] for spec, _ in planned]
