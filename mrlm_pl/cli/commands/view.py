"""``mrlm view RUN ...``: look at runs in a browser or a terminal."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence

from aiohttp import web
from rich.console import Console

from mrlm_pl.cli.parsing.parser import PlainParser, check_needed
from mrlm_pl.durable_files import replacing
from mrlm_pl.errors import ConfigurationError, RemoteError, counted, writing
from mrlm_pl.serving.transport.http_log import leave_out_malformed_requests
from mrlm_pl.serving.transport.security import read_token
from mrlm_pl.settings import is_loopback
from mrlm_pl.viewer.export import EPISODES, export_page
from mrlm_pl.viewer.runs import Run, demonstration, find_runs
from mrlm_pl.viewer.server import application
from mrlm_pl.viewer.text import print_episode, print_episodes, print_runs

PORT = 8010


def run(arguments: Sequence[str]) -> int:
    """Serve or print the runs until the end; return exit status 0.

    Raises:
        ConfigurationError: a path holds no run, or the options do not fit together.
        RemoteError: the port is taken, or the host is no address of this machine.
    """
    parser = PlainParser("view", "Look at runs in a browser or a terminal.")
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="*", help="run folder, folder of runs, or file of episodes")
    add("--port", type=int, default=PORT, help=f"port of the pages; default {PORT}, 0 picks a free one")
    add("--host", default="127.0.0.1", help="address to listen on; any but the default needs a token")
    add("--token_file", help="file with the token that a browser must present; else MRLM_TOKEN")
    add("--text", action="store_true", help="print to the terminal instead of serving pages")
    add("--episode", metavar="ID", help="with --text: print this episode; with --export: write it and its group")
    add("--iteration", metavar="N", type=int, help="with --text or --export: the episodes of this iteration, from 0")
    add("--failed", action="store_true", help="with --text: only the episodes that failed")
    text = f"write one page that opens without a server; of the newest {EPISODES} episodes where none are chosen"
    add("--export", metavar="PAGE.html", help=text)
    add("--demo", action="store_true", help="look at recorded runs that come with mrlm")
    options = parser.parse_args(arguments)
    if bool(options.runs) == options.demo:
        raise ConfigurationError("runs: name one or more, as in `mrlm view runs/quickstart`, or take `--demo` alone")
    check_needed(options, parser, {"failed": ("text",), **dict.fromkeys(("iteration", "episode"), ("text", "export"))})
    if options.episode is not None and (options.iteration is not None or options.failed):
        raise ConfigurationError("episode: `--episode ID` is shown alone; leave out `--iteration` and `--failed`")
    if options.text and options.export is not None:
        raise ConfigurationError("export: `--text` prints and `--export PAGE.html` writes a page; name one of them")
    for name in ("port", "host", "token_file") if options.text or options.export is not None else ():
        if (value := getattr(options, name)) != parser.get_default(name):
            raise ConfigurationError(
                f"{name}: {value!r} is for served pages; leave this option out, or leave out `--text` and `--export`"
            )
    if not 0 <= options.port < 2**16:
        raise ConfigurationError(f"port: {options.port} is not a port; name one of 0 to 65535")
    runs = demonstration() if options.demo else find_runs(options.runs)
    if options.text:
        print_text(runs, options.episode, options.iteration, options.failed)
        return 0
    if options.export is not None:
        page = export_page(runs, options.iteration, options.episode)
        with writing("export", options.export), replacing(os.path.realpath(options.export)) as draft:
            draft.write_text(page, encoding="utf-8")
        print(f"mrlm: {options.export} holds {counted(len(runs), 'run')}; open it in a browser")
        return 0
    token = read_token(options.token_file)
    if token is None and not is_loopback(options.host):
        remedy = "set a token with `--token_file FILE` or MRLM_TOKEN, or leave out `--host`"
        raise ConfigurationError(f"host: {options.host!r} can be reached from other machines; {remedy}")
    serve(application(runs, token, options.runs), options.host, options.port, token is not None)
    return 0


def print_text(runs: Mapping[str, Run], episode: str | None, iteration: int | None, failed: bool) -> None:
    """Print the runs; of a single run its episodes, those of an iteration, the failed ones, or one of them.

    Raises:
        ConfigurationError: episodes are named, and there are several runs, or they are not there.
    """
    console = Console()
    if len(runs) == 1:
        single = next(iter(runs.values()))
        if episode is None:
            print_episodes(single, console, iteration, failed)
        else:
            print_episode(single.record(episode), console)
    elif episode is not None or iteration is not None or failed:
        option = "episode" if episode is not None else "failed" if failed else "iteration"
        raise ConfigurationError(f"{option}: name one run; these are {', '.join(runs)}")
    else:
        print_runs(runs, console)


def serve(app: web.Application, host: str, port: int, guarded: bool) -> None:
    """Serve the pages until Ctrl-C or SIGTERM.

    Raises:
        RemoteError: the port is taken, or the host is no address of this machine.
    """
    try:
        leave_out_malformed_requests()
        web.run_app(app, host=host, port=port, print=lambda text: _print_address(text, guarded), access_log=None)
    except OSError as error:
        unknown = isinstance(error, socket.gaierror)
        option = "--host" if unknown or error.errno == errno.EADDRNOTAVAIL else "--port"
        reason = error.strerror if unknown else os.strerror(error.errno or 0)
        raise RemoteError(f"port {port} of {host} cannot be used: {reason}; choose another `{option}`") from error


def _print_address(text: str, guarded: bool) -> None:
    """Print the address out of the library's own message."""
    for word in text.split():
        if word.startswith("http"):
            print(f"mrlm: the viewer is at {word}{'?token=TOKEN' if guarded else ''}  (Ctrl-C ends it)", flush=True)
