"""Calls of actors."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from typing import Any

import pytest

from mrlm_pl.engines.ray.cluster import answer_of


@pytest.mark.parametrize("leaves", ["cancelled", "at the deadline"])
@pytest.mark.long_after(1)
def test_an_error_after_the_caller_has_left_is_not_reported(leaves: str) -> None:
    reported: list[dict[str, Any]] = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        asked: Future[None] = Future()
        answer = answer_of(asked)
        waiting = asyncio.ensure_future(asyncio.wait({answer}, timeout=0 if leaves == "at the deadline" else None))
        await asyncio.sleep(0)
        if leaves == "cancelled":
            waiting.cancel()
        await asyncio.wait({waiting})
        asked.set_exception(OSError("the worker was killed"))
        await asyncio.sleep(0)
        assert answer.done()

    asyncio.run(leave())
    gc.collect()
    assert not reported
