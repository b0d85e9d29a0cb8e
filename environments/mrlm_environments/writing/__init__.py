"""Two agents write a brief and a detailed text."""

from mrlm_environments.writing.environment import WritingEnvironment

__all__ = ["WritingEnvironment"]
