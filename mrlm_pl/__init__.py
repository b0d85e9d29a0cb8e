"""Modular multi-agent reinforcement learning of language models on PyTorch Lightning."""
