"""Recorded episodes played or credited again."""
