"""The engine contract: token ids in; sampled tokens and their log-probabilities out."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from mrlm_pl.concurrency.event_loop import result_of
from mrlm_pl.episode import TokenSpan
from mrlm_pl.errors import ConfigurationError, EngineError, counted, did_you_mean
from mrlm_pl.settings import (
    ChecksArguments,
    FractionAboveZero,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Settings,
    check_ranges,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
FinishReason = Literal["stop", "length"]
Precision: TypeAlias = Literal["32-true", "bf16-mixed"]
"""The precision in which turns are generated, as Lightning names it."""

LARGEST_LOGPROB = 1e-3
"""Bound on the log-probability of a token: rounding may lift it above 0."""


@dataclass(frozen=True)
class PolicySampling(Settings):
    """Sampling settings of one policy; None is the run's setting.

    Args:
        temperature, top_p, top_k, max_tokens, max_context: see :class:`Sampling`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    max_context: int | None = None

    def given(self) -> dict[str, Any]:
        """Return the settings that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Sampling(Settings):
    """Sampling settings: the distribution is ``softmax(logits / temperature)``, truncated by top-k, then by top-p.

    Args:
        temperature: divides the logits; 0 takes the most probable token, with its log-probability at temperature 1.
        top_p: keep the smallest set of most probable tokens whose mass reaches ``top_p``; 1 keeps all.
        top_k: keep the ``top_k`` most probable tokens; 0 keeps all.
        max_tokens: maximum number of tokens in a turn.
        max_context: maximum number of tokens in an agent's context: prompt, turns and observations. It shortens the
            last turn; the episode is then truncated, with the stop reason ``context_window``. None is the model's
            context window.
        policies: settings that replace these for individual policies, by name; see :meth:`of`.

    Raises:
        ConfigurationError: a value is outside its range, or a policy's setting does not exist.
    """

    temperature: NonNegativeFloat = 1.0
    top_p: FractionAboveZero = 1.0
    top_k: NonNegativeInt = 0
    max_tokens: PositiveInt = 128
    max_context: PositiveInt | None = None
    policies: Mapping[str, PolicySampling] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, own in self.policies.items():
            check_ranges(Sampling, f"sampling.policies.{name}.", **own.given())

    def of(self, policy: str) -> Sampling:
        """Return the settings of one policy.

        >>> Sampling(top_k=5, policies={"solver": {"temperature": 0.7}}).of("solver")
        Sampling(temperature=0.7, top_p=1.0, top_k=5, max_tokens=128, max_context=None, policies={})
        """
        if not self.policies:
            return self
        return replace(self, policies={}, **self.policies.get(policy, PolicySampling()).given())

    def for_all(self, **settings: Any) -> Sampling:
        """Return these settings with others in their place, for every policy."""
        policies = {
            name: replace(policy_settings, **dict.fromkeys(settings)) for name, policy_settings in self.policies.items()
        }
        return replace(
            self,
            **settings,
            policies={name: policy_settings for name, policy_settings in policies.items() if policy_settings.given()},
        )

    def check_policies(self, known: Collection[str], owner: str) -> None:
        """Validate the names of the policies with their own settings.

        Args:
            known: policies of the run.
            owner: the option, for messages.

        Raises:
            ConfigurationError: a policy does not exist; the message names the nearest one.
        """
        for name in self.policies:
            if name not in known:
                hint = did_you_mean(name, known, f"the policies are {sorted(known)}")
                raise ConfigurationError(f"{owner}.policies: there is no policy {name!r}; {hint}")

    def warn_of_windows(self, windows: Mapping[str, int], owner: str) -> None:
        """Warn of each policy whose context window is too short for a turn of ``max_tokens``.

        Args:
            windows: length of each policy's context in tokens, by name.
            owner: the option, for messages.
        """
        for name, window in windows.items():
            if (limit := self.of(name).max_tokens) >= window:
                logger.warning(
                    "%s.max_tokens is %d, but the context window of policy %r is %d tokens, prompts included; its "
                    "turns are truncated there",
                    owner,
                    limit,
                    name,
                    window,
                )


@dataclass(frozen=True)
class SampleRequest:
    """One turn to generate.

    Args:
        token_ids: the whole context, from the first token of the conversation.
        policy: name of the weights.
        seed: seed of all the randomness of this request; see :mod:`mrlm_pl.seeding`.
        sampling: the distribution to draw from.
        stop_ids: sampling one of these tokens ends the turn; it is part of the sample.
        session: key of the key/value cache for the next turn; empty keeps none.
        offset: number of this turn's tokens that were drawn before. They are the end of ``token_ids``, count in
            ``sampling.max_tokens``, and the random numbers continue after theirs.
        chunk_tokens: maximum number of tokens to sample now; a turn that reaches it has the finish reason ``length``.
            None: the whole turn.
    """

    token_ids: tuple[int, ...]
    policy: str
    seed: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    session: str = ""
    offset: int = 0
    chunk_tokens: int | None = None

    def limit(self, window: int | None) -> int:
        """Return how many tokens may be sampled in a model with this context window; None: it has no bound.

        Raises:
            EngineError: the context is empty or fills the window, or the offset leaves no token to sample.
        """
        if not self.token_ids:
            raise EngineError(f"a request for policy {self.policy!r} has an empty context; give at least one token")
        most = self.sampling.max_tokens - self.offset
        if most < 1 or self.offset < 0:
            raise EngineError(
                f"a request for policy {self.policy!r} has the offset {self.offset} in a turn of at most "
                f"{self.sampling.max_tokens} tokens; it must be 0 or above, and leave a token to sample"
            )
        room = most if window is None else window - len(self.token_ids)
        if room < 1:
            raise EngineError(
                f"a context of {len(self.token_ids)} tokens leaves no room in the {window}-token window of policy "
                f"{self.policy!r}; shorten the conversation or use a model, or a server, with a longer window"
            )
        return min(room, most, most if self.chunk_tokens is None else self.chunk_tokens)


@dataclass(frozen=True)
class Sample:
    """A generated turn.

    Args:
        token_ids: sampled tokens, including the stop token; at least one.
        logprobs: natural-log probability of each token under the distribution it was drawn from.
        finish_reason: ``stop`` after a stop token, ``length`` after the most tokens.
        version: version of the weights; the oldest of several.
        engine: name of the engine.
        spans: consecutive tokens by version and engine where there are several; else empty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    engine: str
    spans: tuple[TokenSpan, ...] = ()


@dataclass(frozen=True)
class LearnerPlace:
    """The devices of a run's learner on this machine, and its precision.

    Args:
        devices: index of each process's GPU among the visible ones; empty on CPUs.
        process: number of this process among those of this machine.
        processes: number of processes on this machine.
        precision: the trainer's precision, such as ``bf16-mixed``.
    """

    devices: tuple[int, ...] = ()
    process: int = 0
    processes: int = 1
    precision: str = "32-true"

    @classmethod
    def of(cls, device: torch.device) -> LearnerPlace:
        """Return the place of a learner with a single process.

        >>> from torch import device
        >>> LearnerPlace.of(device("cuda:1")).devices, LearnerPlace.of(device("cpu")).devices
        ((1,), ())
        """
        return cls((device.index or 0,) if device.type == "cuda" else ())

    @classmethod
    def of_trainer(cls, trainer: Any) -> LearnerPlace:
        """Return the place of a run."""
        devices = tuple(trainer.device_ids) if trainer.strategy.root_device.type == "cuda" else ()
        return cls(devices, int(trainer.local_rank), int(trainer.num_devices), str(trainer.precision))

    @property
    def gpu(self) -> int:
        """Index of this process's GPU among the visible ones; 0 on CPUs."""
        return self.devices[self.process] if self.devices else 0

    def ids(self, visible: Sequence[str]) -> tuple[str, ...]:
        """Return the ids of its GPUs among the visible ones."""
        return tuple(visible[index] for index in self.devices)


class Engine(ChecksArguments, ABC):
    """Generates for named policies. Engines never tokenize text."""

    @abstractmethod
    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one :class:`Sample` per request, in order.

        Raises:
            EngineError: a policy is not loaded, a context is empty or does not fit the model's window.
        """

    @abstractmethod
    def load(self, policy: str, weights: Any, version: int) -> None:
        """Make ``weights`` the current ones of ``policy``; drop caches of older versions.

        Args:
            policy: name of the policy in requests.
            weights: weights of the type that the engine reads; for most a ``transformers`` causal LM.
            version: version of the weights, reported in samples.
        """

    def meet_learner(self, place: LearnerPlace) -> None:
        """Receive the learner's devices and precision, before the first :meth:`load`."""

    @property
    def holds_weights(self) -> bool:
        """True if the engine holds a copy of the weights, so that later changes of the loaded module have no effect."""
        return True

    @property
    def takes_chunks(self) -> bool:
        """True if requests may have an ``offset`` and ``chunk_tokens``; valid after the first :meth:`load`."""
        return False

    def window(self, policy: str) -> int | None:
        """Return the policy's context window in tokens, sampled ones included; None if it is unknown."""
        return None

    def reports_logprobs(self, policy: str) -> bool:
        """Return whether samples of the policy are the sampled token ids with their log-probabilities.

        Else they are encoded from text, with log-probabilities of 0, and training rejects them. A pool gives its final
        answer after the first :meth:`load`.
        """
        return True

    def servers(self, policy: str) -> Sequence[str]:
        """Return the URLs of servers that hold the policy's weights, where each holds those of one trained policy."""
        return ()

    def precision(self, policy: str) -> str | None:
        """Return the floating-point type in which the policy's samples are computed, such as ``bfloat16``.

        None is the type of the loaded weights; ``unknown`` is that of a server. A pool gives its final answer after the
        first :meth:`load`.
        """
        return None

    def compute_during(self, start: Callable[[], Future[T]]) -> T:
        """Return the result of the future from ``start``; until then the engine may compute in the calling thread."""
        return result_of(start())

    def release(self, session_prefix: str) -> None:
        """Drop the caches of all sessions whose key begins with ``session_prefix``; unknown keys are fine."""

    def close(self) -> None:
        """Free the engine's resources; may be called twice."""


async def sample_checked(engine: Engine, requests: Sequence[SampleRequest]) -> list[Sample]:
    """Return the engine's samples, one per request, in order.

    Raises:
        EngineError: the engine failed, or its samples break the contract of :meth:`Engine.sample`.
    """
    samples, name = await engine.sample(requests) or [], type(engine).__name__
    if len(samples) != len(requests):
        raise EngineError(f"{name} gave {counted(len(samples), 'sample')} for {counted(len(requests), 'request')}")
    for request, sample in zip(requests, samples, strict=True):
        tokens, logprobs = len(sample.token_ids), len(sample.logprobs)
        stops = [place for place, token in enumerate(sample.token_ids, 1) if token in request.stop_ids]
        if not tokens or tokens != logprobs or stops != [tokens] * (sample.finish_reason == "stop"):
            raise EngineError(
                f"{name} gave {logprobs} log-probabilities for {counted(tokens, 'token')}, stop tokens at {stops[:3]}"
                f" and finish reason {sample.finish_reason!r}; a sample has a token, a log-probability for each, "
                "and the reason 'stop' if its last token, and no other, is a stop token, else 'length'"
            )
        if wrong := [value for value in sample.logprobs if not -math.inf < value <= LARGEST_LOGPROB]:
            raise EngineError(f"{name} gave a log-probability of {wrong[0]}; it must be finite and at most 0")
    return samples


class EngineWrapper(Engine):
    """An engine over another one, which answers every hook that a subclass does not define.

    Args:
        engine: the other one.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def engine_of(self, policy: str) -> Engine:
        """Return the engine that generates for a policy."""
        return self.engine

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return await self.engine.sample(requests)

    def load(self, policy: str, weights: Any, version: int) -> None:
        self.engine_of(policy).load(policy, weights, version)


def _forwarded(name: str, hook: Any) -> Any:
    """Return the hook of a wrapper: that of the engine of the ``policy`` it takes, else that of the wrapped engine."""
    if isinstance(hook, property):
        return property(lambda wrapper: getattr(wrapper.engine, name), doc=hook.__doc__)
    if "policy" in inspect.signature(hook).parameters:
        return functools.wraps(hook)(lambda wrapper, policy: getattr(wrapper.engine_of(policy), name)(policy))
    return functools.wraps(hook)(
        lambda wrapper, *arguments, **named: getattr(wrapper.engine, name)(*arguments, **named)
    )


# A loop, so that a hook that Engine gains is forwarded too: a wrapper without it would answer with Engine's default.
for _name, _hook in vars(Engine).items():
    if not _name.startswith("_") and _name not in vars(EngineWrapper):
        setattr(EngineWrapper, _name, _forwarded(_name, _hook))
