"""Two agents write a brief and a detailed text."""
