"""Programs that attack the sandbox, its resources or the grade, and bait outside of it."""
