"""``mrlm sessions HOST:PORT``: list the live sessions of a server, and the workers of a controller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.errors import ConfigurationError, RemoteError, counted
from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from mrlm_pl.serving.transport.connection import Address, StatusError, connection, submit
from mrlm_pl.serving.transport.security import Identity

ANSWER_SECONDS = 10.0


def run(arguments: Sequence[str]) -> int:
    """Print the sessions, and first the workers of a controller; return exit status 0.

    Raises:
        RemoteError: the server does not answer.
        ConfigurationError: a key cannot be read.
    """
    parser = PlainParser("sessions", "List the live sessions of a server, and the workers of a controller.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--environment", default="", help="list sessions of one environment")
    parser.add_argument("--limit", type=int, default=50, help="number of listed sessions; 0 lists all")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--token_file", help="file with the token; else MRLM_TOKEN")
    parser.add_argument("--tls_authority", help="PEM file of the certificates that sign the server's")
    parser.add_argument("--tls_certificate", help="PEM file of this client's certificate")
    parser.add_argument("--tls_key", help="PEM file of its key")
    options = parser.parse_args(arguments)
    if not 0 <= options.limit < 2**31:
        raise ConfigurationError(f"limit: {options.limit} is not a number of sessions; 0 lists all")
    identity = Identity(options.tls_certificate, options.tls_key, options.tls_authority)
    request = pb.ListSessionsRequest(environment=options.environment, limit=options.limit)
    try:
        address = Address(options.address, options.token_file, identity)
        reply, joined = submit(_list(address, request)).result()
    except StatusError as error:
        if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            remedy = f"start one with `mrlm serve`, or check the address and TLS on both sides ({error.text})"
            raise RemoteError(f"no server answers at {options.address}; {remedy}") from error
        raise RemoteError(str(error)) from error
    if options.json:
        data: dict[str, Any] = {}
        for message in filter(None, (joined, reply)):
            data |= MessageToDict(message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
        print(json.dumps(data, indent=2))
        return 0
    if joined is not None:
        print(counted(len(joined.workers), "worker"))
        for entry in joined.workers:
            worker = entry.report
            hosted = _printable(", ".join(environment.name for environment in worker.environments))
            head = f"{_printable(worker.worker)}  {_printable(worker.address)}"
            load = f"{worker.sessions} of {worker.capacity} sessions  heard {entry.silent_seconds:.1f} s ago"
            print(f"{head}  {load}  {hosted}{'  draining' if worker.draining else ''}")
    print(counted(reply.total, "session"))
    for session in reply.sessions:
        state = "busy" if session.busy else f"lease {session.lease_left_seconds:.0f} s"
        print(
            f"{session.session}  {session.environment:<12} turn {session.turn:<4} age {session.age_seconds:.0f} s  "
            f"{state:<12} {_printable(session.client)}"
        )
    return 0


def _printable(text: str) -> str:
    """Return a text without terminal control characters, since clients choose their names.

    >>> _printable("a\\x1b[2Jb\\n")
    'a?[2Jb?'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])


async def _list(address: Address, request: pb.ListSessionsRequest) -> tuple[Any, Any]:
    """Return the sessions, and the workers of a controller; None of another server."""
    server = await connection(address)
    reply = await server.call("ListSessions", request, ANSWER_SECONDS)
    try:
        service = environment_pb2_grpc.ControllerServiceStub
        return reply, await server.call("ListWorkers", pb.ListWorkersRequest(), ANSWER_SECONDS, service)
    except StatusError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        return reply, None
