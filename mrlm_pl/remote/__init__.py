"""Environments behind gRPC: servers, and clients that use them like any other environment. See docs/remote.md."""

from mrlm_pl.remote.client import RemoteEnvironment

__all__ = ["RemoteEnvironment"]
