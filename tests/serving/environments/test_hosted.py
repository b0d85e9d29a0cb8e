from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from mrlm_pl.environment import Environment
from mrlm_pl.serving.environments.hosted import Offer
from tests.support.servers.environment_servers import eventually


def test_callers_who_wait_for_an_environment_that_cannot_be_made_share_its_error() -> None:
    attempts = []

    def make(settings: Mapping[str, Any]) -> Environment:
        attempts.append(settings)
        (making,) = offer._variants.values()
        eventually(lambda: len(making._condition._waiters) == 3)  # all other callers
        raise ValueError("no data")

    offer, together = Offer({"slow": make}, 0, 10.0), Barrier(4)

    def ask() -> None:
        together.wait()
        with pytest.raises(ValueError, match="no data"):
            offer.template("slow", {})

    with ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(ask) for _ in range(4)]:
            call.result()
    assert len(attempts) == 1
