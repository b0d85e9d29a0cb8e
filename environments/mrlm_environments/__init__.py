"""Environments and tools, one folder each. They are imported when a name is used, and never import torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
