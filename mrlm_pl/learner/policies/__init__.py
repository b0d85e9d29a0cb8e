"""Seats of agents, and the policies other than the current one: the old one, the reference and teachers."""
