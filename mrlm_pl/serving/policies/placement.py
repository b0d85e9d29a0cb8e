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
from mrlm_pl.grouping import grouped
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
    served = grouped((policy.served_by, name) for name, policy in policies.items() if policy.served_by is not None)
    elsewhere: dict[str, Engine] = {}
    for address, names in served.items():
        if "://" in address:
            elsewhere |= {name: _over_http(name, address, policies[name]) for name in names}
            continue
        remote = RemoteEngine(address, identity=identity_of_environment(), seconds=ANSWER_SECONDS)
        descriptions = remote.described()
        for name in names:
            if name not in descriptions:
                raise ConfigurationError(
                    f"policies.{name}.served_by: {address} has no policy {name!r}; there are: "
                    f"{', '.join(descriptions) or 'none'}; start it with `mrlm serve --policies '{{{name}: MODEL}}'`"
                )
            if descriptions[name].vocabulary != policies[name].vocabulary_digest:
                raise ConfigurationError(
                    f"policies.{name}.model: {policies[name].name_or_path!r} has another vocabulary than "
                    f"{descriptions[name].model!r}, which {address} serves as {name!r}: the same number would be "
                    "another token; name the served model here"
                )
            elsewhere[name] = remote
    return RoutingEngine(engine, elsewhere) if elsewhere else engine


def _over_http(name: str, address: str, policy: Policy) -> OpenAICompatible:
    """Return the engine of a policy that an OpenAI-compatible server has, which is checked."""
    dialect, _, url = address.rpartition("+")
    model = policy.source + f"@{policy.revision}" * (policy.revision != "main")
    engine = OpenAICompatible(
        url,
        dialect or "vllm",  # type: ignore[arg-type]
        tokenizer=model if dialect == "transformers" else None,
        api_key_env=KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None,
        terms=Terms(patience_seconds=ANSWER_SECONDS),
    )
    engine.check(name)
    logger.warning("the vocabulary of policy %r at %s cannot be checked; it must be that of its `model`", name, url)
    return engine
