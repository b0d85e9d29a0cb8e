"""Public data sets for tests: the repository's samples, and the whole files if the machine has them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "tests" / "data" / "samples"
WHOLE = Path(os.environ.get("MRLM_TEST_DATA", ROOT.parent / "shared" / "data"))


def files_of(sample: str, whole: str) -> list[Any]:
    """Return parameters for a test of a data set: the sample, and the whole file for the slow tests."""
    path = WHOLE / whole
    absent = pytest.mark.skipif(
        not path.is_file(), reason=f"{whole} is not in {WHOLE}; name its folder: MRLM_TEST_DATA"
    )
    return [
        pytest.param(SAMPLES / f"{sample}.jsonl", id=f"{sample}-sample"),
        pytest.param(path, id=f"{sample}-whole", marks=[pytest.mark.slow, absent]),
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON or JSON-lines file, compressed or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return json.load(file) if path.suffix == ".json" else [json.loads(line) for line in file]
