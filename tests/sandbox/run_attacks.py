"""Runs the attack suite in this process and prints what got through, as JSON. For processes of other users and rights.

    python tests/sandbox/run_attacks.py FOLDER [LEVEL]

``FOLDER`` is made; ``LEVEL`` is the strongest one that the machine offers if it is left out. Needs no third package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from attacks import ATTACKS, CALLS, HONEST, RUN_TWICE, SHELL_ATTACKS, Attack  # noqa: E402
from bait import Bait  # noqa: E402

from mrlm_pl.sandbox import Sandbox, Tests, grade  # noqa: E402

WALL_SECONDS = 1.0
WORKERS = 4


def run(folder: Path, sandbox: Sandbox) -> dict[str, Any]:
    """What got through, what harm was done, honest programs that failed, the level, and the longest time."""
    os.environ["MRLM_TEST_SECRET"] = "hush"
    tests = Tests(tuple(f"assert add({a}, {b}) == {expected}" for a, b, expected in CALLS))
    with Bait(folder) as bait:

        def succeeds(attack: Attack) -> tuple[bool, float]:
            source = bait.program(attack.source)
            if attack.shell:
                done = sandbox.shell(source)
                return "SUCCEEDED" in done.output, done.seconds
            graded = [grade(sandbox, source, tests) for _ in range(2 if attack.name in RUN_TWICE else 1)]
            return any(result.solved for result in graded), max(result.seconds for result in graded)

        with ThreadPoolExecutor(WORKERS) as pool:
            hostile = list(pool.map(succeeds, ATTACKS))
            shell = list(pool.map(succeeds, SHELL_ATTACKS))
            honest = list(pool.map(succeeds, HONEST))
        time.sleep(0.2)  # a daemon that had survived would show itself
        harm = bait.harm()
    attacks = (*zip(ATTACKS, hostile, strict=True), *zip(SHELL_ATTACKS, shell, strict=True))
    return {
        "level": sandbox.isolation.title,
        "attacks": len(ATTACKS) + len(SHELL_ATTACKS),
        "through": [attack.name for attack, (succeeded, _) in attacks if succeeded],
        "harm": harm,
        "refused": [attack.name for attack, (succeeded, _) in zip(HONEST, honest, strict=True) if not succeeded],
        "slowest": max(seconds for _, (_, seconds) in attacks),
    }


if __name__ == "__main__":
    levels = dict(zip(("level",), sys.argv[2:3], strict=False))
    print(json.dumps(run(Path(sys.argv[1]), Sandbox(wall_seconds=WALL_SECONDS, **levels))))  # type: ignore[arg-type]
