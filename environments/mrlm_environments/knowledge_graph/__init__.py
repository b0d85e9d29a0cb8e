"""Questions about a graph of entities, answered by exploring it with tools."""
