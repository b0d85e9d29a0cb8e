"""Policies of a run whose weights are on a server: their engines, and the check that the server has what is meant."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mrlm_pl.engines.base import Engine
from mrlm_pl.engines.routing import RoutingEngine
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.remote.policy_service import RemoteEngine

if TYPE_CHECKING:
    from mrlm_pl.policy import Policy

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 300.0
"""How long a server that does not answer is waited for, in which it may be started again."""


def with_served(engine: Engine, policies: Mapping[str, Policy]) -> Engine:
    """The engine, or one that asks servers for the policies that are ``served_by`` one.

    Args:
        engine: of all other policies.
        policies: those of a run, by name; a server has a policy under the same name.

    Raises:
        ConfigurationError: a server has no policy of that name, or it has another vocabulary.
        RemoteError: a server does not answer.
    """
    places = {name: policy.served_by for name, policy in policies.items() if policy.served_by is not None}
    if not places:
        return engine
    by_address = {address: RemoteEngine(address, seconds=ANSWER_SECONDS) for address in sorted(set(places.values()))}
    for address, remote in by_address.items():
        described = remote.described()
        for name in (name for name, place in places.items() if place == address):
            if name not in described:
                there = ", ".join(described) or "none"
                raise ConfigurationError(
                    f"policies.{name}.served_by: {address} has no policy {name!r}; there are: {there}; "
                    f"start it with `mrlm serve --policies '{{{name}: MODEL}}'`"
                )
            _check_vocabulary(name, policies[name], address, described[name].model, described[name].vocabulary)
    return RoutingEngine(engine, {name: by_address[address] for name, address in places.items()})


def _check_vocabulary(name: str, policy: Policy, address: str, model: str, vocabulary: str) -> None:
    if not vocabulary:
        logger.warning("%s does not tell the vocabulary of policy %r, which so cannot be checked", address, name)
    elif vocabulary != policy.vocabulary_digest:
        raise ConfigurationError(
            f"policies.{name}.model: {policy.name_or_path!r} has another vocabulary than {model!r}, which {address} "
            f"serves as {name!r}: the same number would be another token; name the served model here"
        )
