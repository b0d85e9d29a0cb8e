"""Losses, divergences and preferences: our functions and the papers' equations term by term in plain Python."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.robustness.conformance import vectors as v
from mrlm_pl import losses
from mrlm_pl.losses import Clip, Reduction
from mrlm_pl.policy.forward.divergence import weighted_divergence

Values = float | list[float]


@dataclass(frozen=True)
class Case:
    """One formula.

    Args:
        name: name of the case in the peers' file.
        symbol: public function or option.
        ours: returns this project's values.
        closed: returns the values by the paper's equation.
        reason: reason why a peer differs, where one does.
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


def moved(row: int, token: int) -> float:
    return v.LOGP[row][token] - v.REF[row][token]


def divergence_mean(estimate: Callable[..., Tensor]) -> Callable[[], Values]:
    return lambda: losses.reduce_tokens(estimate(table(v.LOGP), table(v.REF), MASK), MASK, "token_mean").item()


def gradient_of(estimate: Callable[..., Tensor]) -> Callable[[], Values]:
    def value() -> list[float]:
        logp = table(v.LOGP).requires_grad_()
        (found,) = torch.autograd.grad(estimate(logp, table(v.REF), MASK).sum(), logp)
        return found[0].tolist()

    return value


def value_error(row: int, token: int) -> float:
    new, old, target = (of[row][token] for of in (v.NEW_VALUES, v.VALUES, v.TOKEN_REWARDS))
    clipped = min(max(new, old - 0.2), old + 0.2)
    return 0.5 * max((new - target) ** 2, (clipped - target) ** 2)


def beside(threshold: float, entropies: list[float]) -> list[float]:
    """Return the least entropy that reaches a threshold, and the highest other one."""
    return [min(x for x in entropies if x >= threshold), max(x for x in entropies if x < threshold)]


def top_entropy() -> list[float]:
    """Return those beside the .8 quantile of 14 numbers, which lies between the eleventh and the twelfth."""
    found = sorted(v.ENTROPIES[row][token] for row, length in ROWS for token in range(length))
    place = 0.8 * (len(found) - 1)
    low = int(place)
    return beside(found[low] + (place - low) * (found[low + 1] - found[low]), found)


def our_top_entropy() -> list[float]:
    entropies = table(v.ENTROPIES)[MASK]
    return beside(losses.top_entropy_threshold(entropies, 0.2), entropies.tolist())


def our_entropy_weights() -> list[float]:
    settings, coefficient, weights = losses.Entropy(target=0.5, delta=0.01), 0.0, []
    for entropy in (0.4, 0.3, 0.6, 0.4):
        coefficient, weight = settings.adapted(coefficient, entropy)
        weights.append(weight)
    return weights


def our_joint_dpo() -> list[float]:
    """Return the loss of two joint actions, each of two agents."""
    pairs = torch.tensor([0, 0, 1, 1])
    sums = [losses.joint_logp(table(of), pairs, 2) for of in (v.CHOSEN, v.REJECTED, v.REF_CHOSEN, v.REF_REJECTED)]
    return losses.dpo_sigmoid_loss(losses.preference_gap(*sums), beta=0.1).tolist()


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
            functools.partial(divergence, beta),
        )
        for beta in (0.0, 0.3, 1.0)
    ),
    Case(
        "jsd 0.3 top 2",
        "`weighted_divergence`, beta 0.3, top_k 2",
        our_divergence(0.3, 2),
        lambda: divergence(0.3, 2),
    ),
    Case(
        "reinforce",
        "`policy_gradient_loss`",
        reduced(lambda logp, old, advantages, mask: losses.policy_gradient_loss(logp, advantages, mask)),
        lambda: token_mean(lambda row, token: -v.ADVANTAGES[row] * v.LOGP[row][token]),
    ),
    Case("kl k1", "`kl_k1`", divergence_mean(losses.kl_k1), lambda: token_mean(moved)),
    Case("kl k2", "`kl_k2`", divergence_mean(losses.kl_k2), lambda: token_mean(lambda row, t: moved(row, t) ** 2 / 2)),
    Case(
        "kl k3 straight through, gradient",
        "`kl_k3_straight_through`",
        gradient_of(losses.kl_k3_straight_through),
        lambda: [moved(0, token) for token in range(5)],
    ),
    Case(
        "value clip",
        "`value_loss`",
        lambda: losses.reduce_tokens(
            losses.value_loss(table(v.NEW_VALUES), table(v.VALUES), table(v.TOKEN_REWARDS), MASK, clip=0.2),
            MASK,
            "token_mean",
        ).item(),
        lambda: token_mean(value_error),
    ),
    Case(
        "cross entropy",
        "`cross_entropy_loss`",
        lambda: losses.reduce_tokens(losses.cross_entropy_loss(table(v.LOGP), MASK), MASK, "token_mean").item(),
        lambda: token_mean(lambda row, token: -v.LOGP[row][token]),
    ),
    Case(
        "top entropy",
        "`top_entropy_threshold`",
        our_top_entropy,
        top_entropy,
    ),
    Case("entropy target", "`Entropy.adapted`", our_entropy_weights, lambda: [0.01, 0.02, 0.0, 0.02]),
    Case(
        "correction truncated",
        "`Correction`, `truncated`",
        lambda: losses.Correction("truncated", cap=1.2).weights(table(v.LOGP), table(v.OLD), MASK)[0].tolist(),
        lambda: [min(ratio(0, token), 1.2) for token in range(5)],
    ),
    Case(
        "correction masked",
        "`Correction`, `masked`",
        lambda: losses.Correction("masked", low=0.5, high=2.0).weights(table(v.LOGP), table(v.OLD), MASK)[0].tolist(),
        lambda: [r if 0.5 <= r <= 2 else 0.0 for r in (ratio(0, token) for token in range(5))],
    ),
    Case(
        "hinge",
        "`dpo_hinge_loss`",
        gap_loss(losses.dpo_hinge_loss, beta=0.1),
        lambda: [max(0.0, 1 - 0.1 * gap) for gap in gaps()],
    ),
    Case(
        "joint dpo",
        "`joint_logp`, `dpo_sigmoid_loss`",
        our_joint_dpo,
        lambda: [softplus(-0.1 * (gaps()[one] + gaps()[other])) for one, other in ((0, 1), (2, 3))],
    ),
    Case(
        "bradley terry",
        "`bradley_terry_loss`",
        lambda: losses.bradley_terry_loss(table(v.CHOSEN), table(v.REJECTED)).tolist(),
        lambda: [softplus(-(chosen - rejected)) for chosen, rejected in zip(v.CHOSEN, v.REJECTED, strict=True)],
    ),
    Case(
        "correctness",
        "`correctness_loss`",
        lambda: losses.correctness_loss(table(v.CHOSEN)[:, None], table(v.LABELS), torch.ones(4, 1, dtype=torch.bool))[
            :, 0
        ].tolist(),
        lambda: [softplus(-x if label else x) for x, label in zip(v.CHOSEN, v.LABELS, strict=True)],
    ),
]
