"""Policies behind gRPC: service and engine."""
