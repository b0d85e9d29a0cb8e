from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.server import Endpoint
from mrlm_pl.serving.transport.security import Identity, read_token
from mrlm_pl.settings import is_loopback
from tests.support.servers.certificates import Authority
from tests.support.servers.environment_servers import Served, eventually, played

Code = grpc.StatusCode
METHODS = ["Describe", "GetTasks", "Open", "Step", "KeepAlive", "Close", "ListSessions"]


def status(call: Any) -> tuple[grpc.StatusCode | None, str]:
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    return None, ""


@pytest.mark.parametrize("token", [None, "", "Bearer wrong", "secret", "Bearer secret2", "bearer secret", "Bearer "])
def test_calls_without_the_token_are_refused(serve: Any, token: str | None) -> None:
    served: Served = serve(token="secret")
    metadata = [] if token is None else [("authorization", token)]
    for method in METHODS:
        call = served.channel.unary_unary(f"/mrlm.remote.v2.EnvironmentService/{method}")
        code, text = status(lambda call=call: call(b"", metadata=metadata, timeout=10))
        assert code is Code.UNAUTHENTICATED
        assert text == "the token is missing or wrong; give it with token_file or in MRLM_TOKEN"
    unknown = served.channel.unary_unary("/mrlm.remote.v2.EnvironmentService/Explode")
    assert status(lambda: unknown(b"", metadata=metadata))[0] is Code.UNAUTHENTICATED
    health = health_pb2_grpc.HealthStub(served.channel)
    assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING


def test_the_token_lets_in(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: Served = serve(token="secret")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("secret\n")
    wrong.write_text("guess\n")
    assert played(RemoteEnvironment(served.target, "scripted", token_file=str(right)), "end").done
    monkeypatch.setenv("MRLM_TOKEN", "secret")
    assert played(RemoteEnvironment(served.target, "scripted"), "end").done
    environment = RemoteEnvironment(served.target, "scripted", token_file=str(wrong))
    with pytest.raises(RemoteError, match=r"UNAUTHENTICATED.*token is missing or wrong"):
        played(environment, "end")
    with pytest.raises(RemoteError, match="token is missing or wrong"):
        _ = environment.agents


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", "", "127.0.0.1.example.org"])
def test_beyond_this_machine_a_token_is_needed(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigurationError, match="MRLM_TOKEN"):
        Endpoint(host)
    with pytest.raises(ConfigurationError, match="MRLM_TOKEN"):
        Endpoint(host, token="")
    assert Endpoint(host, token="secret").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_on_this_machine_none_is_needed(host: str) -> None:
    assert Endpoint(host).token is None


def test_a_server_on_an_ipv6_address(serve: Any) -> None:
    try:
        served: Served = serve(host="::1")
    except ConfigurationError:
        pytest.skip("this machine has no IPv6")
    assert played(RemoteEnvironment(f"[::1]:{served.server.port}", "scripted"), "end").done


def test_a_port_that_is_taken(served: Served, serve: Any) -> None:
    told = rf"port: cannot listen on 127\.0\.0\.1:{served.server.port} .*; is it taken\? Use another$"
    with pytest.raises(ConfigurationError, match=told):
        serve(port=served.server.port)


def test_where_a_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("MRLM_TOKEN", "of the environment")
    assert read_token(None) == "of the environment"
    path = tmp_path / "token"
    path.write_text("of the file\n")
    assert read_token(str(path)) == "of the file"
    path.write_text(" \n")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_token(str(path))
    with pytest.raises(ConfigurationError, match=r"token_file: .*missing.*No such file"):
        read_token(str(tmp_path / "missing"))


@pytest.mark.parametrize("token", ["sécret", "two\nlines", "tab\tbed", "\udc80"])
def test_a_token_that_cannot_be_sent(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_bytes(token.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigurationError, match=r"token_file: .*printable ASCII"):
        read_token(str(path))
    monkeypatch.setenv("MRLM_TOKEN", token)
    with pytest.raises(ConfigurationError, match=r"MRLM_TOKEN: .*printable ASCII"):
        read_token(None)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    pytest.importorskip("cryptography", reason="certificates are made with the cryptography package")
    return Authority(tmp_path, "ours")


def client(served: Served, **keys: Any) -> RemoteEnvironment:
    return RemoteEnvironment(served.target, "scripted", open_seconds=0.2, **keys)


@pytest.mark.timeout(60)  # a repeated call would wait for hours
def test_a_connection_with_tls(serve: Any, authority: Authority) -> None:
    served: Served = serve(identity=Identity(*authority.identity("server")))
    assert played(client(served, tls_authority=authority.file), "end").done
    stranger = Authority(authority.folder, "stranger")
    unknown = RemoteEnvironment(served.target, "scripted", open_seconds=10_000.0, tls_authority=stranger.file)
    with pytest.raises(RemoteError, match=r"CERTIFICATE_VERIFY_FAILED.*give the authority that signed it"):
        played(unknown, "end")  # at once: no repetition changes it
    eventually(lambda: served.live == 0)  # a client does not wait for the end of its session


def test_a_client_whose_key_is_another_s_is_told_so(serve: Any, authority: Authority) -> None:
    served: Served = serve(identity=Identity(*authority.identity("server"), authority.file))
    (certificate, _), (_, key) = authority.identity("client"), authority.identity("other")
    keys = {"tls_authority": authority.file, "tls_certificate": certificate, "tls_key": key}
    with pytest.raises(RemoteError, match="tls_key is not the key of tls_certificate"):
        played(client(served, **keys), "end")


def test_a_damaged_authority_is_no_fault_of_the_key(serve: Any, authority: Authority, tmp_path: Path) -> None:
    served: Served = serve(identity=Identity(*authority.identity("server")))
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(RemoteError, match=r"handshaker.*; a file of tls_... is damaged, or tls_key"):
        played(client(served, tls_authority=str(damaged)), "end")


@pytest.mark.parametrize("wants_theirs", [False, True])
@pytest.mark.timeout(60)  # a repeated call would wait for hours
def test_tls_at_the_server_alone_is_refused_at_once(serve: Any, authority: Authority, wants_theirs: bool) -> None:
    served: Served = serve(identity=Identity(*authority.identity("server"), authority.file if wants_theirs else None))
    with pytest.raises(RemoteError, match=r"UNAVAILABLE.*; the server wants TLS; give tls_authority, and"):
        played(RemoteEnvironment(served.target, "scripted", open_seconds=10_000.0), "end")


@pytest.mark.timeout(60)  # a repeated call would wait for hours
def test_tls_at_the_client_alone_is_refused_at_once(serve: Any, authority: Authority) -> None:
    served: Served = serve()
    alone = RemoteEnvironment(served.target, "scripted", open_seconds=10_000.0, tls_authority=authority.file)
    with pytest.raises(RemoteError, match=r"WRONG_VERSION_NUMBER.*the server has no TLS: leave tls_\.\.\. out"):
        played(alone, "end")


def test_a_web_server_is_no_server_without_tls() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web, ThreadPoolExecutor(1) as pool:
        pool.submit(web.serve_forever)
        other = RemoteEnvironment(f"127.0.0.1:{web.server_port}", "scripted", open_seconds=0.2)
        with pytest.raises(RemoteError) as error:
            played(other, "end")
        web.shutdown()
    assert str(error.value).endswith("; another program listens there: check the address)")


def test_a_server_that_wants_certificates_of_its_clients(serve: Any, authority: Authority) -> None:
    served: Served = serve(identity=Identity(*authority.identity("server"), authority.file))
    certificate, key = authority.identity("client")
    ours = {"tls_authority": authority.file, "tls_certificate": certificate, "tls_key": key}
    assert played(client(served, **ours), "end").done
    with pytest.raises(RemoteError, match=r"UNAVAILABLE.*if the server wants certificates of clients, give tls_certif"):
        played(client(served, tls_authority=authority.file), "end")
    certificate, key = Authority(authority.folder, "stranger").identity("other")
    theirs = {"tls_authority": authority.file, "tls_certificate": certificate, "tls_key": key}
    with pytest.raises(RemoteError, match="UNAVAILABLE"):
        played(client(served, **theirs), "end")
    assert played(client(served, **ours), "end").done


def test_keys_that_cannot_be_used(serve: Any, authority: Authority) -> None:
    certificate, key = authority.identity("server")
    for identity, text in (
        (Identity(certificate), "needs both"),
        (Identity(None, None, authority.file), "needs both"),
        (Identity(certificate, "/nowhere/key"), "tls_key: '/nowhere/key' cannot be read"),
        (Identity(key, certificate), "tls"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            serve(identity=identity)
    with pytest.raises(ConfigurationError, match="tls_authority"):
        played(RemoteEnvironment("127.0.0.1:1", "x", tls_authority="/nowhere/ca"), "end")
    with pytest.raises(ConfigurationError, match="both tls_certificate and tls_key"):
        played(RemoteEnvironment("127.0.0.1:1", "x", tls_certificate=certificate), "end")


def test_a_token_and_tls_together(serve: Any, authority: Authority, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    served: Served = serve(identity=Identity(*authority.identity("server")), token="secret")
    assert played(client(served, tls_authority=authority.file, token_file=str(token)), "end").done
    with pytest.raises(RemoteError, match="UNAUTHENTICATED"):
        played(client(served, tls_authority=authority.file), "end")


def test_nothing_of_a_message_shows_the_token(serve: Any) -> None:
    served: Served = serve(token="very-secret")
    call = served.channel.unary_unary("/mrlm.remote.v2.EnvironmentService/Describe")
    assert "very-secret" not in status(lambda: call(b""))[1]
    with pytest.raises(RemoteError) as error:
        played(RemoteEnvironment(served.target, "scripted"), "end")
    assert "very-secret" not in str(error.value)
