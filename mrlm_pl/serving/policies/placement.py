"""Policies of a run whose weights are on a server: their engines, and the check of the server's models."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mrlm_pl.engines.base import Engine
from mrlm_pl.engines.http.engine import OpenAICompatible
from mrlm_pl.engines.http.replicas import Terms
from mrlm_pl.engines.routing import RoutingEngine
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.serving.policies.engine import RemoteEngine
from mrlm_pl.serving.transport.security import identity_of_environment

if TYPE_CHECKING:
    from mrlm_pl.policy import Policy

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 300.0
"""Seconds to wait for a server that does not answer; it may be restarted in that time."""

KEY_VARIABLE = "MRLM_API_KEY"
"""Environment variable with the key of servers that speak HTTP, where they want one."""


def with_served(engine: Engine, policies: Mapping[str, Policy]) -> Engine:
    """Return the engine, or one that routes policies with ``served_by`` to their servers.

    Args:
        engine: engine of all other policies.
        policies: policies of the run, by name; the server has each served one under the same name.

    Raises:
        ConfigurationError: a server has no policy of that name, or it has another vocabulary; or a file for TLS
            is missing or wrong.
        RemoteError: a server does not answer.
    """
    served = {name: policy.served_by for name, policy in policies.items() if policy.served_by is not None}
    if not served:
        return engine
    over_http: dict[str, Engine] = {
        name: _over_http(name, address, policies[name]) for name, address in served.items() if "://" in address
    }
    addresses = {name: address for name, address in served.items() if name not in over_http}
    identity = identity_of_environment()
    by_address = {
        address: RemoteEngine(address, identity=identity, seconds=ANSWER_SECONDS)
        for address in sorted(set(addresses.values()))
    }
    descriptions = {address: remote.described() for address, remote in by_address.items()}
    for name, address in addresses.items():
        description = descriptions[address].get(name)
        if description is None:
            names = ", ".join(descriptions[address]) or "none"
            raise ConfigurationError(
                f"policies.{name}.served_by: {address} has no policy {name!r}; there are: {names}; "
                f"start it with `mrlm serve --policies '{{{name}: MODEL}}'`"
            )
        if description.vocabulary != policies[name].vocabulary_digest:
            raise ConfigurationError(
                f"policies.{name}.model: {policies[name].name_or_path!r} has another vocabulary than "
                f"{description.model!r}, which {address} serves as {name!r}: the same number would be another token; "
                "name the served model here"
            )
    return RoutingEngine(engine, over_http | {name: by_address[address] for name, address in addresses.items()})


def _over_http(name: str, address: str, policy: Policy) -> OpenAICompatible:
    """Return the engine of a policy that an OpenAI-compatible server has, which is checked."""
    dialect, _, url = address.rpartition("+")
    engine = OpenAICompatible(
        url,
        dialect or "vllm",  # type: ignore[arg-type]
        tokenizer=policy.source if dialect == "transformers" else None,
        api_key_env=KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None,
        terms=Terms(patience_seconds=ANSWER_SECONDS),
    )
    engine.check(name)
    logger.warning("the vocabulary of policy %r at %s cannot be checked; it must be that of its `model`", name, url)
    return engine
