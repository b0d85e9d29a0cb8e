"""Own rows and reward functions as an environment."""
