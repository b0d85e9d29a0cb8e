"""The folder of a run that has not finished, with weights that tell where they were read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed import checkpoint

from mrlm_pl import Policy


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of ``builtin:tiny`` that a policy with this ``random_init_seed`` has."""
    policy = Policy(random_init_seed=seed)
    policy.load()
    return dict(policy.state_dict())


def write_run(run: Path, policies: Mapping[str, Any], environment: str = "CoordinationGame") -> None:
    """Write the configuration and state of a run that was interrupted."""
    run.mkdir()
    seats = {"row": "first", "column": "second"} if len(policies) > 1 else {}
    model = {"init_args": {"policies": dict(policies), "seats": seats}}
    (run / "config.yaml").write_text(
        yaml.safe_dump({"model": model, "data": {"init_args": {"environment": f"mrlm_environments.{environment}"}}})
    )
    (run / "state.json").write_text('{"state": "interrupted"}')


def write_checkpoint(run: Path, seeds: Mapping[str, int], update: int, *, shards: bool = False) -> Path:
    """Write or replace the last checkpoint: each policy's weights are those of a seed; return it."""
    weights = {
        f"policies.{name}.{key}": value for name, seed in seeds.items() for key, value in weights_of(seed).items()
    }
    last, draft = run / "checkpoints/last.ckpt", run / f"checkpoints/{update}"
    last.parent.mkdir(exist_ok=True)
    if shards:
        checkpoint.save({"state_dict": weights}, checkpoint_id=draft, no_dist=True)
        torch.save({"state_dict": {}, "global_step": update}, draft / "meta.pt")
        os.utime(draft / "meta.pt", (update, update))
        if last.exists():
            last.rename(run / f"checkpoints/before-{update}")
    else:
        torch.save({"state_dict": weights, "global_step": update}, draft)
    os.utime(draft, (update, update))
    draft.rename(last)
    return last


def export(run: Path, name: str, seed: int, time: int) -> None:
    """Export a policy with the weights of a seed, at a time in the units of updates."""
    policy = Policy(random_init_seed=seed)
    policy.load()
    policy.save_pretrained(run / "policies" / name)
    os.utime(run / "policies" / name / "config.json", (time, time))
