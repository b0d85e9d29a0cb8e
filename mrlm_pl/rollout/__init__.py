"""Environments and engines play episodes."""
