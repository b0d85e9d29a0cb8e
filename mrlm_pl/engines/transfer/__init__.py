"""Weights on their way to other processes."""
