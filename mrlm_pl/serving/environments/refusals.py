"""Errors as gRPC statuses."""

from __future__ import annotations

import asyncio

import grpc

from mrlm_pl.concurrency.workers import QueueFullError
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, RemoteError
from mrlm_pl.serving.environments.hosted import UnknownEnvironmentError
from mrlm_pl.serving.environments.sessions import RefusalError, UnknownSessionError
from mrlm_pl.serving.transport import environment_pb2 as pb

Code = grpc.StatusCode


def refusal_of(error: BaseException) -> RefusalError:
    """Return the status and the text with which an error is told: its class and what it says."""
    text = f"{type(error).__name__}: {error}"[:2000]
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, (UnknownSessionError, UnknownEnvironmentError)):
        return RefusalError(Code.NOT_FOUND, str(error))
    if isinstance(error, (RemoteError, ConfigurationError, IndexError)):
        return RefusalError(Code.INVALID_ARGUMENT, text)
    if isinstance(error, EnvironmentContractError):
        return RefusalError(Code.FAILED_PRECONDITION, text)
    if isinstance(error, TimeoutError):
        return RefusalError(Code.DEADLINE_EXCEEDED, text)
    if isinstance(error, QueueFullError):
        return RefusalError(Code.RESOURCE_EXHAUSTED, str(error))
    if isinstance(error, asyncio.CancelledError):
        return RefusalError(Code.ABORTED, "the session was ended while its turn was made")
    return RefusalError(Code.ABORTED, text)


def refused(operation: pb.Operation, error: BaseException) -> pb.Result:
    """Return the result of an operation that raised an error."""
    refusal = refusal_of(error)
    return pb.Result(id=operation.id, code=refusal.code.value[0], message=refusal.reason)
