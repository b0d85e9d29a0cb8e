"""Questions that tools help to answer."""

from mrlm_environments.tools.environment import ToolEnvironment

__all__ = ["ToolEnvironment"]
