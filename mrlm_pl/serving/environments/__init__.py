"""Environments behind gRPC: service and client."""
