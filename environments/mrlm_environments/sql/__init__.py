"""Questions about tables, answered with SQL tools."""

from mrlm_environments.sql.environment import SqlEnvironment

__all__ = ["SqlEnvironment"]
