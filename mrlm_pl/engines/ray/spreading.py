"""Requests on the engines of a pool."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mrlm_pl.engines.base import SampleRequest


class Spreading:
    """Places requests on engines, by the calls alone, never by time.

    Several threads may call: training and validation episodes have their own event loops.

    Args:
        places: number of engines.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._busy = [0] * places
        self._sessions: dict[str, int] = {}
        self._homes = [0] * places
        self._lock = threading.Lock()

    def place(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Return the place of each request; call :meth:`done` with them after the answers.

        A session keeps its first place. Other requests go to the place with the fewest requests, then with the fewest
        sessions. Those with the same context stay together, so that it is computed once, up to an even share of the
        call.
        """
        share = -(-len(requests) // self._places)
        requests_given = [0] * self._places
        contexts: dict[tuple[str, tuple[int, ...]], int] = {}
        chosen: list[int] = []
        with self._lock:
            for request in requests:
                place = self._sessions.get(request.session) if request.session else None
                if place is None:
                    context = (request.policy, request.token_ids)
                    place = contexts.get(context)
                    if place is None or requests_given[place] >= share:
                        place = min(range(self._places), key=lambda item: (self._busy[item], self._homes[item], item))
                        contexts[context] = place
                    if request.session:
                        self._sessions[request.session] = place
                        self._homes[place] += 1
                requests_given[place] += 1
                self._busy[place] += 1
                chosen.append(place)
        return chosen

    def done(self, places: Sequence[int]) -> None:
        """Note that the requests of these places have been answered or abandoned."""
        with self._lock:
            for place in places:
                self._busy[place] -= 1

    def release(self, session_prefix: str) -> set[int]:
        """Forget the sessions whose key begins with ``session_prefix``; return their places."""
        with self._lock:
            gone = [item for item in self._sessions if item.startswith(session_prefix)]
            places = [self._sessions.pop(session) for session in gone]
            for place in places:
                self._homes[place] -= 1
        return set(places)
