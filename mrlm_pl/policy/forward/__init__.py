"""The learner's forward pass."""
