"""Our losses and advantages, the closed forms and the peers' values on the same vectors: docs/conformance.md.

    python -m benchmarks.robustness.conformance.page            # write the page
    python -m benchmarks.robustness.conformance.page --check    # exit status 1 if a value differs or the page is old

The closed forms are the papers' equations term by term in plain Python; the peers' values are those that `peers.py`
found by calling TRL and verl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.robustness.conformance import vectors as v
from mrlm_pl import advantages as adv
from mrlm_pl import losses
from mrlm_pl.losses import Clip, Reduction
from mrlm_pl.policy.forward.divergence import weighted_divergence
from mrlm_pl.rewards import information_gains

ROOT = Path(__file__).parents[3]
PEERS = ROOT / "benchmarks" / "results" / "conformance_peers.json"
PAGE = ROOT / "docs" / "conformance.md"
TOLERANCE = 1e-5

HEAD = """\
# Conformance

Each loss and advantage on the same fixed vectors (`benchmarks/robustness/conformance/vectors.py`): our value, the
paper's equation in plain Python, and the value that the peers' own code returns ({versions}). Losses are reduced as the
second column says, by `token_mean` otherwise. Values agree within {tolerance:g}, or the last column has the reason.

    python -m benchmarks.robustness.conformance.page

| formula | function | ours | closed form | peers | difference |
|---|---|---|---|---|---|
"""

Values = float | list[float]


@dataclass(frozen=True)
class Case:
    """One formula.

    Args:
        name: as in the peers' file.
        symbol: the public function or option.
        ours: its value.
        closed: the same by the paper's equation.
        reason: why a peer differs, where one does.
    """

    name: str
    symbol: str
    ours: Callable[[], Values]
    closed: Callable[[], Values]
    reason: str = ""


def table(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


MASK = torch.arange(5)[None] < torch.tensor(v.LENGTHS)[:, None]
ROWS = [(row, length) for row, length in enumerate(v.LENGTHS)]


def ratio(row: int, token: int) -> float:
    return math.exp(v.LOGP[row][token] - v.OLD[row][token])


def sequence_ratio(row: int) -> float:
    return math.exp(sum(v.LOGP[row][t] - v.OLD[row][t] for t in range(v.LENGTHS[row])) / v.LENGTHS[row])


def surrogate(rho: float, advantage: float, low: float, high: float) -> float:
    return -min(rho * advantage, min(max(rho, 1 - low), 1 + high) * advantage)


def token_mean(loss: Callable[[int, int], float]) -> float:
    return sum(loss(row, token) for row, length in ROWS for token in range(length)) / sum(v.LENGTHS)


def sequence_mean(loss: Callable[[int, int], float]) -> float:
    return sum(sum(loss(row, token) for token in range(length)) / length for row, length in ROWS) / len(ROWS)


def sequence_sum(loss: Callable[[int, int], float]) -> float:
    return sum(loss(row, token) for row, length in ROWS for token in range(length)) / len(ROWS)


def reduced(
    loss: Callable[..., Tensor], reduction: Reduction = "token_mean", *options: Any, **named: Any
) -> Callable[[], Values]:
    def value() -> float:
        spread = table(v.ADVANTAGES)[:, None].expand(4, 5)
        found = loss(table(v.LOGP), table(v.OLD), spread, MASK, *options, **named)
        length = v.MAX_LENGTH if reduction == "constant_length" else None
        return losses.reduce_tokens(found, MASK, reduction, max_length=length).item()

    return value


def ppo(row: int, token: int, low: float = 0.2, high: float = 0.2) -> float:
    return surrogate(ratio(row, token), v.ADVANTAGES[row], low, high)


def dual(row: int, token: int) -> float:
    advantage = v.ADVANTAGES[row]
    return ppo(row, token) if advantage >= 0 else min(ppo(row, token), -1.5 * advantage)


def sapo(row: int, token: int) -> float:
    advantage = v.ADVANTAGES[row]
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (ratio(row, token) - 1))) * advantage


def vespo(row: int, token: int) -> float:
    k, scale = (2, 3) if v.ADVANTAGES[row] >= 0 else (3, 2)
    weight = math.prod(ratio(row, t) for t in range(v.LENGTHS[row]))
    return -math.exp(scale) * weight**k * math.exp(-scale * weight) * v.ADVANTAGES[row] * v.LOGP[row][token]


def gmpo(row: int, token: int) -> float:
    advantage, found = v.ADVANTAGES[row], 0.0
    for t in range(v.LENGTHS[row]):
        log_ratio = v.LOGP[row][t] - v.OLD[row][t]
        found += min(log_ratio, 0.4) if advantage > 0 else max(log_ratio, -0.4)
    return -advantage * math.exp(found / v.LENGTHS[row])


def dppo(row: int, token: int) -> float:
    advantage, new, old = v.ADVANTAGES[row], v.LOGP[row][token], v.OLD[row][token]
    moved = math.exp(new) - math.exp(old)
    return -ratio(row, token) * advantage * new if (moved <= 0.15 if advantage > 0 else moved >= -0.1) else 0.0


def on_policy(row: int) -> bool:
    mean = sum(v.OLD[row][t] - v.LOGP[row][t] for t in range(v.LENGTHS[row])) / v.LENGTHS[row]
    return v.ADVANTAGES[row] >= 0 or mean <= 0.3


def masked_ppo(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    kept = losses.off_policy_sequence_mask(logp, old, advantages, mask, 0.3)
    return losses.ppo_clip_loss(logp, old, advantages, kept)


def penalized(estimate: Callable[..., Tensor], *more: Any) -> Callable[..., Tensor]:
    def loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        others = [old] * len(more)
        penalty = estimate(logp, table(v.REF), *others, mask)
        return losses.ppo_clip_loss(logp, old, advantages, mask) + 0.1 * penalty

    return loss


def k3(row: int, token: int) -> float:
    d = v.LOGP[row][token] - v.REF[row][token]
    return math.exp(-d) + d - 1


def by_group(formula: Callable[[float, list[float]], float], rewards: Sequence[float] = v.REWARDS) -> list[float]:
    members = [[r for r, g in zip(rewards, v.GROUPS, strict=True) if g == group] for group in v.GROUPS]
    return [formula(reward, group) for reward, group in zip(rewards, members, strict=True)]


def normalized(reward: float, group: list[float]) -> float:
    mean = sum(group) / len(group)
    return (reward - mean) / (math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1)) + 1e-6)


def gdpo() -> list[float]:
    parts = [by_group(normalized, [row[place] for row in v.COMPONENTS]) for place in range(2)]
    totals = [one + 0.5 * other for one, other in zip(*parts, strict=True)]
    tokens = [total for total, length in zip(totals, v.LENGTHS, strict=True) for _ in range(length)]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1))
    return [(total - mean) / (deviation + 1e-8) for total in totals]


def our_gdpo() -> list[float]:
    found = adv.component_normalized_advantages(table(v.COMPONENTS), torch.tensor(v.GROUPS), [1.0, 0.5])
    spread = found[:, None].expand(4, 5)
    return adv.whiten(spread, MASK, adv.masked_moments(spread, MASK))[:, 0].tolist()


def grouped(function: Callable[..., Tensor]) -> Callable[[], Values]:
    return lambda: function(table(v.REWARDS), torch.tensor(v.GROUPS)).tolist()


def worth(members: frozenset[str]) -> float:
    """Return the value of a coalition: the rewards of a, b and c, and another one of a and c together."""
    return sum(v.REWARDS["abc".index(agent)] for agent in members) + v.REWARDS[3] * ({"a", "c"} <= members)


def shapley() -> list[float]:
    """Return what each agent adds to those before it, as a mean over all orders."""
    orders = list(itertools.permutations("abc"))
    gains = [
        [
            worth(frozenset(order[: order.index(agent) + 1])) - worth(frozenset(order[: order.index(agent)]))
            for order in orders
        ]
        for agent in "abc"
    ]
    return [sum(found) / len(orders) for found in gains]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def gaps() -> list[float]:
    pairs = zip(v.CHOSEN, v.REJECTED, v.REF_CHOSEN, v.REF_REJECTED, strict=True)
    return [(chosen - ref_chosen) - (rejected - ref_rejected) for chosen, rejected, ref_chosen, ref_rejected in pairs]


def simpo() -> list[float]:
    return [softplus(-(2 * (c - r) - 1)) for c, r in zip(v.MEAN_CHOSEN, v.MEAN_REJECTED, strict=True)]


def orpo() -> list[float]:
    found = []
    for chosen, rejected in zip(v.MEAN_CHOSEN, v.MEAN_REJECTED, strict=True):
        odds = [math.exp(x) / (1 - math.exp(x)) for x in (chosen, rejected)]
        found.append(-chosen - 0.1 * math.log(1 / (1 + odds[1] / odds[0])))
    return found


def kto() -> list[float]:
    signs = [1 if label else -1 for label in v.LABELS]
    differences = [one - other for one, other in zip(v.CHOSEN, v.REF_CHOSEN, strict=True)]
    return [1 - 1 / (1 + math.exp(-s * 0.1 * (h - v.DIVERGENCE))) for s, h in zip(signs, differences, strict=True)]


def probabilities(logits: list[float]) -> list[float]:
    return [math.exp(x) / sum(map(math.exp, logits)) for x in logits]


def divergence(beta: float, top_k: int = 4) -> list[float]:
    found = []
    for student, teacher in zip(v.STUDENT, v.TEACHER, strict=True):
        q, p = probabilities(student), probabilities(teacher)
        if top_k < len(p):
            kept = sorted(range(len(p)), key=lambda token: -p[token])[:top_k]
            p, q = ([of[token] for token in kept] + [1 - sum(of[token] for token in kept)] for of in (p, q))
        if beta in (0.0, 1.0):
            of, other = (p, q) if beta == 0.0 else (q, p)
            found.append(sum(a * math.log(a / b) for a, b in zip(of, other, strict=True)))
            continue
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        parts = [sum(a * math.log(a / b) for a, b in zip(of, m, strict=True)) for of in (p, q)]
        found.append(beta * parts[0] + (1 - beta) * parts[1])
    return found


def our_divergence(beta: float, top_k: int | None = None) -> Callable[[], Values]:
    head = torch.eye(4, dtype=torch.float64)
    return lambda: weighted_divergence(
        table(v.STUDENT), head, table(v.TEACHER), head, torch.ones(2, dtype=torch.float64), beta=beta, top_k=top_k
    )[1].tolist()


def gap_loss(function: Callable[..., Tensor], **options: float) -> Callable[[], Values]:
    return lambda: function(table(gaps()), **options).tolist()


LEAF_TURNS = [(leaf, step) for leaf in range(4) for step in range(2)]


def leaf_turn(leaf: int, step: int) -> float:
    others = [reward for reward, common in zip(v.REWARDS, v.COMMON[leaf], strict=True) if common <= step]
    return v.REWARDS[leaf] - sum(others) / len(others)


CASES = [
    Case("ppo token_mean", "`ppo_clip_loss`", reduced(losses.ppo_clip_loss), lambda: token_mean(ppo)),
    Case(
        "ppo sequence_mean",
        "`ppo_clip_loss`, `sequence_mean`",
        reduced(losses.ppo_clip_loss, "sequence_mean"),
        lambda: sequence_mean(ppo),
    ),
    Case(
        "ppo constant_length",
        "`ppo_clip_loss`, `constant_length`",
        reduced(losses.ppo_clip_loss, "constant_length"),
        lambda: sequence_sum(ppo) / v.MAX_LENGTH,
    ),
    Case(
        "ppo clip higher",
        "`Clip(high=0.28)`",
        reduced(losses.ppo_clip_loss, "token_mean", Clip(0.2, 0.28)),
        lambda: token_mean(lambda row, token: ppo(row, token, 0.2, 0.28)),
    ),
    Case(
        "ppo dual clip",
        "`Clip(dual=1.5)`",
        reduced(losses.ppo_clip_loss, "token_mean", Clip(dual=1.5)),
        lambda: token_mean(dual),
    ),
    Case(
        "gspo",
        "`gspo_loss`, `sequence_mean`",
        reduced(losses.gspo_loss, "sequence_mean", Clip(0.1, 0.15)),
        lambda: sequence_mean(lambda row, token: surrogate(sequence_ratio(row), v.ADVANTAGES[row], 0.1, 0.15)),
    ),
    Case(
        "luspo",
        "`gspo_loss`, `sequence_sum`",
        reduced(losses.gspo_loss, "sequence_sum", Clip(0.1, 0.15)),
        lambda: sequence_sum(lambda row, token: surrogate(sequence_ratio(row), v.ADVANTAGES[row], 0.1, 0.15)),
    ),
    Case(
        "cispo",
        "`cispo_loss`",
        reduced(losses.cispo_loss, "token_mean", Clip(1.0, 0.3)),
        lambda: token_mean(lambda row, token: -min(ratio(row, token), 1.3) * v.ADVANTAGES[row] * v.LOGP[row][token]),
    ),
    Case(
        "sapo", "`sapo_loss`, `sequence_mean`", reduced(losses.sapo_loss, "sequence_mean"), lambda: sequence_mean(sapo)
    ),
    Case("vespo", "`vespo_loss`", reduced(losses.vespo_loss), lambda: token_mean(vespo)),
    Case(
        "gmpo", "`gmpo_loss`, `sequence_mean`", reduced(losses.gmpo_loss, "sequence_mean"), lambda: sequence_mean(gmpo)
    ),
    Case("dppo", "`dppo_loss`", reduced(losses.dppo_loss, "token_mean", Clip(0.1, 0.15)), lambda: token_mean(dppo)),
    Case(
        "off-policy mask",
        "`off_policy_sequence_mask`",
        reduced(masked_ppo),
        lambda: token_mean(lambda row, token: ppo(row, token) * on_policy(row)),
    ),
    Case(
        "kl k3",
        "`kl_k3`",
        reduced(penalized(losses.kl_k3)),
        lambda: token_mean(lambda row, token: ppo(row, token) + 0.1 * k3(row, token)),
    ),
    Case(
        "kl k3 importance weighted",
        "`kl_k3_importance_weighted`",
        reduced(penalized(losses.kl_k3_importance_weighted, "old")),
        lambda: token_mean(lambda row, token: ppo(row, token) + 0.1 * ratio(row, token) * k3(row, token)),
    ),
    Case(
        "group_normalized",
        "`group_normalized_advantages`",
        grouped(adv.group_normalized_advantages),
        lambda: by_group(normalized),
    ),
    Case(
        "group_centered",
        "`group_centered_advantages`",
        grouped(adv.group_centered_advantages),
        lambda: by_group(lambda reward, group: reward - sum(group) / len(group)),
    ),
    Case(
        "leave_one_out",
        "`leave_one_out_advantages`",
        grouped(adv.leave_one_out_advantages),
        lambda: by_group(lambda reward, group: reward - (sum(group) - reward) / (len(group) - 1)),
    ),
    Case(
        "tree leaves",
        "`leaf_advantages`",
        lambda: adv.leaf_advantages(table(v.REWARDS), torch.tensor(v.COMMON), *torch.tensor(LEAF_TURNS).T).tolist(),
        lambda: [leaf_turn(leaf, step) for leaf, step in LEAF_TURNS],
    ),
    Case("gdpo", "`component_normalized_advantages`, `whiten`", our_gdpo, gdpo),
    Case("shapley", "`shapley_values`", lambda: list(adv.shapley_values("abc", worth).values()), shapley),
    Case(
        "ccpo",
        "`history_normalized_advantages`",
        lambda: adv.history_normalized_advantages(
            table(v.REWARDS), "aabb", {"a": adv.Moments(3, 1.0, 8.0), "b": adv.Moments(2, 0.5, 0.25)}
        ).tolist(),
        lambda: [
            (reward - mean) / (deviation + 1e-6)
            for reward, mean, deviation in zip(v.REWARDS, [1, 1, 0.5, 0.5], [2, 2, 0.5, 0.5], strict=True)
        ],
    ),
    Case(
        "igpo gains",
        "`information_gains`",
        lambda: information_gains(table(v.REWARDS), torch.tensor(v.GROUPS)).tolist(),
        lambda: [v.REWARDS[1] - v.REWARDS[0], 0.0, v.REWARDS[3] - v.REWARDS[2], 0.0],
    ),
    Case(
        "dpo",
        "`DPO`, `dpo_sigmoid_loss`",
        gap_loss(losses.dpo_sigmoid_loss, beta=0.1),
        lambda: [softplus(-0.1 * gap) for gap in gaps()],
    ),
    Case(
        "ipo",
        "`ipo_loss`",
        gap_loss(losses.ipo_loss, beta=0.1),
        lambda: [(gap - 5) ** 2 for gap in gaps()],
    ),
    Case(
        "simpo",
        "`SimPO`, `simpo_loss`",
        lambda: losses.simpo_loss(table(v.MEAN_CHOSEN) - table(v.MEAN_REJECTED)).tolist(),
        simpo,
    ),
    Case(
        "orpo",
        "`ORPO`, `orpo_loss`",
        lambda: losses.orpo_loss(table(v.MEAN_CHOSEN), table(v.MEAN_REJECTED)).tolist(),
        orpo,
    ),
    Case(
        "kto",
        "`KTO`, `kto_loss`",
        lambda: losses.kto_loss(
            table(v.CHOSEN) - table(v.REF_CHOSEN), torch.tensor(v.LABELS), torch.tensor(v.DIVERGENCE)
        ).tolist(),
        kto,
    ),
    *(
        Case(
            f"jsd {beta}",
            f"`weighted_divergence`, beta {beta}",
            our_divergence(beta),
            lambda beta=beta: divergence(beta),
        )
        for beta in (0.0, 0.3, 1.0)
    ),
    Case(
        "jsd 0.3 top 2",
        "`weighted_divergence`, beta 0.3, top_k 2",
        our_divergence(0.3, 2),
        lambda: divergence(0.3, 2),
    ),
]


def listed(values: Values) -> list[float]:
    return values if isinstance(values, list) else [values]


def distance(one: Values, other: Values) -> float:
    return max(abs(a - b) for a, b in zip(listed(one), listed(other), strict=True))


def shown(values: Values) -> str:
    return ", ".join(f"{value:.5f}" for value in listed(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    peers = json.loads(PEERS.read_text())
    versions = ", ".join(f"{name} {number}" for name, number in peers["versions"].items())
    lines = HEAD.format(versions=versions, tolerance=TOLERANCE).splitlines()
    wrong = []
    for case in CASES:
        ours, closed, found = case.ours(), case.closed(), peers["values"].get(case.name, {})
        if distance(ours, closed) > TOLERANCE:
            wrong.append(f"{case.name}: ours {shown(ours)}, closed form {shown(closed)}")
        far = {peer: value for peer, value in found.items() if distance(ours, value) > TOLERANCE}
        if far and not case.reason:
            wrong += [f"{case.name}: ours {shown(ours)}, {peer} {shown(value)}" for peer, value in far.items()]
        by = "; ".join(f"{peer} {shown(value)}" for peer, value in found.items()) or "-"
        most = max(distance(ours, value) for value in [closed, *found.values()])
        remark = case.reason if far else "< 1e-6" if most < 1e-6 else "< 1e-5"
        lines.append(f"| {case.name} | {case.symbol} | {shown(ours)} | {shown(closed)} | {by} | {remark} |")
    for text in wrong:
        print(text)
    text = "\n".join(lines) + "\n"
    if parser.parse_args().check:
        if PAGE.read_text() != text:
            wrong.append(f"{PAGE.name} is old: run `python -m benchmarks.robustness.conformance.page`")
            print(wrong[-1])
    else:
        PAGE.write_text(text)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
