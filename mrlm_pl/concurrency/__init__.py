"""Threads, event loops and deadlines of a process."""
