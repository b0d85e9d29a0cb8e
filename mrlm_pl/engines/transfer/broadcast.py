"""Weights from the learner to engines in other processes: named tensors, in buckets, over their own group.

A sender and its receivers agree on a :class:`Manifest`. The sender broadcasts the bytes of one tensor after the other,
small ones joined and large ones cut into buckets; receivers collect them in memory beside the serving weights, and
verify the checksum of every tensor. Their models change in :func:`install` alone. Groups meet in the sender's
key/value store, behind the invitation's secret, and never use the default group of ``torch.distributed``: members can
change, and training is not affected.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mrlm_pl.concurrency.calls import in_daemon
from mrlm_pl.engines.transfer.manifest import Manifest, checksum
from mrlm_pl.engines.transfer.store_gate import StoreGate, reached_store
from mrlm_pl.errors import EngineError, first_line

Transport = Literal["gloo", "nccl"]

_AT_ONCE = 2  # buckets under way; more were not faster
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Invitation:
    """The terms of joining a group of processes, which is used until something in it fails.

    Args:
        host: host of the gate of the sender's store.
        port: port of the gate.
        secret: secret that opens the gate.
        group: name of the group.
        members: number of processes in the group; the sender is rank 0.
        seconds: deadline of joining and of each bucket.
        transport: ``gloo`` for CPU memory, ``nccl`` for GPU memory.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    group: str
    members: int
    seconds: float
    transport: Transport = "gloo"


class _Member:
    """A process in a group, which it leaves after any failure."""

    def __init__(self) -> None:
        self._joined: tuple[str, Any] = ("", None)
        self._weight = ""  # that is under way

    @contextmanager
    def _group(self, invitation: Invitation, manifest: Manifest, done: str, join: Callable[[], Any]) -> Iterator[Any]:
        """Yield the process group, once ``join`` has returned it; its errors are ``EngineError`` and name the weight.

        Leaving closes the connections on which other members wait for the next bucket.
        """
        self._weight = manifest.tensors[0].name if manifest.tensors else "none"
        try:
            if self._joined[0] != invitation.group:
                self._joined = invitation.group, join()
            yield self._joined[1]
        except BaseException as error:  # also an interrupt: others wait for the connections to close
            self._joined = "", None
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise EngineError(
                f"weight {self._weight!r} not {done}: a member of {invitation.group} is gone or silent for "
                f"{invitation.seconds:g} s ({first_line(error)})"
            ) from error

    def _broadcast(self, group: Any, parts: Iterable[tuple[str, Tensor]], seconds: timedelta) -> None:
        """Broadcast parts of weights, by name, from the sender; the next one is on its way before one has arrived."""
        under_way: list[Any] = []
        for self._weight, part in parts:
            if len(under_way) == _AT_ONCE:
                under_way.pop(0).wait(seconds)
            under_way.append(group.broadcast(part, 0, seconds))
        for work in under_way:
            work.wait(seconds)


class WeightSender(_Member):
    """The learner's side.

    Args:
        host: address of this process for the receivers.
        seconds: deadline of joining and of each bucket.
        transport: ``gloo`` for CPU memory, ``nccl`` for GPU memory.
        gpu: index of the learner's GPU; other threads than the learner's have another current one.

    Raises:
        ConfigurationError: this machine has no address ``host``.
    """

    def __init__(
        self, host: str = "127.0.0.1", seconds: float = 120.0, transport: Transport = "gloo", gpu: int = 0
    ) -> None:
        super().__init__()
        self.host, self.seconds, self.transport = host, seconds, transport
        self._device = memory_of(transport, gpu)
        self._secret = secrets.token_hex(32)
        self._gate = StoreGate(host, self._secret, seconds)
        self._numbers = itertools.count()

    def invite(self, receivers: int) -> Invitation:
        """Return an invitation to a new group with this many receivers, ranks from 1; leave the group before it."""
        self._joined = "", None
        group = f"weights-{next(self._numbers)}"
        return Invitation(self.host, self._gate.port, self._secret, group, receivers + 1, self.seconds, self.transport)

    def send(
        self,
        invitation: Invitation,
        manifest: Manifest,
        source: Callable[[str], Tensor],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Send tensors; each receiver's :meth:`WeightReceiver.receive` says whether they arrived.

        Args:
            invitation: invitation to the group; the receivers have the same one.
            manifest: manifest of the tensors; the receivers have the same one.
            source: returns the bytes of a tensor by name.
            check: called while receivers join; its errors end the wait.

        Raises:
            EngineError: a receiver did not join or is gone. The group is then unusable.
        """
        with self._group(invitation, manifest, "sent", partial(self._gather, invitation, check)) as group:
            blocks = (
                (block[0].name, self._in_one([source(item.name) for item in block])) for block in manifest.blocks()
            )
            parts = ((name, part.to(self._device)) for name, data in blocks for part in manifest.buckets(data))
            self._broadcast(group, parts, timedelta(seconds=invitation.seconds))

    def _in_one(self, block: Sequence[Tensor]) -> Tensor:
        return block[0] if len(block) == 1 else torch.cat([data.to(self._device) for data in block])

    def close(self) -> None:
        """Leave the group and close the gate; may be called twice. The sender cannot be used afterwards."""
        self._joined = "", None
        self._gate.close()

    def _gather(self, invitation: Invitation, check: Callable[[], None]) -> Any:
        """Return the process group, once all receivers are connected.

        Connecting to a dead member takes long, so connecting begins when all have come.
        """
        store, begins = self._gate.store, ""
        try:
            for rank in range(1, invitation.members):
                deadline = time.monotonic() + invitation.seconds
                while not store.check([f"{invitation.group}/here/{rank}"]):
                    check()
                    if time.monotonic() > deadline:
                        raise EngineError(
                            f"receiver {rank} of the weights did not join the group within {invitation.seconds:g} s; "
                            "check that it lives and reaches this process, or raise the deadline"
                        )
                    time.sleep(_POLL_SECONDS)
            begins = "yes"
        finally:
            store.set(f"{invitation.group}/begin", begins)
        return _join(store, invitation, 0)


def check_fit(staged: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Validate that tensors fit ``targets`` of the same names.

    Raises:
        EngineError: a name, shape or dtype differs.
    """
    for name, tensor in staged.items():
        target = targets.get(name)
        if target is None or target.dtype != tensor.dtype or target.shape != tensor.shape:
            difference = "no such tensor" if target is None else f"{target.dtype} {tuple(target.shape)}"
            raise EngineError(f"weight {name!r} arrived as {tensor.dtype} {tuple(tensor.shape)}; here is {difference}")


@torch.no_grad()
def install(staged: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Write tensors into ``targets`` of the same names, which fit; see :func:`check_fit`."""
    for name, tensor in staged.items():
        targets[name].copy_(tensor)


class WeightReceiver(_Member):
    """The engine's side."""

    def receive(self, invitation: Invitation, rank: int, manifest: Manifest) -> dict[str, Tensor]:
        """Return the sender's tensors, verified, beside the serving ones; blocks until they have arrived.

        Args:
            invitation: invitation from the sender.
            rank: rank of this process in the group, from 1.
            manifest: manifest of the tensors.

        Raises:
            EngineError: the tensors did not arrive in time, the sender or another receiver is gone, or a tensor differs
                from the one sent; the message names the tensor.
        """
        seconds, device = timedelta(seconds=invitation.seconds), memory_of(invitation.transport)
        memory = partial(torch.empty, dtype=torch.uint8, device=device)
        blocks = [(block, memory(sum(item.size for item in block))) for block in manifest.blocks()]
        with self._group(invitation, manifest, "received", partial(_connect, invitation, rank)) as group:
            parts = ((block[0].name, part) for block, data in blocks for part in manifest.buckets(data))
            self._broadcast(group, parts, seconds)
            received = [part for block, data in blocks for part in data.split([item.size for item in block])]
            for record, data in zip(manifest.tensors, received, strict=True):
                if (received_checksum := checksum(data)) != record.checksum:
                    raise EngineError(
                        f"weight {record.name!r} arrived with checksum {received_checksum:016x} instead of "
                        f"{record.checksum:016x}; the old weights keep serving"
                    )
        pairs = zip(manifest.tensors, received, strict=True)
        return {record.name: data.view(record.dtype).reshape(record.shape) for record, data in pairs}


def memory_of(transport: Transport, gpu: int | None = None) -> torch.device:
    """Return the device whose memory a transport sends from and to; None is the current GPU.

    >>> memory_of("gloo", 1), memory_of("nccl", 1)
    (device(type='cpu'), device(type='cuda', index=1))
    """
    if transport == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if gpu is None else gpu)


def _connect(invitation: Invitation, rank: int) -> Any:
    """Return a receiver's process group, once the sender has seen all receivers."""
    store = reached_store(invitation.host, invitation.port, invitation.secret, invitation.seconds)
    store.set(f"{invitation.group}/here/{rank}", "")
    if store.get(f"{invitation.group}/begin") != b"yes":  # waits for the key, within the store's deadline
        raise RuntimeError("the sender has cancelled the group")
    # Connecting to a member that dies meanwhile has a deadline of the library's own, which may be longer than ours.
    joined = in_daemon(partial(_join, store, invitation, rank))
    if not wait([joined], invitation.seconds).done:
        raise RuntimeError("a member did not connect")
    return joined.result()


def _join(store: dist.Store, invitation: Invitation, rank: int) -> Any:
    """Return the process group of an invitation, once all its members have joined."""
    timeout = timedelta(seconds=invitation.seconds)
    prefixed = dist.PrefixStore(invitation.group, store)
    if invitation.transport == "gloo":
        return dist.ProcessGroupGloo(prefixed, rank, invitation.members, timeout)
    if not dist.is_nccl_available():
        raise EngineError("this build of torch has no NCCL, which the transport 'nccl' needs; choose 'gloo'")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, rank, invitation.members, options)
