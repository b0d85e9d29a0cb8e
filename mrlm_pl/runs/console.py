"""Messages that do not concern a run."""

from __future__ import annotations

import logging
import re
import warnings

from transformers.utils.logging import disable_progress_bar

_NOISE = (
    r"^Seed set to",
    r"^TPU available: False",
    r"^Trainer already configured with model summary callbacks",
    r"litlogger",
    r"litmodels",
    r"does not have many workers",
    r"Couldn't infer the batch indices",
    r"isinstance\(treespec, LeafSpec\)",
    r"Total length of `list` across ranks is zero",  # there is no validation data
    r"your dataloader is not resumable",  # the position in the stream is in the data module
    r"module\(s\) in eval mode",
    r"recommended to use `self\.log\('(val|test)/",  # they are of all ranks already
    r"Checkpoint directory .* exists and is not empty",
)


def silence_noise() -> None:
    """Drop messages that advertise or do not concern a run of ours, and bars for reading and writing weights."""
    disable_progress_bar()
    for text in _NOISE:
        warnings.filterwarnings("ignore", message=f".*{text}")
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
    ):
        logger = logging.getLogger(name)
        if not any(isinstance(item, _NoNoise) for item in logger.filters):
            logger.addFilter(_NoNoise())


class _NoNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(re.search(text, record.getMessage()) for text in _NOISE)
