"""Two agents write one program."""

from mrlm_environments.collaborative_coding.environment import CollaborativeCodingEnvironment

__all__ = ["CollaborativeCodingEnvironment"]
