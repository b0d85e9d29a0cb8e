"""Messages that cannot be read are the caller's fault, and are answered so; the library would say INTERNAL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

REASON = (
    "the message is malformed: it is not of the protocol in mrlm_pl/serving/transport/environment.proto or "
    "mrlm_pl/serving/verifiers/verifier.proto, or nested too deep"
)


class _Malformed:
    """Stands for a message that could not be read."""


class WellFormed(grpc.aio.ServerInterceptor):
    """Refuses malformed messages with INVALID_ARGUMENT."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler, with a check of what it is given; see ``grpc.aio.ServerInterceptor``."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        checked: dict[str, Any] = {"request_deserializer": _lenient(handler.request_deserializer)}
        if handler.unary_unary is not None:
            checked["unary_unary"] = _unary(handler.unary_unary)
        elif handler.stream_stream is not None:
            checked["stream_stream"] = _stream(handler.stream_stream)
        else:
            return handler
        return handler._replace(**checked)


def _lenient(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def attempt(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _Malformed()

    return attempt


def _unary(behavior: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def checked(request: Any, context: Any) -> Any:
        if isinstance(request, _Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, REASON)
        return await behavior(request, context)

    return checked


def _stream(behavior: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        broken = False

        async def readable() -> AsyncIterator[Any]:
            nonlocal broken
            async for request in requests:
                if isinstance(request, _Malformed):
                    broken = True
                    return
                yield request

        async for reply in behavior(readable(), context):
            yield reply
        if broken:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, REASON)

    return checked
