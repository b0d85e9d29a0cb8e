"""The parts of algorithms: batches, metrics, critics, policy gradients."""
