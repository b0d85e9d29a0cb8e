from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = "python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. mrlm_pl/serving/*/*.proto"


def test_the_committed_modules_are_those_of_the_protocols(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    monkeypatch.chdir(ROOT)
    protos = [str(path.relative_to(ROOT)) for path in ROOT.glob("mrlm_pl/serving/*/*.proto")]
    arguments = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    assert protoc.main(["protoc", "-I.", *arguments, *protos]) == 0
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*"))
    assert len(made) == 3 * len(protos) == 6
    for path in made:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"run `{COMMAND}`: {path}"
