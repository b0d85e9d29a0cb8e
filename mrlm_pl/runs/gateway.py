"""Episodes of programs that were started elsewhere, with the policies of a run or a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrlm_pl.engines.base import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.collection import CollectionFile, fingerprint
from mrlm_pl.runs.evaluation import SeatedModel, sampling_from
from mrlm_pl.settings import at_least

if TYPE_CHECKING:
    from mrlm_pl.runs.evaluation import Model


def serve_gateway(
    model: Model,
    environment: Environment,
    *,
    output: str | Path,
    listening: Callable[[str], object],
    num_episodes: int = 100,
    at_once: int = 64,
    split: str = "train",
    seed: int = 0,
    samples_per_task: int = 1,
    sampling: Sampling | None = None,
    max_turns: int | None = None,
    seats: Mapping[str, str] | None = None,
    device: str = "auto",
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> CollectionFile:
    """Serve policies to programs, each as an episode of its own, and write the episodes in the order of their tasks.

    Args:
        model: see :func:`mrlm_pl.runs.evaluate`, as the other arguments that are not listed.
        environment: a ``HarnessEnvironment`` without command and function.
        output: a file; see :func:`mrlm_pl.runs.collect`.
        listening: is called with the address of the endpoint.
        num_episodes: episodes in all; then the endpoint closes.
        at_once: most episodes at the same time.
        settings: arguments of the environment; half a file continues only with the same.

    Raises:
        ConfigurationError: as :func:`mrlm_pl.runs.collect`, or the environment has no endpoint or starts its programs.
        RemoteError: the address cannot be used.
    """
    from mrlm_pl.engines import ContinuousEngine
    from mrlm_pl.serving.gateway.server import Gateway

    gateway = getattr(environment, "gateway", None)
    if not isinstance(gateway, Gateway) or gateway.programs:
        raise ConfigurationError(
            f"environment {environment.name!r} does not wait for programs that were started elsewhere; use "
            "HarnessEnvironment with neither command nor function (`--environment.command null`)"
        )
    at_least(1, "", at_once=at_once)
    seated = SeatedModel(model, environment, seats, name)
    specs = seated.specs(num_episodes, split, seed, samples_per_task)
    sampling = sampling or sampling_from(seated.run.sampling, {})
    numbers = (num_episodes, samples_per_task, split, seed, max_turns, device)
    made_by = (seated.label, seated.run.seats, seated.name, dict(settings or {}))
    file = CollectionFile(Path(output), fingerprint([*made_by, asdict(sampling), *numbers]))
    with seated.player(sampling, max_turns, device) as player:
        player.retries, player.caller.timeout = 0, float("inf")  # a program asks when it likes; leases bound the rest
        if player.engine.takes_pieces:
            player.engine = ContinuousEngine(player.engine)
        gateway.patient = True
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
