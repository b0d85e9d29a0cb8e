"""Data modules of files: demonstrations, preferences, answers."""
