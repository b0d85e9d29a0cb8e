"""Arithmetic and word problems."""

from mrlm_environments.math.environment import MathEnvironment

__all__ = ["MathEnvironment"]
