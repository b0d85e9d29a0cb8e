"""Counter-based randomness: every random draw is a pure function of a key, never of global state.

A key is the position of the draw in the run, for example ``(run seed, "turn", iteration, task, episode, agent, turn)``.
Draws with different keys are independent; the same key gives the same number on every machine, in every process
and in any order. So runs are reproducible and resumable without saved generator state.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random

logger = logging.getLogger(__name__)


def derive_seed(*key: str | int) -> int:
    """Return a seed in ``[0, 2**63)`` that is a function of ``key`` alone.

    Args:
        key: strings and integers; order, type and boundaries count (``("ab", "c")`` and ``("a", "bc")`` differ).

    Raises:
        TypeError: a part of the key is neither ``str`` nor ``int`` (a float or an object has no stable text form).

    >>> derive_seed("rollout", 0, 3) == derive_seed("rollout", 0, 3)
    True
    >>> len({derive_seed("a", 1), derive_seed("a", "1"), derive_seed("a1"), derive_seed(1, "a")})
    4
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in key:
        if isinstance(part, bool) or not isinstance(part, (str, int)):
            raise TypeError(f"a seed key holds strings and integers; got {part!r} of type {type(part).__name__}")
        text = part.encode() if isinstance(part, str) else str(part).encode()
        digest.update(b"s" if isinstance(part, str) else b"i")
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return int.from_bytes(digest.digest(), "little") >> 1


def keyed_random(*key: str | int) -> random.Random:
    """Return a standard-library generator seeded by ``derive_seed(*key)``.

    >>> keyed_random("task", 7).randint(0, 99) == keyed_random("task", 7).randint(0, 99)
    True
    """
    return random.Random(derive_seed(*key))


def run_seed(given: int | None) -> int:
    """Return the given seed of a run, else 0, with a warning where ``lightning.seed_everything`` has set another."""
    everything = os.environ.get("PL_GLOBAL_SEED", "0")
    if given is None and everything != "0":
        text = "lightning.seed_everything does not seed the data: their seed is 0; give the data module seed=%s"
        logger.warning(text, everything)
    return given or 0
