"""A household to act in by text, as in ALFWorld."""
