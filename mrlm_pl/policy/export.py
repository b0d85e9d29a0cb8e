"""Write a model as a plain Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from mrlm_pl.policy.lora import is_adapter


def write_model(model: PreTrainedModel, folder: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that ``from_pretrained`` reads, without a progress bar.

    Args:
        model: gives the configuration; its adapters are left out.
        folder: is created.
        weights: of the model, with adapters merged; see :func:`~mrlm_pl.policy.lora.merged_state`.
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    with _no_bars():
        model.save_pretrained(folder, state_dict=dict(weights))


@contextmanager
def _no_bars() -> Iterator[None]:
    """Switch off the bars of transformers: in a notebook's live display, bar and display call each other."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
