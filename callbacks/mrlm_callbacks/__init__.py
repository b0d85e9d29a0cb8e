"""Callbacks that extend a run: one file each."""

from mrlm_callbacks.held_out_evaluation import HeldOutEvaluation

__all__ = ["HeldOutEvaluation"]
