"""Markdown tables of the files of results, by the chapters of their page."""
