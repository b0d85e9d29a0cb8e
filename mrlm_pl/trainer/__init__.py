"""Code that relies on Lightning's internals: strategies, ends of a run, exact resume."""
