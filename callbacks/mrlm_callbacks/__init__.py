"""Callbacks that extend a run: one file each."""

from mrlm_callbacks.anchor_games import AnchorGames, CollapseAlarm
from mrlm_callbacks.held_out_evaluation import HeldOutEvaluation
from mrlm_callbacks.self_play import SelfPlay

__all__ = ["AnchorGames", "CollapseAlarm", "HeldOutEvaluation", "SelfPlay"]
