"""The models of a run, the files that it leaves and the commands that continue from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary

from mrlm_pl.policy import Policy

_FILES = {
    "policies": "trained models, each a Hugging Face folder",
    "episodes": "every episode, as JSON lines",
    "checkpoints": "to resume from",
    "metrics.csv": "all metrics",
    "tensorboard": "the same for TensorBoard",
    "config.yaml": "the whole configuration",
}


class BatchCount(Callback):
    """Counts the batches that this process trains on: none where a complete run is resumed."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        """Count a batch."""
        self.count += 1


def run_summary(folder: str | Path, played: bool = True) -> str:
    """Return a few lines on the files of a run folder and the commands that continue from there.

    Args:
        folder: the run folder.
        played: whether the run played episodes, so that ``mrlm eval`` knows its environment.
    """
    folder = Path(folder)
    found = {name: text for name, text in _FILES.items() if (folder / name).exists()}
    evaluations = sorted(path.name for path in folder.glob("evaluation_*.json"))
    lines = [f"mrlm: the run is in {folder}", *(f"  {name:<12} {text}" for name, text in found.items())]
    lines += [f"  {name}" for name in evaluations]
    commands = []
    if "policies" in found:
        known = played and "config.yaml" in found
        commands.append(f"mrlm eval --model {folder}" + ("" if known else " --environment NAME"))
    if "tensorboard" in found:
        commands.append(f"tensorboard --logdir {folder / 'tensorboard'}  # curves")
    if commands:
        lines += ["next:", *(f"  {command}" for command in commands)]
    return "\n".join(lines)


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
