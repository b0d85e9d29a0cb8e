"""Advantages of one policy as pure functions: per row [B] from rewards in groups, or per token [B, T]."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
