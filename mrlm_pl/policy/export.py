"""Writes a model as a plain Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging


def write_model(model: PreTrainedModel, folder: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Write a model with these weights to a folder that ``from_pretrained`` reads, without a progress bar."""
    with _no_bars():
        model.save_pretrained(folder, state_dict=dict(weights))


@contextmanager
def _no_bars() -> Iterator[None]:
    """Switch the bars of transformers off: within a live display in a notebook, bar and display call each other."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
