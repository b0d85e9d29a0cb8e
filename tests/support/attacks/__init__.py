"""Programs that try to leave the sandbox, take too much of it, or fake a grade; and their bait outside."""
