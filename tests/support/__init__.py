"""Helpers of the tests: servers, runs, models and environments that several of them use."""
