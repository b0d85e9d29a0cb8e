"""Two agents write one program."""
