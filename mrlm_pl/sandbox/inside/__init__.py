"""What runs on the far side: the server that forks locked-down children, and what a child does."""
