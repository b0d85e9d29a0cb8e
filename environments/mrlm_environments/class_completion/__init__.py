"""Agents complete the methods of a class together."""

from mrlm_environments.class_completion.environment import ClassCompletionEnvironment

__all__ = ["ClassCompletionEnvironment"]
