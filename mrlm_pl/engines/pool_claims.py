"""What workers of a pool have to themselves, and whether two of them would share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mrlm_pl.errors import ConfigurationError


def check_claims(claims: Mapping[str, Sequence[str]]) -> None:
    """Nothing, where no two workers have the same.

    Args:
        claims: what the engine of each worker said in :meth:`~mrlm_pl.engines.base.Engine.join_pool`, by its name.

    Raises:
        ConfigurationError: two of them have something in common, or other processes have pools with the same.
    """
    owners: dict[str, str] = {}
    for worker, own in claims.items():
        for claim in own:
            if claim in owners:
                raise ConfigurationError(
                    f"{owners[claim]} and {worker} would share {claim}; give each its own (as many urls as workers), "
                    "or place them on machines of their own (data.engine.resources.strategy: STRICT_SPREAD)"
                )
            owners[claim] = worker
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if distributed else 1
    if owners and ranks > 1:
        raise ConfigurationError(
            f"each of {ranks} processes has a pool, and they would share {next(iter(owners))}; set trainer.devices to "
            "1 or use another engine"
        )
