"""Reward models, here or behind a server: what gives a text a number. See docs/verifier.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrlm_pl.verifier.client import VerifierClient
    from mrlm_pl.verifier.model import RewardModel
    from mrlm_pl.verifier.scorer import TextScore, TextScorer

__all__ = ["RewardModel", "TextScore", "TextScorer", "VerifierClient"]

_HOME = {"RewardModel": "model", "TextScore": "scorer", "TextScorer": "scorer", "VerifierClient": "client"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
