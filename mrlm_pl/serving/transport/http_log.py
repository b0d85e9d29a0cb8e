"""The log of HTTP servers, without malformed requests: each gets a 400, and none of a port scan a traceback."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger


def leave_out_malformed_requests() -> None:
    """Let aiohttp's servers of this process log faults of ours alone; may be called twice."""
    server_logger.addFilter(_is_of_ours)


def _is_of_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))
