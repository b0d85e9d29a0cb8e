"""Which of several engines generates for a request: the one that has its session's cache, else the least busy one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mrlm_pl.engines.base import SampleRequest


class Spreading:
    """Places requests on ``places`` engines. What is placed where depends on the calls alone, never on time.

    Several threads may call: episodes that are trained on and those of a validation have event loops of their own.

    Args:
        places: how many engines there are.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._busy = [0] * places
        self._sessions: dict[str, int] = {}
        self._homes = [0] * places
        self._lock = threading.Lock()

    def place(self, requests: Sequence[SampleRequest]) -> list[int]:
        """The place of each request; :meth:`done` is to be called with them when they have been answered.

        A session stays where it was first. Other requests go where the fewest requests and then the fewest sessions
        are; those with the same context keep together, so that it is computed once, up to an even share of the call.
        """
        with self._lock:
            return self._place(requests)

    def _place(self, requests: Sequence[SampleRequest]) -> list[int]:
        share = -(-len(requests) // self._places)
        given = [0] * self._places
        contexts: dict[tuple[str, tuple[int, ...]], int] = {}
        found: list[int] = []
        for request in requests:
            place = self._sessions.get(request.session) if request.session else None
            if place is None:
                context = (request.policy, request.token_ids)
                place = contexts.get(context)
                if place is None or given[place] >= share:
                    place = min(range(self._places), key=lambda item: (self._busy[item], self._homes[item], item))
                    contexts[context] = place
                if request.session:
                    self._sessions[request.session] = place
                    self._homes[place] += 1
            given[place] += 1
            self._busy[place] += 1
            found.append(place)
        return found

    def done(self, places: Sequence[int]) -> None:
        """The requests of these places have been answered, or never will be."""
        with self._lock:
            for place in places:
                self._busy[place] -= 1

    def release(self, session_prefix: str) -> set[int]:
        """Forget the sessions whose key begins with ``session_prefix``; the places where they were."""
        with self._lock:
            gone = [item for item in self._sessions if item.startswith(session_prefix)]
            places = [self._sessions.pop(session) for session in gone]
            for place in places:
                self._homes[place] -= 1
        return set(places)
