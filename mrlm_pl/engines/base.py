"""The engine contract: token ids in, sampled tokens with the log-probabilities of the distribution sampled from out."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mrlm_pl.episode import TokenSpan
from mrlm_pl.errors import ConfigurationError

if TYPE_CHECKING:
    from mrlm_pl.engines.learner_place import LearnerPlace

T = TypeVar("T")
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: the distribution is ``softmax(logits / temperature)``, cut by top-k, then by top-p.

    Args:
        temperature: 0 takes the most probable token (its log-probability is then that of temperature 1);
            above 0 divides the logits.
        top_p: keep the smallest set of most probable tokens whose mass reaches ``top_p``; 1 keeps all.
        top_k: keep the ``top_k`` most probable tokens; 0 keeps all.
        max_tokens: at most this many tokens are sampled in a turn.

    Raises:
        ConfigurationError: a value is outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0, "0 (greedy) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or above"),
            ("max_tokens", self.max_tokens >= 1, "1 or above"),
        )
        for name, holds, remedy in checks:
            if not holds:
                raise ConfigurationError(f"sampling.{name} is {getattr(self, name)!r}; it must be {remedy}")

    @property
    def truncated(self) -> bool:
        """True if samples come from another distribution than the softmax at this temperature."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class SampleRequest:
    """One turn to generate.

    Args:
        token_ids: the whole context, from the first token of the conversation.
        policy: name of the weights to use.
        seed: all the randomness of this request; see :mod:`mrlm_pl.seeding`.
        sampling: the distribution to draw from.
        stop_ids: a sampled token among these ends the turn; it is part of the sample.
        session: key under which the engine may keep the context's key/value cache for the next turn; empty keeps none.
        offset: how many tokens of this turn were drawn before. They stand at the end of ``token_ids``, count in
            ``sampling.max_tokens``, and the randomness goes on behind theirs.
        piece: sample at most so many tokens now; a turn that is cut there has the finish reason ``length``. None: the
            whole turn.
    """

    token_ids: tuple[int, ...]
    policy: str
    seed: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    session: str = ""
    offset: int = 0
    piece: int | None = None


@dataclass(frozen=True)
class Sample:
    """A generated turn of one request.

    Args:
        token_ids: the sampled tokens, the stop token included when there is one; at least one.
        logprobs: natural-log probability of each token under the distribution it was drawn from.
        finish_reason: ``stop`` when a stop token ended it, ``length`` when ``max_tokens`` did.
        version: version of the weights that produced the tokens, the oldest where there are several.
        engine: name of the engine.
        spans: the tokens in stretches of one version and engine each, where there are several; else empty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    engine: str
    spans: tuple[TokenSpan, ...] = ()


class Engine(ABC):
    """Generates for named policies. Engines never tokenize text."""

    @abstractmethod
    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one :class:`Sample` per request, in order.

        Raises:
            EngineError: a policy is not loaded, a context is empty or does not fit the model's window.
        """

    @abstractmethod
    def load(self, policy: str, weights: Any, version: int) -> None:
        """Make ``weights`` the current ones of ``policy``; caches of older versions are dropped.

        Args:
            policy: the name that requests use.
            weights: what the engine can read; for the in-process engine a ``transformers`` causal LM module.
            version: number stored in every sample made from now on.
        """

    def join_pool(self, place: int, places: int) -> Sequence[str]:
        """Become the engine of one of several workers, before the first :meth:`load`; what no other may have too.

        Args:
            place: the worker's number, from 0.
            places: how many workers there are.

        Raises:
            ConfigurationError: the engine cannot be one of so many.
        """
        return ()

    @property
    def calls_at_once(self) -> int:
        """Calls of :meth:`sample` that a pool should have under way at the same time; the others wait."""
        return 1

    @property
    def stats(self) -> Any:
        """Counters since the engine was made, a dataclass; None where it counts nothing."""
        return None

    def meet_learner(self, place: LearnerPlace) -> None:
        """Take note of where the learner computes, before the first :meth:`load`; most engines do not care."""

    @property
    def holds_weights(self) -> bool:
        """True if the engine holds a copy of the weights: later changes of the loaded module have no effect."""
        return True

    @property
    def takes_pieces(self) -> bool:
        """True if requests may have an ``offset`` and a ``piece``; valid after the first :meth:`load`."""
        return False

    def window(self, policy: str) -> int | None:
        """Return the longest context of the policy in tokens, sampled ones included; None if it is not known."""
        return None

    def reports_logprobs(self, policy: str) -> bool:
        """Return whether samples of the policy have log-probabilities that can be trained on; else they are 0.

        A pool knows after the first :meth:`load`; so it is asked again then.
        """
        return True

    def precision(self, policy: str) -> str | None:
        """Return the floating-point type in which the policy's samples are computed, such as ``bfloat16``.

        None where it is that of the weights given to :meth:`load`; ``unknown`` where nobody here can know. A pool knows
        after the first :meth:`load`.
        """
        return None

    def compute_during(self, start: Callable[[], Future[T]]) -> T:
        """The result of the future that ``start`` gives; until then, the engine may compute in the calling thread."""
        return start().result()

    def release(self, session_prefix: str) -> None:
        """Forget the caches of all sessions whose key begins with ``session_prefix``; unknown keys are fine."""

    def close(self) -> None:
        """Free the engine's resources; may be called twice."""


class EngineWrapper(Engine):
    """An engine over another one: every hook that a subclass does not define is the other engine's.

    Args:
        engine: the other one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return await self.engine.sample(requests)

    def load(self, policy: str, weights: Any, version: int) -> None:
        self.engine.load(policy, weights, version)


def _handed_on(name: str, hook: Any) -> Any:
    if isinstance(hook, property):
        return property(lambda wrapper: getattr(wrapper.engine, name), doc=hook.__doc__)
    return functools.wraps(hook)(lambda wrapper, *given, **named: getattr(wrapper.engine, name)(*given, **named))


for _name, _hook in vars(Engine).items():
    if not _name.startswith("_") and _name not in vars(EngineWrapper):
        setattr(EngineWrapper, _name, _handed_on(_name, _hook))
