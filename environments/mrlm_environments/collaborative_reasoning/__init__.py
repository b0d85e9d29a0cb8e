"""Agents answer, read each other and answer again."""
