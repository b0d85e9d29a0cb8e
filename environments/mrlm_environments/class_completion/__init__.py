"""Agents complete the methods of a class together."""
