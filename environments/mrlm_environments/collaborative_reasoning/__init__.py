"""Agents answer, read each other and answer again."""

from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment

__all__ = ["CollaborativeReasoningEnvironment"]
