"""Checks of each call before its service: the token, and the form of its request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mrlm_pl.serving.transport.connection import refuse
from mrlm_pl.serving.transport.security import HEADER, carries_token

_OPEN_TO_ALL = "/grpc.health.v1.Health/"
MALFORMED = (
    "the message is malformed: it is not of the protocol in mrlm_pl/serving/transport/environment.proto or "
    "mrlm_pl/serving/verifiers/verifier.proto"
)


class CallCheck(grpc.aio.ServerInterceptor):
    """Rejects calls without the token, except health checks, and malformed requests, as the caller's fault.

    gRPC would report the latter as INTERNAL.

    Args:
        token: token of valid calls; None accepts all calls.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler with a check of its request, or one that rejects; see ``grpc.aio.ServerInterceptor``."""
        header = str(dict(handler_call_details.invocation_metadata).get(HEADER, ""))
        method: str = handler_call_details.method
        if not (self._token is None or method.startswith(_OPEN_TO_ALL) or carries_token(header, self._token)):
            return grpc.stream_stream_rpc_method_handler(_refuse)
        handler: Any = await continuation(handler_call_details)
        if handler is None or (handler.unary_unary is None and handler.stream_stream is None):
            return handler

        async def read(data: bytes, context: Any) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)

        async def answer(data: bytes, context: Any) -> Any:
            try:
                return await handler.unary_unary(await read(data, context), context)
            except grpc.aio.AbortError as end:
                # gRPC keeps it with the call, in a cycle, and its frames keep the request, which may be large.
                del data
                end.__context__ = None
                raise end.with_traceback(None) from None

        async def stream(parts: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
            requests = (await read(data, context) async for data in parts)
            async with aclosing(handler.stream_stream(requests, context)) as replies:
                async for reply in replies:
                    yield reply

        kind = {"stream_stream": stream} if handler.unary_unary is None else {"unary_unary": answer}
        return handler._replace(request_deserializer=None, **kind)  # reads bytes


async def _refuse(requests: Any, context: Any) -> Any:
    """Reject a call of any kind before its request is read."""
    reason = "the token is missing or wrong; give it with token_file or in MRLM_TOKEN"
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
    yield  # makes it a stream
