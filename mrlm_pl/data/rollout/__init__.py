"""The data module that collects episodes."""
