"""The models of a run, one line each."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary

from mrlm_pl.policy import Policy


class PolicySummary(ModelSummary):
    """Prints one line for every policy and critic when ``fit`` starts, in place of Lightning's table of layers."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the lines on the first rank."""
        if trainer.is_global_zero:
            for name, module in pl_module.named_modules():
                if isinstance(module, Policy):
                    print(f"{name}: {describe(module)}", flush=True)


def describe(policy: Policy) -> str:
    """Return the model, its number of weights and how it is trained.

    >>> policy = Policy("builtin:tiny", learning_rate=1e-3)
    >>> policy.load(reference=True)
    >>> describe(policy)
    'builtin:tiny (llama), 166,848 weights, trained at learning rate 0.001, with a reference copy'
    """
    kind = f"{policy.name_or_path} ({policy.config.model_type})"
    if policy.served_by is not None:
        return f"{kind}, served by {policy.served_by}"
    weights = [weight for module in (policy.model, policy.value_head) if module for weight in module.parameters()]
    total = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    parts = [kind, f"{total:,} weights"]
    if not trained:
        parts.append("frozen")
    else:
        share = "" if trained == total else f"{trained:,} "
        parts.append(f"{share}trained at learning rate {policy.learning_rate:g}")
    if policy.reference is not None:
        parts.append("with a reference copy")
    return ", ".join(parts)
