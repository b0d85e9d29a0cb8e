"""Lightning's private corners: strategies, ends of a run, exact resume."""
