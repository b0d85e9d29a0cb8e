"""Fixtures of the tests of the sandbox."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox.host.server_process import server

NOBODY = 65534


@pytest.fixture(params=["namespaces", "landlock", "limits"])
def level(request: pytest.FixtureRequest) -> str:
    """Each level that this machine offers."""
    try:
        server(request.param)
    except SandboxError as refused:
        pytest.skip(str(refused))
    return request.param


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of an ordinary user, even if the tests run as root, whom no mode stops."""
    place = Path(tempfile.mkdtemp(prefix="mrlm-removal-"))
    place.chmod(0o777)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        (place / "tree").mkdir()
        yield place / "tree"
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(place)
