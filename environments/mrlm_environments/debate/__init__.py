"""Two sides debate before a judge."""

from mrlm_environments.debate.environment import DebateEnvironment

__all__ = ["DebateEnvironment"]
