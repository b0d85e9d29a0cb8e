"""Programs, judged by running tests in the sandbox."""

from mrlm_environments.code.environment import CodeEnvironment

__all__ = ["CodeEnvironment"]
