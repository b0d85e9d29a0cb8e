"""Engines behind HTTP: OpenAI-compatible servers."""
