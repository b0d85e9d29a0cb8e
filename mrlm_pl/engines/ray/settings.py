"""Settings of a pool of workers: resources to reserve, transfer of weights, deadlines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrlm_pl.engines.learner_place import LearnerPlace
from mrlm_pl.engines.ray.cluster import Strategy
from mrlm_pl.engines.transfer.broadcast import Transport
from mrlm_pl.engines.transfer.manifest import ALIGNMENT
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import at_least, positive


@dataclass(frozen=True)
class PoolResources:
    """Resources that Ray reserves, all at once (a placement group).

    Args:
        cpus: CPUs of each worker, which is also how many threads it computes with; parts of one are allowed.
        gpus: GPUs of each worker; with 0.5, two workers share one, with 0 they compute on CPUs.
        learner_cpus: CPUs on the learner's machine that are kept free of what Ray starts.
        learner_gpus: GPUs likewise, for each process of the learner; they must be those that it computes on. A Ray
            that is started here has none of the learner's GPUs anyway.
        share_learner_gpus: let workers have a part of the GPU that the learner computes on.
        strategy: whether the workers are to be together on few machines (``PACK``) or apart (``SPREAD``); ``STRICT_``
            makes it a condition.

    Raises:
        ConfigurationError: an amount is below 0, or no whole number of GPUs above 1.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    learner_cpus: float = 0.0
    learner_gpus: float = 0.0
    share_learner_gpus: bool = False
    strategy: Strategy = "PACK"

    def __post_init__(self) -> None:
        amounts = {name: getattr(self, name) for name in ("cpus", "gpus", "learner_cpus", "learner_gpus")}
        at_least(0, "resources.", **amounts)
        for name in ("gpus", "learner_gpus"):
            if amounts[name] > 1 and amounts[name] % 1:
                raise ConfigurationError(
                    f"resources.{name} is {amounts[name]}; above 1 it must be whole: parts are of one GPU"
                )

    def in_own_ray(self) -> PoolResources:
        """Return the resources to reserve in a Ray that is started here, which manages no GPUs."""
        return replace(self, gpus=0.0, learner_gpus=0.0)

    @property
    def worker(self) -> dict[str, float]:
        """Ray's bundle for a worker; one of nothing cannot be reserved, so it asks for a trace of a CPU."""
        return {"CPU": self.cpus or (0.0 if self.gpus else 0.001), "GPU": self.gpus}

    def bundles(self, workers: int, learner_host: str) -> list[dict[str, float]]:
        """Return the bundles of the workers, then that of the learner if it has one."""
        own = [self.worker] * workers
        if self.learner_cpus or self.learner_gpus:
            own.append({"CPU": self.learner_cpus, "GPU": self.learner_gpus, f"node:{learner_host}": 0.001})
        return own


@dataclass(frozen=True)
class WeightTransfer:
    """The transfer of weights to the workers.

    Args:
        bucket_bytes: bytes that are sent at a time.
        transport: ``gloo`` sends from the CPU's memory, ``nccl`` between GPUs. None is ``nccl`` where the learner and
            every worker have whole GPUs of their own.

    Raises:
        ConfigurationError: a bucket is too small.
    """

    bucket_bytes: int = 2**23
    transport: Transport | None = None

    def __post_init__(self) -> None:
        at_least(ALIGNMENT, "transfer.", bucket_bytes=self.bucket_bytes)

    def between(self, learner: LearnerPlace, resources: PoolResources) -> Transport:
        """Return the transport from the learner to workers with these resources."""
        apart = bool(learner.devices) and resources.gpus >= 1 and not resources.share_learner_gpus
        return self.transport or ("nccl" if apart else "gloo")


@dataclass(frozen=True)
class PoolDeadlines:
    """Seconds that things may take.

    Args:
        start: Ray to start or to be joined, and the workers to be up.
        sample: a worker to answer a call; one that does not is replaced.
        transfer: workers to join, to receive one bucket, and to confirm.
        silence: the head of the cluster to answer again.

    Raises:
        ConfigurationError: one is not above 0.
    """

    start: float = 180.0
    sample: float = 1800.0
    transfer: float = 120.0
    silence: float = 10.0

    def __post_init__(self) -> None:
        positive("deadlines.", **vars(self))
