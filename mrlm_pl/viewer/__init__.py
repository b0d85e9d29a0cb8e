"""The viewer of runs: reads run folders, never writes into them, never imports torch."""
