"""Seats of agents, and the policies beside the current one: the old one, the reference and teachers."""
