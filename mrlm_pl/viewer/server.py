"""The pages and their data over HTTP, for this machine unless a token is set; files are only read."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any

import msgspec
from aiohttp import web

from mrlm_pl.errors import MRLMError
from mrlm_pl.evaluation.intervals import t_quantile
from mrlm_pl.settings import is_loopback
from mrlm_pl.viewer.comparison import compare_runs
from mrlm_pl.viewer.health import health
from mrlm_pl.viewer.runs import Run, runs_below

SECURITY = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
COOKIE = "mrlm_token"
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
QUANTILES = 60
"""Degrees of freedom for which the pages have Student's quantile."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def pages() -> dict[str, bytes]:
    """Return the static files by name."""
    folder = resources.files("mrlm_pl.viewer") / "pages"
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.name.rpartition(".")[2] in TYPES}


def answer(runs: Mapping[str, Run], path: str, query: Mapping[str, str]) -> Any:
    """Return the data of an address below ``/api/``.

    Raises:
        KeyError: there is no such address, run or option.
        MRLMError: the data cannot be read.
    """
    if path == "runs":
        quantiles = [t_quantile(degrees) for degrees in range(1, QUANTILES + 1)]
        return {"runs": [_call_locked(run, run.head) for run in runs.values()], "t": quantiles}
    run = runs[query["run"]]
    bounds = {key: int(query[key]) for key in ("last", "first") if re.fullmatch(r"-?\d{1,18}", query.get(key, ""))}
    readers: dict[str, Callable[[], Any]] = {
        "run": run.detail,
        "metrics": run.metrics,
        "episodes": lambda: {**(table := run.index.table(**bounds)), "total": run.total(table)},
        "episode": lambda: run.record(query["id"]),
        "tree": lambda: run.index.branches(query["id"]),
        "health": lambda: health(run.index),
    }
    if path == "compare":
        other = runs[query["other"]]
        # In one order, because another request may compare the swapped pair.
        first, second = sorted((run, other), key=lambda each: each.key)
        with first.lock, second.lock:
            return compare_runs(run, other)
    return _call_locked(run, readers[path])


def _call_locked(run: Run, function: Callable[[], Any]) -> Any:
    with run.lock:
        return function()


def application(runs: Mapping[str, Run], token: str | None = None, paths: Sequence[str] = ()) -> web.Application:
    """Return the server.

    Args:
        runs: runs by name; no other files can be read.
        token: secret that a browser must present; None answers only requests to a name of this machine.
        paths: paths in which each load of the page looks for extra runs.
    """
    files = pages()

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if token is None and not is_this_machine(request.host):
            response: web.StreamResponse = web.Response(status=421, text="this viewer answers to 127.0.0.1 alone")
        elif token is not None and not _has_token(request, token):
            response = web.Response(status=401, text="open /?token=TOKEN with the viewer's token")
        elif "token" in request.query:
            response = web.Response(status=303, headers={"Location": "/"})
            response.set_cookie(COOKIE, str(token), httponly=True, samesite="Strict")
        else:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = web.Response(status=error.status, text=error.reason)
        response.headers.update(SECURITY)
        return response

    async def page(request: web.Request) -> web.Response:
        name = request.match_info.get("name") or "index.html"
        if name not in files:
            raise web.HTTPNotFound
        if name == "index.html":
            nonlocal runs
            for path in paths:
                with suppress(OSError):  # it was removed meanwhile
                    new_runs = await asyncio.to_thread(runs_below, path)
                    runs = {**runs, **{key: run for key, run in new_runs.items() if key not in runs}}
        return web.Response(body=files[name], content_type=TYPES[name.rpartition(".")[2]], charset="utf-8")

    async def data(request: web.Request) -> web.Response:
        try:
            result = await asyncio.to_thread(answer, runs, request.match_info["path"], request.query)
        except KeyError as error:
            return web.json_response({"error": f"the viewer has no {error}; choose a run under Runs"}, status=404)
        except (MRLMError, OSError) as error:
            return web.json_response({"error": str(error)}, status=422)
        response = web.Response(body=msgspec.json.encode(result), content_type="application/json")
        response.enable_compression()
        return response

    app = web.Application(middlewares=[guard])
    app.add_routes([web.get("/", page), web.get("/api/{path}", data), web.get("/{name}", page)])
    return app


def is_this_machine(host: str) -> bool:
    """Return True if a ``Host`` header names this machine; other sites can make a browser send theirs.

    >>> is_this_machine("127.0.0.1:8000"), is_this_machine("[::1]:80"), is_this_machine("evil.example:8000")
    (True, True, False)
    """
    return is_loopback(host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host)


def _has_token(request: web.Request, token: str) -> bool:
    presented = request.query.get("token") or request.cookies.get(COOKIE, "")
    return hmac.compare_digest(presented.encode(errors="replace"), token.encode())
