"""Engines: token ids in, sampled tokens with their log-probabilities out. Heavy imports wait until a name is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrlm_pl.engines.base import Engine, FinishReason, Sample, SampleRequest, Sampling
    from mrlm_pl.engines.continuous import ContinuousEngine
    from mrlm_pl.engines.generation import EngineStats
    from mrlm_pl.engines.in_process import InProcessEngine
    from mrlm_pl.engines.openai_compatible import OpenAICompatible
    from mrlm_pl.engines.pool_settings import PoolDeadlines, PoolResources, WeightTransfer
    from mrlm_pl.engines.ray_pool import RayPool
    from mrlm_pl.engines.ray_reference import RayReference
    from mrlm_pl.engines.reference import Reference
    from mrlm_pl.engines.routing import RoutingEngine

__all__ = [
    "ContinuousEngine",
    "Engine",
    "EngineStats",
    "FinishReason",
    "InProcessEngine",
    "OpenAICompatible",
    "PoolDeadlines",
    "PoolResources",
    "RayPool",
    "RayReference",
    "Reference",
    "RoutingEngine",
    "Sample",
    "SampleRequest",
    "Sampling",
    "WeightTransfer",
]

_HOME = {
    "Engine": "base",
    "FinishReason": "base",
    "Sample": "base",
    "SampleRequest": "base",
    "Sampling": "base",
    "ContinuousEngine": "continuous",
    "EngineStats": "generation",
    "InProcessEngine": "in_process",
    "OpenAICompatible": "openai_compatible",
    "PoolDeadlines": "pool_settings",
    "PoolResources": "pool_settings",
    "RayPool": "ray_pool",
    "RayReference": "ray_reference",
    "Reference": "reference",
    "RoutingEngine": "routing",
    "WeightTransfer": "pool_settings",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
