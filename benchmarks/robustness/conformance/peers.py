"""The peers' values on the vectors of `vectors.py`, by calling their own code: TRL, verl and CoMLRL.

Each command adds the values of the peers in its environment to benchmarks/results/conformance_peers.json:

.venv-peers/bin/python benchmarks/robustness/conformance/peers.py          # TRL, verl
.venv-peers-multi/bin/python benchmarks/robustness/conformance/peers.py    # CoMLRL
"""

from __future__ import annotations

import contextlib
import json
import types
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch
import vectors as v

RESULTS = Path(__file__).parents[2] / "results" / "conformance_peers.json"
SCRIPT = "benchmarks/robustness/conformance/peers.py"
COMMAND = f".venv-peers/bin/python {SCRIPT} && .venv-peers-multi/bin/python {SCRIPT}"
MASK = torch.arange(5)[None] < torch.tensor(v.LENGTHS)[:, None]


def table(numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class Options(dict[str, Any]):
    """Settings by attribute and by key."""

    __getattr__ = dict.__getitem__


def trl_policy_loss(loss_type: str, **options: Any) -> float:
    """The loss of a GRPO trainer that is handed its log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer: Any = object.__new__(GRPOTrainer)
    args = Options(
        delta=options.pop("delta", None),
        use_bias_correction_kl=options.pop("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    settings: dict[str, Any] = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "use_adaptive_entropy": False,
        "_entropy_bonus_enabled": False,
        "max_completion_length": v.MAX_LENGTH,
        "current_gradient_accumulation_steps": 1,
    }
    vars(trainer).update(settings | options)
    trainer.args, trainer.loss_type = args, loss_type
    trainer.model = types.SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator = types.SimpleNamespace(
        num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (table(v.LOGP), torch.zeros(4, 5), None)
    ids = torch.zeros(4, 5, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": MASK.long(),
        "advantages": table(v.ADVANTAGES),
        "old_per_token_logps": table(v.OLD),
        "ref_per_token_logps": table(v.REF),
        "num_items_in_batch": MASK.sum(),
    }
    return float(trainer._compute_loss(None, inputs))


def verl_policy_loss(name: str, aggregation: str, **options: Any) -> float:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    settings = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 20.0}
    config: Any = object.__new__(ActorConfig)
    for key, value in (settings | {"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}} | options).items():
        object.__setattr__(config, key, value)
    advantages = table(v.ADVANTAGES)[:, None].expand(4, 5)
    loss, _ = get_policy_loss_fn(name)(table(v.OLD), table(v.LOGP), advantages, MASK.double(), aggregation, config)
    return float(loss)


def verl_advantages(name: str, rewards: list[float] = v.REWARDS, **options: Any) -> list[float]:
    """The advantage of each row's last token."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    last = torch.tensor(v.LENGTHS) - 1
    tokens = torch.zeros(4, 5, dtype=torch.float64)
    tokens[torch.arange(4), last] = table(rewards)
    index = numpy.array(v.GROUPS)
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=tokens, response_mask=MASK.double(), index=index, **options
    )
    return [float(x) for x in advantages[torch.arange(4), last]]


def verl_gdpo() -> list[float]:
    names = ["right", "form"]
    prompts = torch.zeros(4, 1)
    attention = torch.cat([torch.ones(4, 1), MASK], 1).long()
    parts = {name: numpy.array([row[place] for row in v.COMPONENTS]) for place, name in enumerate(names)}
    return verl_advantages(
        "gdpo",
        config=Options(gdpo_reward_keys=names, gdpo_reward_weights=[1.0, 0.5]),
        non_tensor_batch=parts,
        batch={"prompts": prompts, "attention_mask": attention},
    )


def trl_simpo() -> list[float]:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer: Any = object.__new__(CPOTrainer)
    vars(trainer).update(alpha=0.0, loss_type="simpo", simpo_gamma=1.0, beta=2.0, label_smoothing=0.0)
    trainer.accelerator = types.SimpleNamespace(device="cpu")
    losses, _, _ = trainer.cpo_loss(table(v.MEAN_CHOSEN), table(v.MEAN_REJECTED))
    return [float(x) for x in losses]


def trl_orpo() -> list[float]:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    trainer: Any = object.__new__(ORPOTrainer)
    trainer.beta, trainer.accelerator = 0.1, types.SimpleNamespace(device="cpu")
    losses, *_ = trainer.odds_ratio_loss(table(v.MEAN_CHOSEN), table(v.MEAN_REJECTED))
    # The trainer adds the likelihood of the chosen answer: policy_nll_loss - losses.mean().
    return [float(x) for x in -table(v.MEAN_CHOSEN) - losses]


def trl_kto() -> list[float]:
    """The loss of each answer alone, with an answer to another question of log ratio ``DIVERGENCE``."""
    from trl.trainer.kto_trainer import KTOTrainer

    trainer: Any = object.__new__(KTOTrainer)
    settings = {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    switches = {"calculate_KL": True, "precompute_ref_logps": True, "aux_loss_enabled": False, "_tp_size": 1}
    vars(trainer).update(settings | switches, model=types.SimpleNamespace(training=True), _total_train_tokens=0)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator = types.SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value)

    def model(input_ids: torch.Tensor, **_: Any) -> Any:
        """Log-probabilities are the ids."""
        numbers = input_ids[:, 1:]
        return types.SimpleNamespace(log_probs=numbers, entropy=numbers, mean_logits=numbers)

    found = []
    for chosen, reference, label in zip(v.CHOSEN, v.REF_CHOSEN, v.LABELS, strict=True):
        ids, other, ones = table([[0.0, chosen]]), table([[0.0, v.DIVERGENCE]]), torch.ones(1, 2, dtype=torch.int64)
        rows = {"input_ids": ids, "attention_mask": ones, "completion_mask": ones, "ref_logps": table([reference])}
        others = {"KL_input_ids": other, "KL_attention_mask": ones, "KL_completion_mask": ones}
        batch = rows | others | {"ref_KL_logps": table([0.0]), "label": torch.tensor([label])}
        found.append(float(trainer._compute_loss(model, batch, False)))
    return found


def trl_divergence(beta: float) -> list[float]:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    logits = [table(part)[None] for part in (v.STUDENT, v.TEACHER)]
    return [float(x) for x in GKDTrainer.generalized_jsd_loss(*logits, beta=beta, reduction="none").sum(-1).flatten()]


def verl_tokens(name: str, **options: Any) -> list[float]:
    """The advantages of the first row's tokens."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    return [float(x) for x in get_adv_estimator_fn(name)(response_mask=MASK.double(), **options)[0][0]]


def verl_remax() -> list[float]:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    tokens = torch.zeros(4, 5, dtype=torch.float64)
    tokens[:, 0] = table(v.REWARDS)
    found, _ = get_adv_estimator_fn("remax")(tokens, table(v.GREEDY), MASK.double())
    return [float(x) for x in found[:, 0]]


def verl_gae() -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns."""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    given = table(v.TOKEN_REWARDS), table(v.VALUES), MASK.double()
    found: tuple[torch.Tensor, torch.Tensor] = compute_gae_advantage_return(*given, gamma=0.9, lam=0.8)
    return found


def verl_value_loss() -> float:
    from verl.trainer.ppo.core_algos import compute_value_loss

    loss, _ = compute_value_loss(
        table(v.NEW_VALUES), table(v.TOKEN_REWARDS), table(v.VALUES), MASK.double(), cliprange_value=0.2
    )
    return float(loss)


def verl_divergence(name: str) -> float:
    from verl.trainer.ppo.core_algos import kl_penalty

    return float(kl_penalty(table(v.LOGP), table(v.REF), name)[MASK].mean())


def verl_gradient(name: str) -> list[float]:
    from verl.trainer.ppo.core_algos import kl_penalty

    logp = table(v.LOGP).requires_grad_()
    (found,) = torch.autograd.grad(kl_penalty(logp, table(v.REF), name).sum(), logp)
    return [float(x) for x in found[0]]


def trl_dpo(loss_type: str) -> list[float]:
    """The loss of each pair alone, as answers of one token."""
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer: Any = object.__new__(DPOTrainer)
    switches = {"precompute_ref_logps": True, "aux_loss_enabled": False, "use_weighting": False, "ld_alpha": None}
    loss = {"loss_types": [loss_type], "loss_weights": [1.0], "beta": 0.1, "f_divergence_type": "reverse_kl"}
    vars(trainer).update(switches | loss, model=types.SimpleNamespace(training=True), _total_train_tokens=0, _tp_size=1)
    trainer._metrics = {"train": defaultdict(list)}
    trainer.accelerator = types.SimpleNamespace(
        device="cpu", gather_for_metrics=lambda value: value, gather=lambda value: value
    )

    def model(input_ids: torch.Tensor, **_: Any) -> Any:
        """Log-probabilities are the ids."""
        numbers = input_ids[:, 1:]
        return types.SimpleNamespace(log_probs=numbers, entropy=numbers, mean_logits=numbers, is_top1=numbers > 0)

    found, mask = [], torch.tensor([[0, 1], [0, 1]])
    for pair in zip(v.CHOSEN, v.REJECTED, v.REF_CHOSEN, v.REF_REJECTED, strict=True):
        ids, references = table([[0.0, pair[0]], [0.0, pair[1]]]), table(pair[2:])
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "completion_mask": mask}
        batch = rows | {"ref_chosen_logps": references[:1], "ref_rejected_logps": references[1:]}
        found.append(float(trainer._compute_loss(model, batch, False)))
    return found


def trl_top_entropy() -> list[float]:
    """The least entropy that is kept and the highest other one."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer: Any = object.__new__(GRPOTrainer)
    trainer.accelerator = types.SimpleNamespace(
        pad_across_processes=lambda value, **_: value, gather=lambda value: value
    )
    entropies = table(v.ENTROPIES)
    kept = trainer.get_high_entropy_mask(entropies, MASK, 0.8)
    return [float(entropies[kept].min()), float(entropies[MASK & ~kept].max())]


def comlrl_advantages(mode: str) -> list[float]:
    from comlrl.trainers.reinforce.magrpo import MAGRPOTrainer

    trainer: Any = object.__new__(MAGRPOTrainer)
    trainer.advantage_mode = mode
    return [float(x) for x in trainer._compute_advantages(table(v.REWARDS))]


SEQUENCE: dict[str, Any] = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}

CASES: dict[str, dict[str, Any]] = {
    "ppo token_mean": {
        "TRL": lambda: trl_policy_loss("bnpo"),
        "verl": lambda: verl_policy_loss("vanilla", "token-mean"),
    },
    "ppo sequence_mean": {
        "TRL": lambda: trl_policy_loss("grpo"),
        "verl": lambda: verl_policy_loss("vanilla", "seq-mean-token-mean"),
    },
    "ppo constant_length": {"TRL": lambda: trl_policy_loss("dr_grpo")},
    "ppo clip higher": {
        "TRL": lambda: trl_policy_loss("dapo", epsilon_high=0.28),
        "verl": lambda: verl_policy_loss("vanilla", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.28),
    },
    "ppo dual clip": {"verl": lambda: verl_policy_loss("vanilla", "token-mean", clip_ratio_c=1.5)},
    "gspo": {
        "TRL": lambda: trl_policy_loss("grpo", **SEQUENCE),
        "verl": lambda: verl_policy_loss("gspo", "seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.15),
    },
    "luspo": {"TRL": lambda: trl_policy_loss("luspo", **SEQUENCE)},
    "cispo": {
        "TRL": lambda: trl_policy_loss("cispo", epsilon_high=1.3),
        "verl": lambda: verl_policy_loss("cispo", "token-mean", clip_ratio_low=1.0, clip_ratio_high=0.3),
    },
    "sapo": {
        "TRL": lambda: trl_policy_loss("sapo"),
        "verl": lambda: verl_policy_loss("sapo", "seq-mean-token-mean"),
    },
    "vespo": {"TRL": lambda: trl_policy_loss("vespo")},
    "gmpo": {"verl": lambda: verl_policy_loss("geo_mean", "", clip_ratio_low=0.4, clip_ratio_high=0.4)},
    "dppo": {"verl": lambda: verl_policy_loss("dppo_tv", "token-mean", clip_ratio_low=0.1, clip_ratio_high=0.15)},
    "off-policy mask": {"TRL": lambda: trl_policy_loss("bnpo", off_policy_mask_threshold=0.3)},
    "kl k3": {"TRL": lambda: trl_policy_loss("bnpo", beta=0.1)},
    "kl k3 importance weighted": {"TRL": lambda: trl_policy_loss("bnpo", beta=0.1, use_bias_correction_kl=True)},
    "group_normalized": {"verl": lambda: verl_advantages("grpo")},
    "group_centered": {"verl": lambda: verl_advantages("grpo", norm_adv_by_std_in_grpo=False)},
    "leave_one_out": {"verl": lambda: verl_advantages("rloo")},
    "gdpo": {"verl": verl_gdpo},
    "gae": {"verl": lambda: [float(x) for x in verl_gae()[0][0]]},
    "gae returns": {"verl": lambda: [float(x) for x in verl_gae()[1][0]]},
    "reinforce++": {
        "verl": lambda: verl_tokens(
            "reinforce_plus_plus", token_level_rewards=table(v.TOKEN_REWARDS), config=Options(gamma=0.9)
        )
    },
    "reinforce++ baseline": {
        "verl": lambda: verl_tokens(
            "reinforce_plus_plus_baseline",
            token_level_rewards=table([[reward, 0, 0, 0, 0] for reward in v.REWARDS]),
            index=v.GROUPS,
        )
    },
    "remax": {"verl": verl_remax},
    "reinforce": {"verl": lambda: verl_policy_loss("gpg", "token-mean")},
    "kl k1": {"verl": lambda: verl_divergence("k1")},
    "kl k2": {"verl": lambda: verl_divergence("k2")},
    "kl k3 straight through, gradient": {"verl": lambda: verl_gradient("k3+")},
    "value clip": {"verl": verl_value_loss},
    "top entropy": {"TRL": trl_top_entropy},
    "dpo": {"TRL": lambda: trl_dpo("sigmoid")},
    "hinge": {"TRL": lambda: trl_dpo("hinge")},
    "ipo": {"TRL": lambda: trl_dpo("ipo")},
    "joint mean": {"CoMLRL": lambda: comlrl_advantages("mean")},
    "joint leave one out": {"CoMLRL": lambda: comlrl_advantages("rloo")},
    "joint maximum": {"CoMLRL": lambda: comlrl_advantages("max")},
    "simpo": {"TRL": trl_simpo},
    "orpo": {"TRL": trl_orpo},
    "kto": {"TRL": trl_kto},
    "jsd 0.0": {"TRL": lambda: trl_divergence(0.0)},
    "jsd 0.3": {"TRL": lambda: trl_divergence(0.3)},
    "jsd 1.0": {"TRL": lambda: trl_divergence(1.0)},
}


def versions() -> dict[str, str]:
    """Return the versions of the peers that are installed here."""
    found = {}
    for peer, package in (("TRL", "trl"), ("verl", "verl"), ("CoMLRL", "comlrl")):
        with contextlib.suppress(PackageNotFoundError):
            found[peer] = version(package)
    return found


if __name__ == "__main__":
    here, record = versions(), json.loads(RESULTS.read_text())
    for name, peers in CASES.items():
        values = record["values"].setdefault(name, {})
        values.update({peer: value() for peer, value in peers.items() if peer in here})
        print(name, values)
    record["versions"] |= here
    RESULTS.write_text(json.dumps({"command": COMMAND, **record}, indent=1) + "\n")
