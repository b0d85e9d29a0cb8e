"""Run the attack suite of the sandbox at each isolation level of this machine and count the successful attacks.

    python -m benchmarks.robustness.attacks [--levels namespaces landlock] [--json benchmarks/results/attacks.json]

Exit status 1 if an attack succeeds, something outside is harmed, or an honest program loses its score.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.provenance import provenance
from mrlm_pl.sandbox import Sandbox
from tests.support.attacks.catalogue import HONEST
from tests.support.attacks.run import WALL_SECONDS, run


def main() -> None:
    """Attack every level and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=["namespaces", "landlock"], default=["namespaces", "landlock"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    levels = {}
    for level in options.levels:
        with tempfile.TemporaryDirectory() as work:
            found = run(Path(work) / "bait", Sandbox(level=level, wall_seconds=WALL_SECONDS))
        levels[level] = {
            "attacks": found["attacks"],
            "through": len(found["through"]),
            "harm": len(found["harm"]),
            "honest": len(HONEST),
            "honest_with_full_score": len(HONEST) - len(found["refused"]),
            "kinds": {
                kind: {"through": won, "attacks": tried} for kind, (won, tried) in found["through_by_kind"].items()
            },
        }
        print(json.dumps({level: levels[level], "through": found["through"], "harm": found["harm"]}), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**provenance(), "levels": levels}, indent=1) + "\n")
    if any(row["through"] or row["harm"] or row["honest"] != row["honest_with_full_score"] for row in levels.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
