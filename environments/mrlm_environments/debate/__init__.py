"""Two sides debate before a judge."""
