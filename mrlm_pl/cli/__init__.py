"""The command line ``mrlm``: a thin dispatcher and one module for each command."""
