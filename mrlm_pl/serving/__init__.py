"""Environments, policies and verifiers behind gRPC: servers and their clients. See docs/scaling/remote.md."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
