"""Run the attack suite in this process and print the successful attacks as JSON, for processes of other users.

    python tests/support/attacks/run.py FOLDER [LEVEL]

``FOLDER`` is made; ``LEVEL`` is the strongest one that the machine offers if it is left out. At level ``limits``, which
stops few, the dangerous ones are left out; it is still for a disposable machine. Needs no third package.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # another user runs this file as a script
from mrlm_pl.sandbox import Sandbox, Tests, grade
from mrlm_pl.sandbox import sandbox as sandbox_module
from tests.support.attacks.bait import Bait
from tests.support.attacks.catalogue import ATTACKS, CALLS, DANGEROUS, HONEST, RUN_TWICE, SHELL_ATTACKS, Attack
from tests.support.attacks.resources import ENDLESS

WALL_SECONDS = 1.0
HONEST_SECONDS = 20.0
"""Honest programs get more time on a busy machine: only their score matters."""

WORKERS = 8
"""Concurrent attacks: most long ones only wait, so they share processors."""


@contextmanager
def at_once(count: int) -> Iterator[None]:
    """Let ``count`` programs run concurrently, regardless of the number of processors."""
    slots, sandbox_module._slots = sandbox_module._slots, threading.BoundedSemaphore(count)
    try:
        yield
    finally:
        sandbox_module._slots = slots


def run(folder: Path, sandbox: Sandbox, left_out: Collection[str] = ()) -> dict[str, Any]:
    """Return successful attacks, harm, honest programs that failed, the level, and the longest time.

    Args:
        folder: folder of the bait, created here.
        sandbox: sandbox of the attacks.
        left_out: names of skipped attacks and honest programs.
    """
    os.environ["MRLM_TEST_SECRET"] = "hush"
    tests = Tests(tuple(f"assert add({a}, {b}) == {expected}" for a, b, expected in CALLS))
    hostile = [attack for attack in (*ATTACKS, *SHELL_ATTACKS) if attack.name not in left_out]
    hostile.sort(key=lambda attack: attack.name not in ENDLESS)  # the longest ones first
    honest = [program for program in HONEST if program.name not in left_out]
    with Bait(folder) as bait:

        def succeeds(attack: Attack) -> tuple[bool, float]:
            source = bait.program(attack.source)
            if attack.shell:
                done = sandbox.shell(source)
                return "SUCCEEDED" in done.output, done.seconds
            graded = [grade(sandbox, source, tests) for _ in range(2 if attack.name in RUN_TWICE else 1)]
            return any(result.solved for result in graded), max(result.seconds for result in graded)

        with ThreadPoolExecutor(WORKERS) as pool:
            with at_once(WORKERS):
                attacked = list(pool.map(succeeds, hostile))
            sandbox = replace(sandbox, wall_seconds=HONEST_SECONDS)
            answered = list(pool.map(succeeds, honest))
        time.sleep(0.2)  # a surviving daemon shows itself
        harm = bait.harm()
    through = [attack for attack, (succeeded, _) in zip(hostile, attacked, strict=True) if succeeded]
    tried, won = (Counter(attack.kind for attack in attacks) for attacks in (hostile, through))
    return {
        "level": sandbox.isolation,
        "attacks": len(hostile),
        "through": [attack.name for attack in through],
        "through_by_kind": {kind: [won[kind], tried[kind]] for kind in tried},
        "harm": harm,
        "refused": [program.name for program, (full, _) in zip(honest, answered, strict=True) if not full],
        "slowest": max(seconds for _, seconds in attacked),
    }


if __name__ == "__main__":
    level = dict(zip(("level",), sys.argv[2:3], strict=False))
    chosen = Sandbox(wall_seconds=WALL_SECONDS, **level)  # type: ignore[arg-type]
    weak = chosen.isolation == "limits"
    print(json.dumps(run(Path(sys.argv[1]), chosen, DANGEROUS if weak else ())))
