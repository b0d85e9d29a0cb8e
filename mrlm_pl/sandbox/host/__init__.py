"""This side of the sandbox: cells and the process that forks them."""
