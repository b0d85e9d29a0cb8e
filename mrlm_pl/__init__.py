"""Modular multi-agent reinforcement learning of language models on PyTorch Lightning.

The public names are imported when they are used; ``import mrlm_pl`` imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
