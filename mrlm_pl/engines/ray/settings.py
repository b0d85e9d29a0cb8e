"""Settings of a pool of workers: resources to reserve, transfer of weights, deadlines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.ray.cluster import Strategy
from mrlm_pl.engines.transfer.broadcast import Transport
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, Settings, at_least


@dataclass(frozen=True)
class PoolResources(Settings):
    """Resources that Ray reserves, all at once (a placement group).

    Args:
        cpus: CPUs of each worker, and its number of threads; fractions are allowed.
        gpus: GPUs of each worker; with 0.5, two workers share one, with 0 they compute on CPUs.
        learner_cpus: CPUs on the learner's machine that Ray keeps free.
        learner_gpus: GPUs that Ray keeps free for each process of the learner; a worker that is given one on which it
            computes all the same is refused. A Ray that is started here never uses the learner's GPUs.
        share_learner_gpus: let workers use a fraction of the learner's GPU.
        strategy: place the workers on few machines (``PACK``) or on many (``SPREAD``), if possible; with ``STRICT_`` it
            is required.

    Raises:
        ConfigurationError: an amount is below 0, or a number of GPUs above 1 is not whole.
    """

    cpus: NonNegativeFloat = 1.0
    gpus: NonNegativeFloat = 0.0
    learner_cpus: NonNegativeFloat = 0.0
    learner_gpus: NonNegativeFloat = 0.0
    share_learner_gpus: bool = False
    strategy: Strategy = "PACK"

    def __post_init__(self) -> None:
        for name, amount in (("gpus", self.gpus), ("learner_gpus", self.learner_gpus)):
            if amount > 1 and amount % 1:
                raise ConfigurationError(
                    f"resources.{name} is {amount}; above 1 it must be whole: fractions are of one GPU"
                )

    @property
    def worker(self) -> dict[str, float]:
        """Ray's bundle for a worker; an empty one cannot be reserved, so it asks for a trace of a CPU."""
        return {"CPU": self.cpus or (0.0 if self.gpus else 0.001), "GPU": self.gpus}

    def bundles(self, workers: int, learner_host: str) -> list[dict[str, float]]:
        """Return the bundles of the workers, then that of the learner if it has one."""
        requested = [self.worker] * workers
        if self.learner_cpus or self.learner_gpus:
            requested.append({"CPU": self.learner_cpus, "GPU": self.learner_gpus, f"node:{learner_host}": 0.001})
        return requested


@dataclass(frozen=True)
class WeightTransfer(Settings):
    """The transfer of weights to the workers.

    Args:
        bucket_bytes: bytes sent at a time.
        transport: ``gloo`` sends from CPU memory, ``nccl`` between GPUs. None is ``nccl`` if the learner and every
            worker have whole GPUs of their own.

    Raises:
        ConfigurationError: a bucket is too small.
    """

    bucket_bytes: Annotated[int, at_least(16)] = 2**23
    transport: Transport | None = None

    def between(self, learner: LearnerPlace, resources: PoolResources) -> Transport:
        """Return the transport from the learner to workers with these resources."""
        apart = bool(learner.devices) and resources.gpus >= 1 and not resources.share_learner_gpus
        return self.transport or ("nccl" if apart else "gloo")


@dataclass(frozen=True)
class PoolDeadlines(Settings):
    """Deadlines in seconds.

    Args:
        start: deadline of starting or joining Ray, and of starting the workers.
        sample: deadline of a worker's answer; a late worker is replaced.
        transfer: deadline of joining the group of receivers, and of each bucket.
        silence: deadline of the cluster's head to answer again.

    Raises:
        ConfigurationError: a deadline is not above 0.
    """

    start: PositiveFloat = 180.0
    sample: PositiveFloat = 1800.0
    transfer: PositiveFloat = 120.0
    silence: PositiveFloat = 10.0
