"""What tests of the sandbox share."""

from __future__ import annotations

import pytest

from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import Isolation
from mrlm_pl.sandbox.server_process import server


@pytest.fixture(params=["namespaces", "landlock", "limits"])
def level(request: pytest.FixtureRequest) -> str:
    """Each level that this machine offers."""
    try:
        server(Isolation.of(request.param))
    except SandboxError as refused:
        pytest.skip(str(refused))
    return request.param
