"""Games with known optima: coordination, poker, tic-tac-toe and others."""
