from __future__ import annotations

from pathlib import Path

import pytest

from mrlm_pl.serving.transport.generate import PROTO, PROTOS, generate

ROOT = Path(__file__).parents[3]
ENDINGS = ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"]


@pytest.mark.parametrize("proto", PROTOS)
def test_the_committed_modules_are_those_of_the_protocol(proto: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    files = generate(ROOT, tmp_path, proto)
    assert [path.name for path in files] == [Path(proto).stem + ending for ending in ENDINGS]
    for path in files:
        committed = (ROOT / proto).parent / path.name
        assert path.read_text() == committed.read_text(), (
            f"run `python -m mrlm_pl.serving.transport.generate`: {path.name}"
        )


def test_a_protocol_that_is_wrong_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    broken = tmp_path / PROTO
    broken.parent.mkdir(parents=True)
    broken.write_text("message {")
    with pytest.raises(RuntimeError, match="refuses"):
        generate(tmp_path, tmp_path)
