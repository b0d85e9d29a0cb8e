"""A call of several requests that different places answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

from mrlm_pl.engines.base import Sample, SampleRequest

P = TypeVar("P", bound=Hashable)


async def sampled_in_parts(
    requests: Sequence[SampleRequest],
    places: Sequence[P],
    ask: Callable[[P, list[SampleRequest]], Awaitable[list[Sample]]],
) -> list[Sample]:
    """One sample per request, in order, when each goes to its place; all places are asked at the same time.

    Args:
        requests: of one call.
        places: where each of them goes.
        ask: the samples that a place gives for its requests, in their order.

    Raises:
        Exception: what the first place that fails raises; what the others still do is cancelled.
    """
    parts: dict[P, list[int]] = {}
    for number, place in enumerate(places):
        parts.setdefault(place, []).append(number)
    asked = [
        asyncio.ensure_future(ask(place, [requests[number] for number in numbers])) for place, numbers in parts.items()
    ]
    try:
        answers = await asyncio.gather(*asked)
    finally:
        for task in asked:
            task.cancel()
    found: dict[int, Sample] = {}
    for numbers, samples in zip(parts.values(), answers, strict=True):
        found.update(zip(numbers, samples, strict=True))
    return [found[number] for number in range(len(requests))]
