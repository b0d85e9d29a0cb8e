from __future__ import annotations

import asyncio

import pytest

from mrlm_pl.serving.gateway.programs import Endpoint, run_command


def test_a_cancelled_program_has_ended_before_its_pipes_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def cancelled() -> None:
        asyncio.get_running_loop().set_debug(True)  # asyncio then warns of a program that still runs
        running = asyncio.create_task(
            run_command(["sleep", "50"], {}, Endpoint("http://host/v1", "key", "http://host"))
        )
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert not [record for record in caplog.records if "child process" in record.getMessage()]
