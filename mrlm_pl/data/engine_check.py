"""Whether an algorithm can learn from what an engine reports."""

from __future__ import annotations

from mrlm_pl.algorithms.base import Algorithm
from mrlm_pl.engines import Engine, Sampling
from mrlm_pl.errors import ConfigurationError


def check_logprobs(engine: Engine | None, algorithm: Algorithm, sampling: Sampling, overlaps: bool = False) -> None:
    """Nothing, where samples have log-probabilities or training does not use them.

    Args:
        engine: of the run; None is the in-process engine.
        algorithm: attached to its trainer.
        sampling: of the training episodes.
        overlaps: whether episodes are played while the weights change, so that the learner's are newer ones.

    Raises:
        ConfigurationError: the algorithm would learn from log-probabilities that nobody computed.
    """
    if engine is None:
        return
    for name in algorithm.policies:
        if not algorithm.policy(name).trained or engine.reports_logprobs(name):
            continue
        if overlaps:
            raise ConfigurationError(
                f"policy {name!r} is trained, data.mode is async, and data.engine gives no log-probabilities of what "
                "it samples; the learner's are of newer weights: set data.mode to sync, or use another dialect"
            )
        if algorithm.reads_sampler_logprobs(sampling):
            raise ConfigurationError(
                f"policy {name!r} is trained, and data.engine gives no log-probabilities of what it samples; set "
                f"model.recompute_old_logp to true, so that {type(algorithm).__name__} takes them from the learner "
                "(without a correction, which weighs the sampler's), use another dialect, or `trained: false`"
            )
