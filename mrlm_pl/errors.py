"""The exceptions of the framework: one class for each boundary where something outside can go wrong.

Every message names the thing, the value that was found and the remedy. ``ConfigurationError`` (and its subclasses)
mean that the user's input is at fault: the command line answers them with exit code 2 and no traceback.
"""

from __future__ import annotations

DEBUG_VARIABLE = "MRLM_DEBUG"
"""Environment variable: set to anything, errors that are otherwise reported in one line come with their traceback."""


class MRLMError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigurationError(MRLMError):
    """A setting, path, name or file given by the user cannot be used."""


class DataError(ConfigurationError):
    """A data file is missing, unreadable, or one of its rows lacks a field (the row number is in the message)."""


class PolicyError(ConfigurationError):
    """A model folder or name cannot be loaded as a policy."""


class EnvironmentContractError(MRLMError):
    """An environment broke its contract or was driven out of order (step before reset, unknown agent, ...)."""


class EngineError(MRLMError):
    """An engine cannot serve a request: unknown policy, empty prompt, prompt longer than the context window."""


class RolloutError(MRLMError):
    """A rollout yielded nothing to learn from, for example because every episode failed."""


class StorageError(MRLMError):
    """A file cannot be written, for example because the disk is full; what was complete before is kept."""


class NonFiniteError(MRLMError):
    """A reward, loss or gradient is NaN or infinite; the run stops rather than train on it."""


class SandboxError(MRLMError):
    """Untrusted code cannot be run as asked: the machine does not offer the isolation, or the sandbox is broken."""


class RemoteError(MRLMError):
    """A remote environment or policy could not be reached, refused, or said something that is not of the protocol."""
