"""Weights from the learner to engines in other processes: named tensors, in buckets, over a group of their own.

A sender and its receivers agree on a :class:`Manifest`. The sender broadcasts the tensors' bytes as one stream, cut
into buckets; receivers collect it in memory beside the weights that serve, and hold what came against the checksum of
every tensor. Nothing of theirs changes before :meth:`Staged.install`. Groups are made directly from a key/value store
of the sender's, which those alone reach who know the invitation's secret, and never from the default group of
``torch.distributed``: members can change, and training is not touched.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mrlm_pl.engines.transfer.manifest import ALIGNMENT, Manifest, checksum
from mrlm_pl.engines.transfer.store_gate import StoreGate, new_secret, reached_store
from mrlm_pl.errors import EngineError
from mrlm_pl.settings import at_least, positive

Transport = Literal["gloo", "nccl"]

_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Invitation:
    """The terms of taking part in one sending.

    Args:
        host: where the gate before the sender's store is.
        port: of the gate.
        secret: with which the gate is passed.
        group: name of the group of processes, which is kept from one sending to the next.
        members: how many belong to it; the sender is rank 0.
        seconds: that joining, one bucket and the receivers' answers may each take.
        transport: ``gloo`` for memory of the CPU, ``nccl`` for that of GPUs.
        sending: number of the sending.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    group: str
    members: int
    seconds: float
    transport: Transport = "gloo"
    sending: int = 0

    def key(self, rank: int, what: str) -> str:
        """Return the store's key for data from (rank 0) or about (other ranks) a member."""
        return f"members/{self.group}/{what}/{rank}"


class WeightSender:
    """The learner's side.

    Args:
        host: of this process, as the receivers reach it.
        bucket_bytes: bytes that are sent at a time.
        seconds: that joining, one bucket and the receivers' answers may each take.
        transport: ``gloo`` for memory of the CPU, ``nccl`` for that of GPUs.

    Raises:
        ConfigurationError: a number is out of its range, or this machine has no address ``host``.
    """

    def __init__(
        self, host: str = "127.0.0.1", bucket_bytes: int = 2**23, seconds: float = 120.0, transport: Transport = "gloo"
    ) -> None:
        at_least(ALIGNMENT, "", bucket_bytes=bucket_bytes)
        positive("", seconds=seconds)
        self.host, self.bucket_bytes, self.seconds, self.transport = host, bucket_bytes, seconds, transport
        self._secret = new_secret()
        self._gate: StoreGate | None = StoreGate(host, self._secret, seconds)
        self._numbers = itertools.count()
        self._groups: dict[str, Any] = {}

    def invite(self, receivers: int) -> Invitation:
        """An invitation to a new group with so many receivers, whose ranks begin at 1; earlier groups are left."""
        self._groups.clear()
        number = next(self._numbers)
        return Invitation(
            self.host,
            self._open_gate.port,
            self._secret,
            f"weights-{number}",
            receivers + 1,
            self.seconds,
            self.transport,
            number,
        )

    def invite_again(self, invitation: Invitation) -> Invitation:
        """Return an invitation to the next sending in the same group, in which nothing has failed so far."""
        return replace(invitation, sending=next(self._numbers))

    def send(
        self,
        invitation: Invitation,
        manifest: Manifest,
        source: Callable[[str], Tensor],
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, str]:
        """Why receivers do not have everything, by rank; empty when all have.

        Args:
            invitation: that the receivers have been given as well.
            manifest: what to send; the receivers have been given the same.
            source: the bytes of a tensor by its name.
            check: is called while receivers are waited for; what it raises ends the wait.

        Raises:
            EngineError: a receiver has not joined, is gone, or does not answer. Nothing is known of what the others
                have, and the group is of no more use.
        """
        ranks = range(1, invitation.members)
        try:
            if invitation.group not in self._groups:
                self._groups[invitation.group] = self._gather(invitation, check)
            self._broadcast(self._groups[invitation.group], invitation, manifest, source)
            answers = {rank: self._wait_for(invitation, rank, str(invitation.sending), check) for rank in ranks}
        except BaseException:
            self._groups.clear()  # who waits for the next bucket then sees the connection closed
            raise
        return {rank: text for rank, text in answers.items() if text}

    @property
    def _open_gate(self) -> StoreGate:
        if self._gate is None:
            raise EngineError("the sender of weights is closed; make another")
        return self._gate

    @property
    def _address(self) -> dist.TCPStore:
        return self._open_gate.store

    def close(self) -> None:
        """Leave all groups and close the address where they meet; may be called twice, and nothing after it."""
        self._groups.clear()
        if self._gate is not None:
            self._gate.close()
        self._gate = None

    def _gather(self, invitation: Invitation, check: Callable[[], None]) -> Any:
        """Return the process group, once all receivers are connected.

        Connecting to a member that has died takes long, so nobody begins before all have come.
        """
        ranks, begin = range(1, invitation.members), invitation.key(0, "begin")
        try:
            for rank in ranks:
                self._wait_for(invitation, rank, "here", check)
        except BaseException:
            self._address.set(begin, "")
            raise
        self._address.set(begin, "yes")
        with _told(None, 0, invitation, "sent"):
            group = _join(self._address, invitation, 0)
        for rank in ranks:
            self._wait_for(invitation, rank, "joined", check)
        return group

    def _wait_for(self, invitation: Invitation, rank: int, what: str, check: Callable[[], None]) -> str:
        """Return the value that a receiver has put into the store."""
        key, deadline = invitation.key(rank, what), time.monotonic() + invitation.seconds
        while not self._address.check([key]):
            check()
            if time.monotonic() > deadline:
                did = "join the group" if what in ("here", "joined") else "confirm the weights"
                raise EngineError(
                    f"receiver {rank} of the weights did not {did} within {invitation.seconds:g} s; look whether it "
                    "lives and reaches this process, or allow more seconds"
                )
            time.sleep(_POLL_SECONDS)
        text = self._address.get(key).decode()
        self._address.delete_key(key)
        return text

    def _broadcast(
        self, group: Any, invitation: Invitation, manifest: Manifest, source: Callable[[str], Tensor]
    ) -> None:
        device, under_way = _device(invitation.transport), None
        buffers = [torch.zeros(min(manifest.bucket_bytes, manifest.total), dtype=torch.uint8, device=device)] * 2
        if manifest.total > manifest.bucket_bytes:
            buffers[1] = torch.zeros_like(buffers[0])  # is filled while the other is under way
        for number, (start, end) in enumerate(manifest.buckets()):
            bucket = buffers[number % 2][: end - start]
            _pack(bucket, start, manifest, source)
            with _told(manifest, start, invitation, "sent"):
                if under_way is not None:
                    under_way.wait(timedelta(seconds=invitation.seconds))
                under_way = group.broadcast(bucket, 0, timedelta(seconds=invitation.seconds))
        if under_way is not None:
            with _told(manifest, manifest.total - 1, invitation, "sent"):
                under_way.wait(timedelta(seconds=invitation.seconds))


class Staged:
    """Tensors that have arrived whole, beside those that serve.

    Args:
        manifest: of the stream.
        stream: its bytes.
    """

    def __init__(self, manifest: Manifest, stream: Tensor) -> None:
        self.tensors: dict[str, Tensor] = {
            item.name: stream[item.start : item.start + item.size].view(getattr(torch, item.dtype)).reshape(item.shape)
            for item in manifest.tensors
        }
        self.checksums = {item.name: item.checksum for item in manifest.tensors}

    def check(self, targets: Mapping[str, Tensor]) -> None:
        """Check that the tensors fit into ``targets`` of the same names.

        Raises:
            EngineError: a name, shape or dtype is another.
        """
        for name, tensor in self.tensors.items():
            target = targets.get(name)
            fits = target is not None and target.dtype == tensor.dtype and target.shape == tensor.shape
            if not fits:
                found = "no such tensor" if target is None else f"{target.dtype} {tuple(target.shape)}"
                raise EngineError(f"weight {name!r} arrived as {tensor.dtype} {tuple(tensor.shape)}; here is {found}")

    @torch.no_grad()
    def install(self, targets: Mapping[str, Tensor]) -> None:
        """Write the tensors into ``targets`` of the same names.

        Raises:
            EngineError: they do not fit; nothing has been written then.
        """
        self.check(targets)
        for name, tensor in self.tensors.items():
            targets[name].copy_(tensor)


class WeightReceiver:
    """The side of an engine."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Any, Any]] = {}

    def receive(self, invitation: Invitation, rank: int, manifest: Manifest) -> Staged:
        """Receive and verify the sender's tensors; blocks until they have arrived.

        Args:
            invitation: from the sender.
            rank: of this process in the group, from 1.
            manifest: what is going to be sent.

        Raises:
            EngineError: it did not come in time, the sender or another receiver is gone, or a tensor is not what was
                sent; the message names the tensor. The sender is told.
        """
        group, store = self._groups.get(invitation.group, (None, None))
        if store is None:
            self._groups.clear()
            with _told(manifest, 0, invitation, "received"):
                store = reached_store(invitation.host, invitation.port, invitation.secret, invitation.seconds)
        try:
            if group is None:
                with _told(manifest, 0, invitation, "received"):
                    group = _connected(store, invitation, rank)
                self._groups[invitation.group] = group, store
            staged = self._receive(group, invitation, manifest)
        except BaseException as error:
            self._groups.clear()
            self._answer(store, invitation, rank, str(error) or type(error).__name__)
            raise
        self._answer(store, invitation, rank, "")
        return staged

    def _answer(self, store: Any, invitation: Invitation, rank: int, text: str) -> None:
        try:
            store.set(invitation.key(rank, str(invitation.sending)), text)
        except RuntimeError as error:
            self._groups.clear()
            raise EngineError(f"the sender of {invitation.group} at {invitation.host} is gone ({error})") from error

    def _receive(self, group: Any, invitation: Invitation, manifest: Manifest) -> Staged:
        timeout = timedelta(seconds=invitation.seconds)
        stream = torch.empty(manifest.total, dtype=torch.uint8, device=_device(invitation.transport))
        for start, end in manifest.buckets():
            with _told(manifest, start, invitation, "received"):
                group.broadcast(stream[start:end], 0, timeout).wait(timeout)
        for item in manifest.tensors:
            found = checksum(stream[item.start : item.start + item.size])
            if found != item.checksum:
                raise EngineError(
                    f"weight {item.name!r} arrived with checksum {found:016x} instead of {item.checksum:016x}; the old "
                    "weights go on serving"
                )
        return Staged(manifest, stream)

    def close(self) -> None:
        """Leave all groups; may be called twice."""
        self._groups.clear()


def _device(transport: Transport) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if transport == "nccl" else torch.device("cpu")


def _connected(store: Any, invitation: Invitation, rank: int) -> Any:
    """Return the process group of an invitation as a receiver sees it, when the sender has seen that all have come."""
    store.set(invitation.key(rank, "here"), "")
    begin, deadline = invitation.key(0, "begin"), time.monotonic() + invitation.seconds
    while not store.check([begin]):
        if time.monotonic() > deadline:
            raise RuntimeError("the sender waits for other members")
        time.sleep(_POLL_SECONDS)
    if store.get(begin) != b"yes":
        raise RuntimeError("the sender has called it off")
    # Connecting to a member that dies meanwhile has a deadline of the library's own, longer than ours may be.
    made: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_put, args=(made, _join, store, invitation, rank), daemon=True).start()
    try:
        group = made.get(timeout=invitation.seconds)
    except Empty:
        raise RuntimeError("a member did not connect") from None
    if isinstance(group, Exception):
        raise group
    store.set(invitation.key(rank, "joined"), "")
    return group


def _put(queue: SimpleQueue[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        queue.put(function(*arguments))
    except Exception as error:
        queue.put(error)


def _join(store: Any, invitation: Invitation, rank: int) -> Any:
    """Return the process group of an invitation, once all its members are there."""
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
    for item in manifest.tensors:
        first, last = max(start, item.start), min(end, item.start + item.size)
        if first < last:
            bucket[first - start : last - start].copy_(source(item.name)[first - item.start : last - item.start])


@contextmanager
def _told(manifest: Manifest | None, start: int, invitation: Invitation, done: str) -> Iterator[None]:
    """Errors of the process group as ours, with the tensor that was under way."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        what = (
            "nothing" if manifest is None else f"weight {manifest.at(start)!r} (byte {start} of {manifest.total}) not"
        )
        raise EngineError(
            f"{what} {done}: a member of {invitation.group} is gone or silent for {invitation.seconds:g} s ({reason})"
        ) from error
