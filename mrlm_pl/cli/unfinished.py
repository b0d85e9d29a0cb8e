"""Notes beside files that are still being written."""

from __future__ import annotations

from pathlib import Path


def progress_note(path: Path) -> Path:
    """Where it is noted how far a file has come; the note is there until the file is complete."""
    return path.with_name(path.name + ".progress")


def unfinished(path: Path) -> bool:
    """Whether a command that writes the file was killed, or is still at it."""
    return progress_note(path).is_file()
