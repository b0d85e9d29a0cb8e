"""Generation in worker processes under Ray, on this machine or on a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from mrlm_pl.engines.base import Engine, LearnerPlace, Sample, SampleRequest
from mrlm_pl.engines.local.engine import InProcessEngine
from mrlm_pl.engines.ray.group import WorkerGroup
from mrlm_pl.engines.routing import sample_in_parts
from mrlm_pl.errors import EngineError
from mrlm_pl.settings import PositiveInt


class RayPool(WorkerGroup, Engine):
    """Generates in worker processes under Ray, each with an engine and the weights of all policies.

    A request goes to the worker with its session's cache, else to the least busy one. :meth:`load` sends the changed
    tensors to all workers while they generate, and each switches between two calls; when it returns, every worker has
    the new weights. A worker that dies, does not answer or fails to load weights is replaced and filled with the
    current ones, and its requests are sent again; their seeds reproduce the tokens.

    Ray starts with the first :meth:`load`. The learner's memory holds a copy of the trained weights, to fill workers
    at any time.

    Args:
        workers: number of worker processes.
        engine: makes the engine of a worker.
        calls: concurrent calls of a worker's engine; others wait. None: the engine's own number, one in process
            and ``terms.concurrency`` for a server.
        options: options of :class:`~mrlm_pl.engines.ray.group.WorkerGroup`.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    name, kind = "ray_pool", "the pool"

    def __init__(
        self,
        workers: int = 1,
        engine: Callable[[], Engine] = InProcessEngine,
        calls: PositiveInt | None = None,
        **options: Any,
    ) -> None:
        super().__init__(workers, **options)
        self._make_engine, self._calls = engine, calls
        self._beside: LearnerPlace | None = None
        self._spreading = Spreading(workers)

    def _worker(self, place: int, gpus: str | None) -> tuple[type, tuple[Any, ...]]:
        from mrlm_pl.engines.ray.workers import PoolWorker

        # The devices are not those of the worker; a worker that replaces another computes like the rest.
        self._beside = self._beside or LearnerPlace(precision=self.learner.precision if self.learner else "32-true")
        name = f"{self.name}/{place}"
        return PoolWorker, (gpus, self._make_engine, name, place, self.count, self._calls, self._beside)

    # Weights.

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Make the module's current weights those of ``policy`` in all workers; returns when all serve with them.

        Args:
            policy: name of the policy in requests.
            weights: a ``transformers`` model.
            version: version of the weights, reported in samples.

        Raises:
            EngineError: ``weights`` is another object, too many workers were lost, or the cluster is gone.
            ConfigurationError: the engine cannot serve in a pool of this size; see :meth:`Engine.join_pool`.
        """
        if not isinstance(weights, PreTrainedModel):
            raise EngineError(f"policy {policy!r}: a pool loads a transformers model, not a {type(weights).__name__}")
        self.fill(policy, weights, version)

    @property
    def takes_pieces(self) -> bool:
        """True if the workers' engine takes ``offset`` and ``piece``; valid after the first :meth:`load`."""
        return bool(self.workers) and self.workers[0].about["takes_pieces"]

    def window(self, policy: str) -> int | None:
        """Return the longest context of the workers' engine in tokens; None while the policy is not loaded."""
        return self._said(policy).get("window")

    def reports_logprobs(self, policy: str) -> bool:
        """Return the answer of the workers' engine; True while the policy is not loaded."""
        return bool(self._said(policy).get("reports_logprobs", True))

    def precision(self, policy: str) -> str | None:
        """Return the answer of the workers' engine; None while the policy is not loaded."""
        return self._said(policy).get("precision")

    def _said(self, policy: str) -> dict[str, Any]:
        """Return the workers' answer to the last switch to weights of the policy; empty before the first."""
        return (self._served[policy].answer if policy in self._served else None) or {}

    # Requests.

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order; see :meth:`Engine.sample`. Their engine is ``ray_pool/WORKER``.

        Raises:
            EngineError: a worker's engine failed, too many workers were lost, or the cluster is gone.
        """
        if not self.workers:
            raise EngineError("the pool has no weights; call load() first" if not self.closed else "the pool is closed")
        places = self._spreading.place(requests)
        try:
            return await sample_in_parts(
                requests, places, lambda place, worker_requests: self.ask(place, "generate", "sample", worker_requests)
            )
        finally:
            self._spreading.done(places)

    def release(self, session_prefix: str) -> None:
        """Drop caches, in the background; see :meth:`Engine.release`. A closed pool has none."""
        for place in () if self.closed else self._spreading.release(session_prefix):
            self.call(self.workers[place], "answer", "release", session_prefix)


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
