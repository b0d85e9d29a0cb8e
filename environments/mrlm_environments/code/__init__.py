"""Programs, judged by running tests in the sandbox."""
