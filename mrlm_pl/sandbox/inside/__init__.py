"""The far side: the server that forks locked-down children, and the work of a child."""
