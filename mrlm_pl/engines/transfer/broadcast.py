"""Weights from the learner to engines in other processes: named tensors, in buckets, over a group of their own.

A sender and its receivers agree on a :class:`Manifest`. The sender broadcasts the tensors' bytes as one stream, cut
into buckets; receivers collect it in memory beside the serving weights, and verify the checksum of every tensor. Their
models change in :func:`install` alone. Groups meet in the sender's key/value store, behind the invitation's
secret, and never use the default group of ``torch.distributed``: members can change, and training is not affected.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
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

_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Invitation:
    """The terms of joining a group of processes, which is used until something in it fails.

    Args:
        host: of the gate of the sender's store.
        port: of the gate.
        secret: opens the gate.
        group: name of the group.
        members: number of its processes; the sender is rank 0.
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


class WeightSender:
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
        self.host, self.seconds, self.transport = host, seconds, transport
        self._device = memory_of(transport, gpu)
        self._secret = secrets.token_hex(32)
        self._gate = StoreGate(host, self._secret, seconds)
        self._numbers = itertools.count()
        self._joined: tuple[str, Any] = ("", None)

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
            invitation: to the group; the receivers have the same.
            manifest: of the tensors; the receivers have the same.
            source: returns the bytes of a tensor by name.
            check: is called while receivers join; its errors end the wait.

        Raises:
            EngineError: a receiver did not join or is gone. The group is then of no more use.
        """
        try:
            if self._joined[0] != invitation.group:
                self._joined = invitation.group, self._gather(invitation, manifest, check)
            self._broadcast(self._joined[1], invitation, manifest, source)
        except BaseException:
            self._joined = "", None  # closes the connections on which receivers wait for the next bucket
            raise

    def close(self) -> None:
        """Leave the group and close the gate; may be called twice. The sender cannot be used afterwards."""
        self._joined = "", None
        self._gate.close()

    def _gather(self, invitation: Invitation, manifest: Manifest, check: Callable[[], None]) -> Any:
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
        with _group_errors(manifest, 0, invitation, "sent"):
            return _join(store, invitation, 0)

    def _broadcast(
        self, group: Any, invitation: Invitation, manifest: Manifest, source: Callable[[str], Tensor]
    ) -> None:
        device, under_way = self._device, None
        buffers = [torch.zeros(min(manifest.bucket_bytes, manifest.total), dtype=torch.uint8, device=device)] * 2
        if manifest.total > manifest.bucket_bytes:
            buffers[1] = torch.zeros_like(buffers[0])  # is filled while the other is under way
        for number, (start, end) in enumerate(manifest.buckets()):
            bucket = buffers[number % 2][: end - start]
            _pack(bucket, start, manifest, source)
            with _group_errors(manifest, start, invitation, "sent"):
                if under_way is not None:
                    under_way.wait(timedelta(seconds=invitation.seconds))
                under_way = group.broadcast(bucket, 0, timedelta(seconds=invitation.seconds))
        if under_way is not None:
            with _group_errors(manifest, manifest.total - 1, invitation, "sent"):
                under_way.wait(timedelta(seconds=invitation.seconds))


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
    """Write tensors into ``targets`` of the same names.

    Raises:
        EngineError: they do not fit; nothing is written.
    """
    check_fit(staged, targets)
    for name, tensor in staged.items():
        targets[name].copy_(tensor)


class WeightReceiver:
    """The engine's side."""

    def __init__(self) -> None:
        self._joined: tuple[str, Any] = ("", None)

    def receive(self, invitation: Invitation, rank: int, manifest: Manifest) -> dict[str, Tensor]:
        """Return the sender's tensors, verified, beside the serving ones; blocks until they have arrived.

        Args:
            invitation: from the sender.
            rank: of this process in the group, from 1.
            manifest: of the tensors.

        Raises:
            EngineError: they did not come in time, the sender or another receiver is gone, or a tensor differs from
                the one sent; the message names the tensor.
        """
        try:
            if self._joined[0] != invitation.group:
                with _group_errors(manifest, 0, invitation, "received"):
                    self._joined = invitation.group, _connect(invitation, rank)
            return self._receive(self._joined[1], invitation, manifest)
        except BaseException:
            self._joined = "", None
            raise

    def _receive(self, group: Any, invitation: Invitation, manifest: Manifest) -> dict[str, Tensor]:
        timeout = timedelta(seconds=invitation.seconds)
        stream = torch.empty(manifest.total, dtype=torch.uint8, device=memory_of(invitation.transport))
        for start, end in manifest.buckets():
            with _group_errors(manifest, start, invitation, "received"):
                group.broadcast(stream[start:end], 0, timeout).wait(timeout)
        received: dict[str, Tensor] = {}
        for record in manifest.tensors:
            data = stream[record.start : record.start + record.size]
            if (received_checksum := checksum(data)) != record.checksum:
                raise EngineError(
                    f"weight {record.name!r} arrived with checksum {received_checksum:016x} instead of "
                    f"{record.checksum:016x}; the old weights keep serving"
                )
            received[record.name] = data.view(record.dtype).reshape(record.shape)
        return received


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


def _pack(bucket: Tensor, start: int, manifest: Manifest, source: Callable[[str], Tensor]) -> None:
    """Fill a bucket with the bytes of the stream from ``start`` on."""
    end = start + bucket.numel()
    for record in manifest.tensors:
        first, last = max(start, record.start), min(end, record.start + record.size)
        if first < last:
            bucket[first - start : last - start].copy_(source(record.name)[first - record.start : last - record.start])


@contextmanager
def _group_errors(manifest: Manifest, start: int, invitation: Invitation, done: str) -> Iterator[None]:
    """Raise errors of the process group as ``EngineError`` with the name of the tensor."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(
            f"weight {manifest.at(start)!r} (byte {start} of {manifest.total}) not {done}: a member of "
            f"{invitation.group} is gone or silent for {invitation.seconds:g} s ({first_line(error)})"
        ) from error
