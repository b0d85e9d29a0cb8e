"""What algorithms are made of: batches, metrics, critics, policy gradients."""
