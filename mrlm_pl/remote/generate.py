"""Writes the modules generated of the protocol; needs ``grpcio-tools``: ``python -m mrlm_pl.remote.generate``."""

from __future__ import annotations

import sys
from pathlib import Path

PROTO = "mrlm_pl/remote/environment.proto"


def generate(root: Path, output: Path) -> list[Path]:
    """The files written below ``output``, from the protocol below ``root``.

    Compiled from the root of the repository, so that the generated imports are absolute.

    Raises:
        RuntimeError: the compiler refuses the protocol.
    """
    from grpc_tools import protoc

    arguments = ["protoc", f"-I{root}", f"--python_out={output}", f"--pyi_out={output}", f"--grpc_python_out={output}"]
    if protoc.main([*arguments, str(root / PROTO)]) != 0:
        raise RuntimeError(f"protoc refuses {root / PROTO}")
    folder = output / "mrlm_pl" / "remote"
    return sorted([*folder.glob("environment_pb2*.py"), *folder.glob("environment_pb2*.pyi")])


if __name__ == "__main__":
    here = Path(__file__).parents[2]
    sys.stdout.writelines(f"{path}\n" for path in generate(here, here))
