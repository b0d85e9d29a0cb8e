"""Shared helpers of the tests: servers, runs, models and environments."""
