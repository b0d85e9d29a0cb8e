"""Questions about tables, answered with SQL tools."""
