from __future__ import annotations

import asyncio
import traceback
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from mrlm_pl.errors import EngineError
from mrlm_pl.serving.transport.call_check import CallCheck
from mrlm_pl.serving.transport.connection import refuse


def test_the_end_of_a_refused_call_holds_no_request() -> None:
    """gRPC keeps the exception with the call, in a cycle, so that a large request would stay for long."""

    async def abort(*arguments: Any) -> None:
        raise grpc.aio.AbortError

    async def fail(request: Any, context: Any) -> None:
        try:
            raise EngineError("the engine has failed")
        except EngineError as error:
            await refuse(context, grpc.StatusCode.INTERNAL, str(error))

    async def found(details: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(fail, request_deserializer=bytes)

    async def refused() -> grpc.aio.AbortError:
        details: Any = SimpleNamespace(invocation_metadata=(), method="/service/method")
        handler: Any = await CallCheck(None).intercept_service(found, details)
        with pytest.raises(grpc.aio.AbortError) as raised:
            await handler.unary_unary(b"request", SimpleNamespace(abort=abort))
        return raised.value

    end = asyncio.run(refused())
    names = [name for frame, _ in traceback.walk_tb(end.__traceback__) for name in frame.f_locals]
    assert "context" in names, "the frames are those of the call"
    assert not {"request", "data"} & {*names}
    assert end.__context__ is None, "which has its own frames"
