"""Choices that are made by a letter."""

from __future__ import annotations

import re

_LETTER = re.compile(r"[A-Za-z]")


def chosen_letter(reply: str, letters: str) -> str | None:
    """Return the first letter of a reply in upper case if it is among ``letters``, else None.

    >>> chosen_letter(" c, gladly", "CA"), chosen_letter("A", "CA"), chosen_letter("Both", "CA")
    ('C', 'A', None)
    """
    match = _LETTER.search(reply[:1000])
    letter = match.group().upper() if match else ""
    return letter if letter and letter in letters else None
