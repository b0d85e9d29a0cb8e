from __future__ import annotations

from pathlib import Path

import pytest

from mrlm_pl.remote.generate import PROTO, generate

ROOT = Path(__file__).parents[2]
NAMES = ["environment_pb2.py", "environment_pb2.pyi", "environment_pb2_grpc.py"]


def test_the_committed_modules_are_those_of_the_protocol(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    files = generate(ROOT, tmp_path)
    assert [path.name for path in files] == NAMES
    for path in files:
        committed = ROOT / PROTO.replace("environment.proto", path.name)
        assert path.read_text() == committed.read_text(), f"run `python -m mrlm_pl.remote.generate`: {path.name}"


def test_a_protocol_that_is_wrong_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    broken = tmp_path / PROTO
    broken.parent.mkdir(parents=True)
    broken.write_text("message {")
    with pytest.raises(RuntimeError, match="refuses"):
        generate(tmp_path, tmp_path)
