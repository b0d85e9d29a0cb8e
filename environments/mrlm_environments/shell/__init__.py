"""Tasks in a shell of the sandbox."""
