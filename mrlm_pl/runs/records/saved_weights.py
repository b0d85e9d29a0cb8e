"""The weights in the last checkpoint of a run that has not finished."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import checkpoint as sharded

from mrlm_pl.errors import PolicyError, tell
from mrlm_pl.policy import Policy
from mrlm_pl.trainer.fsdp import SHARDED_CHECKPOINT_FILES
from mrlm_pl.trainer.sharded_checkpoint import check_sharded_checkpoint


@torch.no_grad()
def read_saved_weights(policy: Policy, path: str, name: str) -> None:
    """Read the trained weights of a policy from a checkpoint, sharded or not; print the checkpoint's iteration once.

    Args:
        policy: with the weights from before the training.
        path: of the checkpoint in a run folder.
        name: of the policy in the run.

    Raises:
        PolicyError: the checkpoint lacks weights of the policy.
    """
    checkpoint = Path(path)
    own = {f"policies.{name}.{key}": weight for key, weight in policy.state_dict().items() if policy.is_saved(key)}
    if checkpoint.is_dir():
        check_sharded_checkpoint(checkpoint)
        state = torch.load(checkpoint / SHARDED_CHECKPOINT_FILES[1], weights_only=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process reads it alone
            sharded.load({"state_dict": own}, checkpoint_id=checkpoint, no_dist=True)
    else:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        if missing := own.keys() - state["state_dict"].keys():
            raise PolicyError(
                f"{str(checkpoint)!r} has no weights {min(missing)!r}, so it is of another configuration than "
                f"{str(checkpoint.parent.parent)!r} has; evaluate the run that wrote it"
            )
        for key, weight in own.items():
            weight.copy_(state["state_dict"][key])
    iterations = [part["iteration"] for part in state.values() if isinstance(part, Mapping) and "iteration" in part]
    when = f"iteration {iterations[0]}" if iterations else f"update {state['global_step']}"
    _tell_once(
        f"{checkpoint.parent.parent} is not finished: its policies have the weights of the checkpoint of {when}",
        checkpoint.stat().st_mtime_ns,
    )


@functools.cache
def _tell_once(message: str, written: int) -> None:
    """Print the message for the first policy of a checkpoint alone."""
    tell(message)
