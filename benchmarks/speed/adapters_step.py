"""Compare two agents' adapters on one model with two models, by step time and peak memory, in one run.

    python benchmarks/speed/adapters_step.py [--size s] [--turns 1 3] [--json FILE]
    python benchmarks/speed/adapters_step.py --size 0.5b --device cuda --precision bf16-mixed --group 8 --new-tokens 128

The work is that of ``team_step.py``: MAGRPO, whose turns branch, one task a step. Both sides train the same random
Llama model, each in its own process, in turns; the first two steps are warm-up. Printed are medians and ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from grpo_step import compared, in_turns
from random_models import SIZES, make_model
from team_step import Work, provenance, run_ours


def main() -> None:
    """Run both sides in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="s")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--group", type=int, default=4, help="decisions of each agent in each state")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens per decision")
    parser.add_argument("--states", type=int, default=3, help="in a micro-batch of an update of a tree")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        import torch

        torch.set_num_threads(options.threads)
        (turns,) = options.turns
        work = Work(
            turns, options.steps, "magrpo", options.group, options.new_tokens, "", 1e-5, 0, batch_states=options.states
        )
        rank = options.rank if options.side == "adapters" else None
        found = run_ours(options.folder, work, rank=rank, device=options.device, precision=options.precision)
        print(json.dumps(found))
        return
    folder = tempfile.mkdtemp()
    make_model(Path(folder), options.size, max_position_embeddings=1024)
    names = ("size", "group", "new_tokens", "states", "rank", "precision", "threads", "rounds")
    found = provenance(device=options.device) | {name: getattr(options, name) for name in names} | {"rows": []}
    for turns in options.turns:
        sides = dict.fromkeys(("adapters", "models"), sys.executable)
        reports = in_turns(sides, folder, options.rounds, options.threads, "--turns", str(turns))
        row = compared(reports["adapters"], reports["models"], "models")
        row["adapters"] = row.pop("ours")
        found["rows"].append({"turns": turns, **row})
        print(json.dumps(found["rows"][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
