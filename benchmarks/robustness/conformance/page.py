"""Our losses and advantages, the closed forms and the peers' values on the same vectors: docs/results/conformance.md.

    python -m benchmarks.robustness.conformance.page            # write the page
    python -m benchmarks.robustness.conformance.page --check    # exit status 1 if a value differs or the page is old

The closed forms are the papers' equations term by term in plain Python; the peers' values are those that `peers.py`
found by calling TRL, verl and CoMLRL.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.robustness.conformance import cases, credit
from benchmarks.robustness.conformance.cases import Case, Values

ROOT = Path(__file__).parents[3]
PEERS = ROOT / "benchmarks" / "results" / "conformance_peers.json"
PAGE = ROOT / "docs" / "results" / "conformance.md"
TOLERANCE = 1e-5
CASES = [*cases.CASES, *credit.CASES]

PPO, JOINT = "ppo token_mean", ("tree returns", "crossed decisions", "reinforce")
CRITIC = ("gae", "gae returns", "value clip", PPO)
ALGORITHMS = {
    "GRPO": ("group_normalized", "group_centered", "leave_one_out", "turns unbiased", "turns paper", PPO),
    "RLOO": ("leave_one_out", "reinforce"),
    "REINFORCE": ("rollout mean", "reinforce"),
    "ReMax": ("remax", "reinforce"),
    "REINFORCEPlusPlus": ("reinforce++", PPO),
    "REINFORCEPlusPlusBaseline": ("reinforce++ baseline", PPO),
    "GSPO": ("group_normalized", "gspo"),
    "CISPO": ("group_normalized", "cispo"),
    "GDPO": ("gdpo", PPO),
    "GiGPO": ("group_normalized", "states unbiased", "states paper", PPO),
    "IGPO": ("igpo gains", "turns unbiased", PPO),
    "TreeGRPO": ("tree leaves", "group_normalized", PPO),
    "PPO": CRITIC,
    "IPPO": CRITIC,
    "MAPPO": ("gae of steps", "value clip", PPO),
    "MAPoRL": ("influence", "incentives", *CRITIC),
    "MAREINFORCE": JOINT,
    "MAGRPO": ("joint mean", *JOINT),
    "MARLOO": ("joint leave one out", *JOINT),
    "MAREMAX": ("remax", "joint maximum", *JOINT),
    "COMA": ("coma", "tree returns", "reinforce"),
    "ATGRPO": ("group_normalized", PPO),
    "DrMAS": ("dr.mas", PPO),
    "MGRPO": ("group_normalized", PPO),
    "RAE": ("rae", "reinforce"),
    "C3": ("leave_one_out", "reinforce"),
    "CCPO": ("marginal", "ccpo", PPO),
    "SHARP": ("marginal", "group_normalized", PPO),
    "Shapley": ("shapley", "group_normalized", PPO),
    "OnPolicyDistillation": ("jsd 0.0", "jsd 0.3", "jsd 1.0", "jsd 0.3 top 2"),
    "SFT": ("cross entropy",),
    "DPO": ("dpo", "hinge", "ipo"),
    "SimPO": ("simpo",),
    "ORPO": ("orpo",),
    "KTO": ("kto",),
    "MADPO": ("joint dpo",),
    "CorrectnessModel": ("correctness",),
    "PairwiseRewardModel": ("bradley terry",),
}
"""The formulas that each algorithm consists of."""

HEAD = """\
# Conformance

Losses and advantages equal their paper's equation in plain Python and the peers' own code ({versions}) within 1e-6,
unless the last column has a larger difference or a reason. Losses are reduced by `token_mean` unless the second
column names another reduction. The vectors are in `benchmarks/robustness/conformance/vectors.py`.

```bash
python -m benchmarks.robustness.conformance.page
```

| formula | function | value | peers |
|---|---|---|---|
"""

ALGORITHMS_HEAD = """
## By algorithm

Formulas of each algorithm with its default loss; options such as `loss`, `kl` and `top_entropy` add others.

| algorithm | formulas |
|---|---|
"""


def listed(values: Values) -> list[float]:
    return values if isinstance(values, list) else [values]


def distance(one: Values, other: Values) -> float:
    return max(abs(a - b) for a, b in zip(listed(one), listed(other), strict=True))


def shown(values: Values) -> str:
    return ", ".join(f"{value:.5f}" for value in listed(values))


def row(case: Case, found: dict[str, Values]) -> tuple[str, list[str]]:
    """Return the row of a formula, and the values that differ without a reason.

    Args:
        case: the formula.
        found: the peers' values.
    """
    ours, closed = case.ours(), case.closed()
    far = {peer: value for peer, value in found.items() if distance(ours, value) > TOLERANCE}
    wrong = {} if case.reason else dict(far)
    if distance(ours, closed) > TOLERANCE:
        wrong["closed form"] = closed
    by = ", ".join(f"{peer} ({shown(value)})" if peer in far else peer for peer, value in found.items()) or "-"
    most = max(distance(ours, value) for value in [closed, *found.values()])
    remark = f": {case.reason}" if far else "" if most < 1e-6 else f" (within {TOLERANCE:g})"
    line = f"| {case.name} | {case.symbol} | {shown(ours)} | {by}{remark} |"
    return line, [f"{case.name}: ours {shown(ours)}, {name} {shown(value)}" for name, value in wrong.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    peers = json.loads(PEERS.read_text())
    versions = ", ".join(f"{name} {number}" for name, number in peers["versions"].items())
    rows = [row(case, peers["values"].get(case.name, {})) for case in CASES]
    wrong = [text for _, found in rows for text in found]
    lines = [
        *HEAD.format(versions=versions).splitlines(),
        *(line for line, _ in rows),
        *ALGORITHMS_HEAD.splitlines(),
        *(f"| {name} | {', '.join(formulas)} |" for name, formulas in ALGORITHMS.items()),
    ]
    text = "\n".join(lines) + "\n"
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        wrong.append(f"{PAGE.name} is old: run `python -m benchmarks.robustness.conformance.page`")
    for problem in wrong:
        print(problem)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
