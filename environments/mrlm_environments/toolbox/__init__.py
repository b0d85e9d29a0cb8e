"""Tools that agents call: calculator, files, programs, search, MCP servers."""
