"""Messages of a run: those that do not concern it, and hints on the machine."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings

import torch
from transformers.utils.logging import disable_progress_bar

logger = logging.getLogger(__name__)

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
    r"will override existing callbacks passed to Trainer: ExactResume",
    r"Received SIGTERM",  # the end of the run says so in its own words
)
_BUSY = 1.5
"""Load average per core from which a machine counts as busy."""


def silence_noise() -> None:
    """Drop messages that advertise or do not concern a run of ours, and bars for reading and writing weights."""
    disable_progress_bar()
    for text in _NOISE:
        warnings.filterwarnings("ignore", message=f".*{text}")
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
        "lightning.pytorch.trainer.connectors.signal_connector",
    ):
        logger = logging.getLogger(name)
        if not any(isinstance(item, _NoNoise) for item in logger.filters):
            logger.addFilter(_NoNoise())


class _NoNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(re.search(text, record.getMessage()) for text in _NOISE)


def warn_of_emulated_bf16(precision: str) -> None:
    """Say on stderr that bf16 is slow on this CPU, if a run on it has that precision."""
    if "bf16" in precision and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print(
            f"mrlm: trainer.precision {precision}: this CPU has no instructions for bf16 and emulates them, "
            "which takes several times as long as 32-true",
            file=sys.stderr,
        )


def warn_of_busy_machine() -> None:
    """Log a warning if other processes use the cores that the threads of a run on the CPU would spin on."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    limited = {"OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    if load > _BUSY * cores and not limited:
        logger.warning(
            "the load average is %.1f on %d cores: threads that spin while they wait slow a run down severalfold; set "
            "OMP_NUM_THREADS to the number of free cores, or GOMP_SPINCOUNT=1000, before Python starts "
            "(docs/scaling.md)",
            load,
            cores,
        )
