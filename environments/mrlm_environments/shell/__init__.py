"""Tasks in a shell of the sandbox."""

from mrlm_environments.shell.environment import ShellEnvironment

__all__ = ["ShellEnvironment"]
