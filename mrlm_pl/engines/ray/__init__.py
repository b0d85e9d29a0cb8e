"""A pool of workers under Ray."""
