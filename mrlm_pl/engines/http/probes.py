"""Probes of a server's abilities, before a run relies on them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mrlm_pl.concurrency.calls import together
from mrlm_pl.engines.base import SampleRequest, Sampling
from mrlm_pl.engines.http.dialects import Dialect, Drawn, SglangDialect, VllmDialect, read_reply
from mrlm_pl.engines.http.replicas import RefusalError
from mrlm_pl.engines.http.text_dialect import TransformersDialect
from mrlm_pl.errors import ConfigurationError, MRLMError
from mrlm_pl.policy.sharding import world_size

logger = logging.getLogger(__name__)

Ask = Callable[[str, dict[str, Any] | None], Awaitable[Any]]
Choose = Callable[[tuple[str, ...]], str]

PROBES = ((1, 2, 3), (3, 1), (2,), (1, 1, 2, 3))
"""Contexts of the probes; one with two equally probable best continuations says nothing about temperatures."""

CLEAR = 0.02
"""Smallest difference of these two continuations, in nats, for a context to fit."""

WEIGHT_PROBE, TOLERANCE = SampleRequest(PROBES[0], "", 0, Sampling(temperature=0.0, max_tokens=8)), 0.5
"""The request for the comparison of weights, and the largest difference of their log-probabilities, in nats."""

TOP_ONE = SampleRequest(PROBES[0], "", 0, Sampling(temperature=2.0, top_k=1, max_tokens=8))
"""The request whose log-probabilities differ if the server reports those of another kind."""

MARKS, SAME = (WEIGHT_PROBE, TOP_ONE), 1e-3
"""The requests by which a server is recognized, and the largest difference of their log-probabilities, in nats."""


@dataclass(frozen=True)
class ServerFacts:
    """Facts about a server.

    Args:
        url: URL of the server.
        models: names of its models.
        window: context window in tokens; None if it is unknown.
        scaled: whether its log-probabilities are at the request's temperature.
        cut: whether its log-probabilities are those after top-k and top-p.
        greedy: tokens of its greedy samples for :data:`PROBES`; none where it exchanges text.
        marks: its answers to :data:`MARKS` with its current weights; none where it exchanges text.
    """

    url: str
    models: tuple[str, ...]
    window: int | None
    scaled: bool
    cut: bool
    greedy: tuple[tuple[int, ...], ...] = ()
    marks: tuple[Drawn, ...] = ()


def common_facts(servers: Collection[ServerFacts]) -> ServerFacts:
    """Return what holds for each of the servers, as any of them may answer a request."""
    windows = [facts.window for facts in servers if facts.window is not None]
    scaled, cut = all(facts.scaled for facts in servers), all(facts.cut for facts in servers)
    return replace(next(iter(servers)), window=min(windows, default=None), scaled=scaled, cut=cut)


async def check_server(ask: Ask, url: str, dialect: Dialect, choose: Choose) -> ServerFacts:
    """Return the facts of a server, from a few requests with token ids and log-probabilities.

    Args:
        ask: sends a path and a body to the server and returns the reply; without a body it is a GET.
        url: URL of the server.
        dialect: expected interface of the server.
        choose: returns the model to ask, given the server's models.

    Raises:
        ConfigurationError: the server has another interface, or gives no token ids or log-probabilities.
        PassingError: the server does not answer.
    """
    probe = _text_facts if isinstance(dialect, TransformersDialect) else _facts
    try:
        facts = await probe(ask, url, dialect, choose)  # type: ignore[arg-type]
    except (RefusalError, LookupError, AttributeError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigurationError(
            f"{url} does not answer as {dialect.name} does ({error}); check url, model and tokenizer, and "
            "data.engine.dialect"
        ) from error
    logger.info("%s: %s", url, facts)
    return facts


async def is_same(ask: Ask, facts: ServerFacts, dialect: Dialect, model: str) -> bool:
    """Return whether a server still is as these facts say, from its models and two samples.

    Raises:
        PassingError: it does not answer.
    """
    if not facts.marks:
        return False
    try:
        about, marks = await _about(ask, dialect), await marks_of(ask, dialect, model)
    except (MRLMError, LookupError, AttributeError, TypeError, ValueError):
        return False  # the whole check names the fault
    return about == (facts.models, facts.window) and all(map(_agree, marks, facts.marks))


def _agree(one: Drawn, other: Drawn) -> bool:
    apart = [abs(now - before) for now, before in zip(one.logprobs, other.logprobs, strict=False)]
    return (one.token_ids, one.version) == (other.token_ids, other.version) and max(apart, default=0.0) <= SAME


async def marks_of(ask: Ask, dialect: Dialect, model: str) -> tuple[Drawn, ...]:
    """Return a server's answers to :data:`MARKS`.

    Raises:
        PassingError: it does not answer.
        RemoteError: an answer does not follow the protocol.
    """
    answers = []
    for request in MARKS:  # one after the other: alone in a batch, a server rounds alike
        body = dialect.body(request, model, request.sampling.max_tokens, 0)
        answers.append(read_reply(dialect, await ask(dialect.path, body), request))
    return tuple(answers)


async def _about(ask: Ask, dialect: Dialect) -> tuple[tuple[str, ...], int | None]:
    """Return the names of a server's models, and the context window of the first in tokens; None if it is unknown."""
    entries = (await ask("/v1/models", None))["data"]
    window = entries[0].get("max_model_len")
    return tuple(entry["id"] for entry in entries), None if window is None else int(window) - dialect.spare_tokens


async def _facts(ask: Ask, url: str, dialect: VllmDialect | SglangDialect, choose: Choose) -> ServerFacts:
    models, window = await _about(ask, dialect)
    model = choose(models)

    async def first(request: SampleRequest) -> Drawn:
        body = dialect.body(request, model, request.sampling.max_tokens, 0)
        return dialect.read(await ask(dialect.path, body), request)

    async def spread(context: tuple[int, ...], temperature: float) -> float:
        body = dialect.body(_request(context, temperature=temperature), model, 1, 0)
        first, second = sorted(dialect.likeliest(await ask(dialect.path, dialect.probe(body))), reverse=True)[:2]
        return first - second

    greedy = [_request(context, temperature=0.0, max_tokens=8) for context in PROBES]
    *drawn, top_one = await together(map(first, [*greedy, TOP_ONE]))
    scaled = False
    for context in PROBES:
        at_one = await spread(context, 1.0)
        if at_one > CLEAR:  # doubling the temperature halves the distance between scaled log-probabilities
            at_two = await spread(context, 2.0)
            scaled = abs(at_two - at_one / 2) < abs(at_two - at_one)
            break
    cut = top_one.logprobs[0] > -1e-4  # the only token that is left has probability 1
    return ServerFacts(url, models, window, scaled, cut, tuple(one.token_ids for one in drawn), (drawn[0], top_one))


async def _text_facts(ask: Ask, url: str, dialect: TransformersDialect, choose: Choose) -> ServerFacts:
    models = (dialect.source,)
    request = _request(tuple(dialect.tokenizer("1")["input_ids"]), temperature=0.0)
    dialect.read(await ask(dialect.path, dialect.body(request, choose(models), 1, 0)), request)
    return ServerFacts(url, models, dialect.window, scaled=True, cut=True)


def _request(context: tuple[int, ...], **sampling: Any) -> SampleRequest:
    return SampleRequest(context, "", 0, Sampling(**{"max_tokens": 1} | sampling))


def only_model(models: tuple[str, ...], policy: str, targets: str) -> str:
    """Return the server's model of the policy's name, else its only one.

    Raises:
        ConfigurationError: the server has several others, or none.
    """
    if policy in models:
        return policy
    if len(models) == 1 or (models and not policy):
        return models[0]
    raise ConfigurationError(
        f"policy {policy!r}: {targets} has the models {', '.join(models) or 'none'}; name one in data.engine.model"
    )


def checked_folder(policy: str, folder: Path | None, targets: str) -> Path:
    """Return the folder of the written weights of a policy, if servers can get them.

    Args:
        policy: name of the trained policy.
        folder: folder of the written weights.
        targets: the servers, for messages.

    Raises:
        ConfigurationError: servers cannot get the folder.
    """
    if folder is None:
        raise ConfigurationError(
            f"policy {policy!r} is trained, and the servers at {targets} do not get its weights; set the engine's "
            "weights_folder (data.engine.weights_folder) to a folder that they can read, or `trained: false` for the "
            "policy"
        )
    if world_size() > 1:
        raise ConfigurationError(
            f"policy {policy!r} is trained by {world_size()} processes, and weights are handed to servers by one; set"
            " trainer.devices to 1 or use another engine"
        )
    return folder


@torch.no_grad()
def check_weights(probe: Drawn, model: torch.nn.Module, targets: str, policy: str) -> float:
    """Compare a server's sample for :data:`WEIGHT_PROBE` with a model that should have the same weights.

    Returns the mean difference of their log-probabilities, in nats.

    Args:
        probe: the sample.
        model: a ``transformers`` causal LM.
        targets: the server, for messages.
        policy: the policy's name, for messages.

    Raises:
        ConfigurationError: the mean difference of the log-probabilities is above ``TOLERANCE``.
    """
    row = [*PROBES[0], *probe.token_ids]
    device = next(model.parameters()).device
    difference = f"a token {max(row)}"
    if max(row) < model.get_input_embeddings().weight.shape[0]:  # type: ignore[operator]
        logits = model(torch.tensor([row], device=device)).logits[0, len(PROBES[0]) - 1 : -1].float()
        model_logprobs = (
            logits.log_softmax(-1).gather(-1, torch.tensor(probe.token_ids, device=device)[:, None])[:, 0].cpu()
        )
        apart = (model_logprobs - torch.tensor(probe.logprobs)).abs().mean().item()
        if apart <= TOLERANCE:
            return apart
        difference = f"log-probabilities {apart:.2f} nats away"
    raise ConfigurationError(
        f"policy {policy!r}: {targets} has other weights than the policy's model ({difference}); start the server with "
        "that model, or name the served one in the policy"
    )
