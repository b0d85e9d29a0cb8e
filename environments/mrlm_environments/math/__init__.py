"""Arithmetic and word problems."""
