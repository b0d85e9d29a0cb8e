"""From the words of a command line and its files to objects."""
