"""Engines: token ids in, sampled tokens with their log-probabilities out. Heavy imports wait until a name is used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
