"""An agent poses problems that others learn to solve."""
