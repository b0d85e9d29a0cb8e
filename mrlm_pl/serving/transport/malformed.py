"""Malformed messages are refused as the caller's fault; gRPC would report INTERNAL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from mrlm_pl.serving.transport.connection import refuse

REASON = (
    "the message is malformed: it is not of the protocol in mrlm_pl/serving/transport/environment.proto or "
    "mrlm_pl/serving/verifiers/verifier.proto"
)

_OURS = "/mrlm."


class WellFormed(grpc.aio.ServerInterceptor):
    """Refuses malformed requests with INVALID_ARGUMENT; of a stream of requests, a malformed one is None."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the handler with a check of its request; see ``grpc.aio.ServerInterceptor``."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler

        def read(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                return None

        async def answer(request: Any, context: Any) -> Any:
            if request is None:
                await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, REASON)
            return await handler.unary_unary(request, context)

        unary = {} if handler.unary_unary is None else {"unary_unary": answer}
        return handler._replace(request_deserializer=read, **unary)
