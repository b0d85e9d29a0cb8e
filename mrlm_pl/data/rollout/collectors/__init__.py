"""Collecting a rollout, synchronously or not."""
