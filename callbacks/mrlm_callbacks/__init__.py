"""Callbacks that extend a run: one file each. They are imported when a name is used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
