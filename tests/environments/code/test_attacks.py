"""The attack suite through the code environment, one program after the other in the main thread."""

from __future__ import annotations

from pathlib import Path

import pytest
from mrlm_environments.code.environment import CodeEnvironment

from mrlm_pl.environment import Message, Task
from mrlm_pl.sandbox import Sandbox
from tests.support.attacks.bait import Bait
from tests.support.attacks.catalogue import ATTACKS, CALLS, RUN_TWICE


@pytest.mark.slow
def test_no_attack_solves_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRLM_TEST_SECRET", "hush")
    environment = CodeEnvironment(sandbox=Sandbox(wall_seconds=1.0))
    tests = [f"assert add({a}, {b}) == {expected}" for a, b, expected in CALLS]
    data = {"prompt": "add", "given": "", "entry": "add", "tests": tests, "solution": None}
    task = Task("code", "train", 0, 0, data)
    solved = []
    with Bait(tmp_path / "bait") as bait:
        for attack in ATTACKS:
            for _ in range(2 if attack.name in RUN_TWICE else 1):
                environment.begin(task)
                outcome = environment.reply(Message("assistant", bait.program(attack.source)))
                if outcome.success or sum(outcome.components.values()) > 1:
                    solved.append(attack.name)
        harm = bait.harm()
    assert (solved, harm) == ([], [])
