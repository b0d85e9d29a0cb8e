"""Metrics of a server for Prometheus; needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mrlm_pl.errors import ConfigurationError

if TYPE_CHECKING:
    from mrlm_pl.serving.server import EnvironmentServer


def serve_metrics(server: EnvironmentServer, port: int) -> None:
    """Serve the server's metrics on a port of this machine.

    Raises:
        ConfigurationError: ``prometheus-client`` is not installed, or the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ConfigurationError("metrics_port: install the extra, `pip install 'mrlm[metrics]'`") from error
    registry = CollectorRegistry()
    registry.register(_ServerCollector(server))
    try:
        start_http_server(int(port), "127.0.0.1", registry)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"metrics_port: cannot listen on port {port}: {error}; use another") from error


class _ServerCollector:
    def __init__(self, server: EnvironmentServer) -> None:
        self.server = server

    def collect(self) -> Iterator[Any]:
        """Yield the numbers as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        service, workers = self.server.service, self.server.workers
        yield GaugeMetricFamily("mrlm_sessions", "Live sessions.", len(service.sessions))
        yield GaugeMetricFamily("mrlm_queue", "Calls that wait for a thread.", workers.waiting)
        yield GaugeMetricFamily("mrlm_stuck_threads", "Calls that outlived their deadline.", workers.abandoned)
        yield CounterMetricFamily("mrlm_sessions_opened", "Sessions opened.", service.sessions.opened_total)
        yield CounterMetricFamily("mrlm_sessions_expired", "Sessions whose lease ran out.", service.expired_total)
        yield CounterMetricFamily("mrlm_steps", "Steps made.", service.steps_total)
        yield CounterMetricFamily("mrlm_steps_failed", "Steps that outlived their deadline.", service.failed_total)
        verifier = self.server.verifier
        if verifier is not None:
            yield GaugeMetricFamily("mrlm_verifier_queue", "Conversations that wait for a score.", verifier.waiting)
            yield CounterMetricFamily("mrlm_verifier_scores", "Conversations scored.", verifier.scored_total)
            yield CounterMetricFamily("mrlm_verifier_batches", "Calls of the model.", verifier.batches_total)
            yield CounterMetricFamily("mrlm_verifier_refused", "Requests refused.", verifier.refused_total)
