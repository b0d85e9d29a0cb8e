"""Generates modules from the protocols; needs ``grpcio-tools``.

python -m mrlm_pl.serving.transport.generate
"""

from __future__ import annotations

import sys
from pathlib import Path

PROTO = "mrlm_pl/serving/transport/environment.proto"
PROTOS = (PROTO, "mrlm_pl/serving/verifiers/verifier.proto")


def generate(root: Path, output: Path, proto: str = PROTO) -> list[Path]:
    """Return the files written below ``output``, from a protocol below ``root``.

    Compiled from the root of the repository, so that the generated imports are absolute.

    Raises:
        RuntimeError: the compiler refuses the protocol.
    """
    from grpc_tools import protoc

    arguments = ["protoc", f"-I{root}", f"--python_out={output}", f"--pyi_out={output}", f"--grpc_python_out={output}"]
    if protoc.main([*arguments, str(root / proto)]) != 0:
        raise RuntimeError(f"protoc refuses {root / proto}")
    written = output / proto
    return sorted(path for ending in ("py", "pyi") for path in written.parent.glob(f"{written.stem}_pb2*.{ending}"))


if __name__ == "__main__":
    here = Path(__file__).parents[3]
    sys.stdout.writelines(f"{path}\n" for proto in PROTOS for path in generate(here, here, proto))
