"""Compare GRPO's gradient of one batch with TRL's.

    python benchmarks/robustness/grpo_gradient.py --peer-python .venv-peers/bin/python

TRL generates a batch, computes its advantages and the gradient of its ``dapo`` (token mean) loss; this project computes
the gradient of ``GRPO(reduction="token_mean")`` on those tokens and advantages. Exit status 1 if the largest relative
difference over the parameters (norm of the difference over norm) exceeds 1e-5.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))
import grpo_step
import random_models

TOLERANCE = 1e-5


def run_peer(folder: str, output: str) -> None:
    """Save TRL's batch and gradients."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Recording(GRPOTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
        ) -> Any:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            names = [name for name, _ in model.named_parameters()]
            keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
            saved = {key: inputs[key].detach().cpu() for key in keys}
            torch.save(saved | {"gradients": dict(zip(names, gradients, strict=True))}, output)
            return loss

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=grpo_step.NEW_TOKENS,
        max_steps=1,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    vocabulary = int(random_models.SIZES["s"]["vocab"])
    trainer = Recording(
        model=folder,
        reward_funcs=lambda completions, **_: [random_models.reward(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": random_models.prompt(n, vocabulary)} for n in range(64)]),
    )
    trainer.train()


def our_gradients(folder: str, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of this project's loss on the saved batch."""
    from mrlm_pl.algorithms import GRPO
    from mrlm_pl.episode import Trajectory
    from mrlm_pl.learner.batch import Batch, collate_rows
    from mrlm_pl.losses import batch_totals
    from mrlm_pl.policy import Policy

    rows = []
    for prompt, keep, reply, sampled in zip(
        saved["prompt_ids"], saved["prompt_mask"], saved["completion_ids"], saved["completion_mask"], strict=True
    ):
        context, answer = prompt[keep.bool()].tolist(), reply[sampled.bool()].tolist()
        mask = (False,) * len(context) + (True,) * len(answer)
        rows.append(Trajectory("a", "main", tuple(context + answer), mask, (0.0,) * len(mask), ()))
    labels = [number // grpo_step.GROUP for number in range(len(rows))]
    batch = collate_rows(rows, labels, labels, range(len(rows)), advantages=saved["advantages"].tolist())
    algorithm = GRPO({"main": Policy(folder, chat_template=random_models.TEMPLATE)})
    algorithm.configure_model()
    algorithm.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    policy = algorithm.policy("main")
    with torch.no_grad():
        batch.behavior_logp = policy(batch.inputs())
    totals = {"main": batch_totals(batch.action_mask)}
    algorithm.policy_loss("main", batch, Batch({"main": batch}, totals)).backward()
    return {name: weight.grad for name, weight in policy.model.named_parameters()}


def main() -> None:
    """Compare both sides and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--side", choices=["trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_peer(options.folder, options.output)
        return
    folder, output = tempfile.mkdtemp(), str(Path(tempfile.mkdtemp()) / "peer.pt")
    random_models.make_model(Path(folder), "s")
    command = [options.peer_python, __file__, "--peer-python", "-", "--side", "trl"]
    command += ["--folder", folder, "--output", output]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    if result.returncode:
        raise SystemExit(f"TRL failed:\n{result.stderr[-3000:]}")
    saved = torch.load(output)
    ours, theirs = our_gradients(folder, saved), saved["gradients"]
    differences = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    worst = max(differences, key=lambda name: differences[name])
    print(f"{len(differences)} tensors, largest relative difference {differences[worst]:.2e} ({worst})")
    if differences[worst] > TOLERANCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
