"""The log of HTTP servers, without malformed requests: each gets a 400, and none of a port scan a traceback."""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

HTTP_LOGGER = logging.getLogger(__name__)
"""Logger of aiohttp's servers."""


def _is_of_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


HTTP_LOGGER.addFilter(_is_of_ours)
