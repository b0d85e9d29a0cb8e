"""Reports of evaluations, their comparison and their confidence intervals."""
