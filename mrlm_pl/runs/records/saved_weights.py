"""The weights in a checkpoint: the last one of a run that has not finished, or one that the user names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import checkpoint as sharded

from mrlm_pl.errors import MRLMError, PolicyError, first_line, tell
from mrlm_pl.policy import Policy
from mrlm_pl.trainer.fsdp import SHARDED_CHECKPOINT_FILES
from mrlm_pl.trainer.sharded_checkpoint import sharded_shapes


class _Opened(NamedTuple):
    """The contents of a checkpoint; the weights of a sharded one are read later."""

    written: tuple[int, int]
    when: str
    shapes: Mapping[str, torch.Size]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class SavedWeights:
    """A checkpoint of a run, opened at most once: all that is read is of one iteration, though the run trains.

    Args:
        path: path of the checkpoint in the run folder; sharded ones are folders.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def when(self) -> str:
        """The iteration or update of the checkpoint, in words."""
        return self._opened.when

    @property
    def written(self) -> tuple[int, int]:
        """Size and time of the file, or of the table of a sharded checkpoint, which tell it from later ones."""
        return self._opened.written

    @torch.no_grad()
    def read(self, policy: Policy, name: str) -> None:
        """Read the trained weights of a policy, and its value head, if it has been trained with one.

        Args:
            policy: policy with the weights from before the training.
            name: name of the policy in the run.

        Raises:
            PolicyError: the checkpoint cannot be read, has no weights of this shape, or is sharded and was replaced.
        """
        opened = self._opened
        if any(key.startswith(f"policies.{name}.value_head.") for key in opened.shapes):
            policy.add_value_head(f"policies.{name}.value_head.moments" in opened.shapes)
        weights = {
            f"policies.{name}.{key}": weight for key, weight in policy.state_dict().items() if policy.is_saved(key)
        }
        for key, weight in weights.items():
            if opened.shapes.get(key) != weight.shape:
                fault = f"checkpoint {str(self)!r} has no weights {key!r} of shape {list(weight.shape)}"
                other = f"it is of another configuration than {str(self.path.parent.parent)!r} has"
                raise PolicyError(f"{fault}, so {other}; evaluate the run that wrote it")
        if self.path.is_dir():
            with self._reading(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that this process reads it alone
                sharded.load({"state_dict": weights}, checkpoint_id=self.path, no_dist=True)
            if self._stamp() != opened.written:
                fault = "was replaced by the run while its policies were read"
                raise PolicyError(f"checkpoint {str(self)!r} {fault}; evaluate again")
        for key in weights.keys() & opened.weights.keys():
            weights[key].copy_(opened.weights[key])

    def tell(self) -> None:
        """Print the checkpoint of the policies, once in a process."""
        _tell_once(f"the policies have the weights of {self}, of {self.when}", self.written)

    @functools.cached_property
    def _opened(self) -> _Opened:
        with self._reading():
            while True:
                written = self._stamp()
                opened = _open(self.path, written)
                if self._stamp() == written:  # else the run has replaced it meanwhile
                    return opened

    def _stamp(self) -> tuple[int, int]:
        path = self.path / SHARDED_CHECKPOINT_FILES[1] if self.path.is_dir() else self.path
        return path.stat().st_size, path.stat().st_mtime_ns

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """In this block an error is one that names the checkpoint."""
        try:
            yield
        except MRLMError:
            raise
        except (Exception, sharded.CheckpointException) as error:  # damaged files raise any class of error
            cause = next(iter(error.failures.values()))[0] if isinstance(error, sharded.CheckpointException) else error
            remedy = "if the run trains, evaluate again, else put a complete checkpoint in its place"
            raise PolicyError(f"checkpoint {str(self)!r} cannot be read ({first_line(cause)}); {remedy}") from error


def _open(path: Path, written: tuple[int, int]) -> _Opened:
    weights: dict[str, Tensor] = {}
    if path.is_dir():
        shapes = sharded_shapes(path)
        state: Any = torch.load(path / SHARDED_CHECKPOINT_FILES[1], weights_only=True)
    else:  # a file that is replaced stays as long as it is mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(state, Mapping) or not {"state_dict", "global_step"} <= state.keys():
            raise ValueError("it is not a checkpoint of a run")
        weights = {key: value for key, value in state["state_dict"].items() if isinstance(value, Tensor)}
        shapes = {key: weight.shape for key, weight in weights.items()}
    iterations = [part["iteration"] for part in state.values() if isinstance(part, Mapping) and "iteration" in part]
    when = f"iteration {iterations[0]}" if iterations else f"update {state['global_step']}"
    return _Opened(written, when, shapes, weights)


@functools.cache
def _tell_once(message: str, written: tuple[int, int]) -> None:
    """Print the message, once for each checkpoint."""
    tell(message)
