"""Connections, their messages and their security."""
