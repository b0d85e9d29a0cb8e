"""Environments of other libraries, one file for each. The libraries are extras and are imported on first use."""
