"""Losses of one policy as pure functions: one value per token (or pair), reduced over the global batch separately."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
