"""Questions that tools help to answer."""
