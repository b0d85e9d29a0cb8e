"""From stored turns to returns and advantages."""
