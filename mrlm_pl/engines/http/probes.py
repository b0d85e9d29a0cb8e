"""Probes of a server's abilities, before a run relies on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrlm_pl.engines.base import SampleRequest, Sampling
from mrlm_pl.engines.http.dialects import Dialect, Drawn
from mrlm_pl.engines.http.replicas import RefusalError, Replica, Replicas
from mrlm_pl.engines.http.text_dialect import TransformersDialect
from mrlm_pl.errors import ConfigurationError

logger = logging.getLogger(__name__)

PROBES = ((1, 2, 3), (3, 1), (2,), (1, 1, 2, 3))
"""Contexts to ask with; one whose two best continuations are equally probable tells nothing of temperatures."""

CLEAR = 0.02
"""Nats between these two that make a context fit."""

PROBE_TOKENS, TOLERANCE = 8, 0.5
"""Tokens that a server's weights are compared on, and how far their log-probabilities may be apart, in nats."""


@dataclass(frozen=True)
class ServerFacts:
    """Facts about a server.

    Args:
        models: that it serves, by name.
        window: how many tokens a row can have; None if it does not say.
        scaled: whether its log-probabilities are those at the request's temperature.
        cut: whether they are those after top-k and top-p.
    """

    models: tuple[str, ...]
    window: int | None
    scaled: bool
    cut: bool


async def check_server(
    replicas: Replicas, replica: Replica, dialect: Dialect, choose: Callable[[tuple[str, ...]], str]
) -> ServerFacts:
    """Return the facts of a server, which takes token ids and gives them back with their log-probabilities.

    Args:
        replicas: whose connections are used.
        replica: the server.
        dialect: what it should be.
        choose: the model to ask, of those that it has.

    Raises:
        ConfigurationError: it is not what the dialect says, or cannot give token ids or log-probabilities.
        PassingError: it does not answer.
    """
    if isinstance(dialect, TransformersDialect):
        return await _text_facts(replicas, replica, dialect, choose)
    try:
        listed = await replicas.once(replica, "/v1/models", None, "the check of the server")
        entries = listed["data"]
        models = tuple(entry["id"] for entry in entries)
        window = entries[0].get("max_model_len")
        asked = _Asked(replicas, replica, dialect, choose(models))
        await asked.check_tokens()
        scaled, cut = await asked.is_scaled(), await asked.is_cut()
    except (RefusalError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{replica.url} does not answer as {dialect.name} does ({error}); check url and data.engine.dialect"
        ) from error
    facts = ServerFacts(models, None if window is None else int(window), scaled, cut)
    logger.info("%s: %s", replica.url, facts)
    return facts


async def _text_facts(
    replicas: Replicas, replica: Replica, dialect: TransformersDialect, choose: Callable[[tuple[str, ...]], str]
) -> ServerFacts:
    codec = dialect.codec
    models = (codec.source,)
    start = tuple(codec.tokenizer("1")["input_ids"])
    request = SampleRequest(start, "", 0, Sampling(temperature=0.0, max_tokens=1))
    try:
        reply = await replicas.once(
            replica, dialect.path, dialect.body(request, choose(models), 1, 0), "the check of the server"
        )
    except RefusalError as error:
        raise ConfigurationError(
            f"{replica.url} does not answer as `transformers serve` does ({error}); check url, model and tokenizer"
        ) from error
    dialect.read(reply, request)
    return ServerFacts(models, codec.window, scaled=True, cut=True)


@dataclass(frozen=True)
class _Asked:
    """Questions to a server with token ids."""

    replicas: Replicas
    replica: Replica
    dialect: Dialect
    model: str

    async def check_tokens(self) -> None:
        """Raises if a reply has no token ids, or no log-probabilities."""
        request = _request(PROBES[0])
        self.dialect.read(await self._reply(request), request)

    async def is_scaled(self) -> bool:
        """Return whether doubling the temperature halves the distance between log-probabilities."""
        for context in PROBES:
            at_one = self.dialect.spread(await self._reply(_request(context), probe=True))
            if at_one > CLEAR:
                at_two = self.dialect.spread(await self._reply(_request(context, temperature=2.0), probe=True))
                return abs(at_two - at_one / 2) < abs(at_two - at_one)
        return False

    async def is_cut(self) -> bool:
        """Return whether the only token that top-k leaves has probability 1."""
        request = _request(PROBES[0], top_k=1)
        return self.dialect.read(await self._reply(request), request).logprobs[0] > -1e-4

    async def _reply(self, request: SampleRequest, probe: bool = False) -> Any:
        body = self.dialect.body(request, self.model, 1, 0)
        return await self.replicas.once(
            self.replica, self.dialect.path, self.dialect.probe(body) if probe else body, "the check of the server"
        )


def _request(context: tuple[int, ...], **sampling: Any) -> SampleRequest:
    return SampleRequest(context, "", 0, Sampling(max_tokens=1, **sampling))


def only_model(models: tuple[str, ...], policy: str, targets: str) -> str:
    """Return the server's model of the policy's name, else its only one.

    Raises:
        ConfigurationError: it has several others, or none.
    """
    if policy in models:
        return policy
    if len(models) == 1 or (models and not policy):
        return models[0]
    raise ConfigurationError(
        f"policy {policy!r}: {targets} has the models {', '.join(models) or 'none'}; name one in data.engine.model"
    )


def check_can_hand_over(
    policy: str, others: Sequence[str], folder: Path | None, dialect: Dialect, targets: str
) -> None:
    """Check that servers can get the weights of a policy.

    Args:
        policy: that is trained.
        others: whose weights these servers have as well.
        folder: where weights are written.
        dialect: of the servers.
        targets: the servers, for messages.

    Raises:
        ConfigurationError: they cannot.
    """
    if folder is None:
        raise ConfigurationError(
            f"policy {policy!r} is trained, and the servers at {targets} do not get its weights; set the engine's "
            "weights_folder (data.engine.weights_folder) to a folder that they can read, or `trained: false` for the "
            "policy"
        )
    if others and dialect.name != "transformers":
        raise ConfigurationError(
            f"policies {others[0]!r} and {policy!r} are both trained, and {targets} holds one model; use the "
            "in-process engine, or a server that serves one of them (served_by)"
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        raise ConfigurationError(
            f"policy {policy!r} is trained by {torch.distributed.get_world_size()} processes, and weights are handed "
            "to servers by one; set trainer.devices to 1 or use another engine"
        )


def probe_request(policy: str) -> SampleRequest:
    """Return a request whose answer :func:`check_weights` compares."""
    return SampleRequest(PROBES[0], policy, 0, Sampling(temperature=0.0, max_tokens=PROBE_TOKENS))


@torch.no_grad()
def check_weights(probe: Drawn, model: torch.nn.Module, targets: str, policy: str) -> None:
    """Compare what a server sampled for :func:`probe_request` with a model that should be the same.

    Args:
        probe: a server's answer.
        model: a ``transformers`` causal LM.
        targets: the server, for messages.
        policy: the policy's name, for messages.

    Raises:
        ConfigurationError: the mean difference of the log-probabilities is above ``TOLERANCE``.
    """
    row = [*PROBES[0], *probe.token_ids]
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if max(row) < vocabulary:
        logits = model(torch.tensor([row], device=device)).logits[0, len(PROBES[0]) - 1 : -1].float()
        own = logits.log_softmax(-1).gather(-1, torch.tensor(probe.token_ids, device=device)[:, None])[:, 0].cpu()
        apart = (own - torch.tensor(probe.logprobs)).abs().mean().item()
    if max(row) >= vocabulary or apart > TOLERANCE:
        found = f"a token {max(row)}" if max(row) >= vocabulary else f"log-probabilities {apart:.2f} nats away"
        raise ConfigurationError(
            f"policy {policy!r}: {targets} has other weights than the policy's model ({found}); start the server with "
            "that model, or name the served one in the policy"
        )
