"""Weights sent in buckets arrive whole, or not at all and with the name of the tensor that did not."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor, nn

from mrlm_pl.engines.transfer import broadcast
from mrlm_pl.engines.transfer.broadcast import Invitation, WeightReceiver, WeightSender, check_fit, install
from mrlm_pl.engines.transfer.manifest import Manifest, TensorRecord, WeightSnapshot
from mrlm_pl.errors import EngineError
from tests.support.models.weight_processes import many_tensors

ROOT = Path(__file__).parents[3]
SECONDS = 100.0


@pytest.fixture
def sender() -> Iterator[Callable[..., WeightSender]]:
    """A factory of senders that are closed afterwards."""
    made: list[WeightSender] = []

    def make(seconds: float = SECONDS) -> WeightSender:
        made.append(WeightSender(seconds=seconds))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": nn.Parameter(torch.randn(13, 7, generator=generator)),
        "bias": nn.Parameter(torch.randn(5, generator=generator).to(torch.bfloat16)),
        "scalar": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
    }


def empty_like(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(item) for name, item in given.items()}


def sent(
    sender: WeightSender,
    threads: ThreadPoolExecutor,
    snapshot: WeightSnapshot,
    manifest: Manifest,
    receivers: list[WeightReceiver],
    again: Invitation | None = None,
    source: Callable[[str], Tensor] | None = None,
) -> tuple[Invitation, list[Future[dict[str, Tensor]]]]:
    """Send to receivers in threads; return the invitation and each receiver's result."""
    invitation = again or sender.invite(len(receivers))
    got = [threads.submit(item.receive, invitation, rank, manifest) for rank, item in enumerate(receivers, 1)]
    sender.send(invitation, manifest, source or snapshot.__getitem__)
    return invitation, got


def snapshot_of(given: dict[str, Tensor]) -> WeightSnapshot:
    snapshot = WeightSnapshot()
    snapshot.take(given)
    return snapshot


def test_checksums_are_those_of_the_bytes() -> None:
    values = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)  # 0x3fc0, 0xc000, little-endian
    expected = xxhash.xxh3_64_intdigest(bytes([0xC0, 0x3F, 0x00, 0xC0]))
    assert snapshot_of({"w": values}).checksums() == {"w": expected}


def test_tensors_are_cut_into_buckets() -> None:
    given = {"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.float64), "c": torch.zeros(0)}
    snapshot = snapshot_of(given)
    manifest = snapshot.missing([{}], 20)
    assert [(item.name, item.size) for item in manifest.tensors] == [("a", 12), ("b", 40), ("c", 0)]
    cut = [[len(part) for part in manifest.buckets(snapshot[name])] for name in given]
    assert cut == [[12], [20, 20], []]


@pytest.mark.parametrize("bucket_bytes", [16, 50, 10_000])
def test_receivers_get_every_tensor_of_any_dtype(
    bucket_bytes: int, sender: Callable[..., WeightSender], threads: ThreadPoolExecutor
) -> None:
    given = tensors()
    snapshot = snapshot_of(given)
    manifest = snapshot.missing([{}], bucket_bytes)
    _, got = sent(sender(), threads, snapshot, manifest, [WeightReceiver(), WeightReceiver()])
    for future in got:
        targets = empty_like(given)
        install(future.result(), targets)
        for name, value in given.items():
            assert torch.equal(targets[name], value)
            assert targets[name].dtype == value.dtype


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_sender_by_nccl_keeps_its_tensors_as_they_were() -> None:
    """Of a group of the sender alone, as two members need two GPUs."""
    given = {name: tensor.detach().cuda() for name, tensor in tensors().items()}
    expected = {name: tensor.clone() for name, tensor in given.items()}
    given["wide"].requires_grad_()  # whose copy is on the CPU; the others are sent from where they are
    snapshot, sender = snapshot_of(given), WeightSender(seconds=SECONDS, transport="nccl")
    try:
        for bucket_bytes in (16, 10_000):
            sender.send(sender.invite(0), snapshot.missing([{}], bucket_bytes), snapshot.__getitem__)
    finally:
        sender.close()
    torch.testing.assert_close({name: tensor.detach() for name, tensor in given.items()}, expected, atol=0, rtol=0)


def test_only_what_changed_is_sent() -> None:
    given = tensors()
    snapshot = snapshot_of(given)
    held = snapshot.checksums()
    snapshot.take(given)
    assert snapshot.missing([held], 64).tensors == ()
    with torch.no_grad():
        given["bias"].add_(1)
        given["scalar"].add_(1)
    snapshot.take(given)
    assert {item.name for item in snapshot.missing([held], 64).tensors} == {"bias", "scalar"}
    assert {item.name for item in snapshot.missing([held, {}], 64).tensors} == given.keys(), "one has nothing yet"


def test_a_trained_tensor_that_changed_behind_torchs_count_is_sent() -> None:
    given = tensors()
    snapshot = snapshot_of(given)
    held = snapshot.checksums()
    given["wide"].data.mul_(2)
    snapshot.take(given)
    assert [item.name for item in snapshot.missing([held], 64).tensors] == ["wide"]


def test_the_snapshot_keeps_trained_tensors_as_they_were_taken() -> None:
    given = tensors()
    snapshot = snapshot_of(given)
    before = given["wide"].detach().clone()
    with torch.no_grad():
        given["wide"].zero_()
    assert torch.equal(snapshot["wide"].view(torch.float32).view(13, 7), before)


def test_tensors_that_pass_by_are_all_copied() -> None:
    given = {"frozen": torch.ones(4)}
    snapshot = WeightSnapshot()
    snapshot.take(given, passing=True)
    given["frozen"].data.zero_()
    assert snapshot["frozen"].view(torch.float32).tolist() == [1] * 4
    snapshot.take(given, passing=True)
    assert snapshot["frozen"].view(torch.float32).tolist() == [0] * 4


def test_a_group_is_used_again_and_a_new_one_has_other_members(
    sender: Callable[..., WeightSender], threads: ThreadPoolExecutor
) -> None:
    given, one, two = tensors(), WeightReceiver(), WeightReceiver()
    learner, snapshot = sender(), snapshot_of(given)
    manifest = snapshot.missing([{}], 64)
    first, before = sent(learner, threads, snapshot, manifest, [one, two])
    joined = one._joined
    _, got = sent(learner, threads, snapshot, manifest, [one, two], first)
    assert one._joined is joined
    assert all(torch.equal(future.result()["wide"], given["wide"]) for future in [*before, *got])
    other, (future,) = sent(learner, threads, snapshot, manifest, [two])
    assert other.group != first.group
    assert torch.equal(future.result()["wide"], given["wide"])


def test_all_579_tensors_arrive_through_buckets_smaller_than_the_largest(
    sender: Callable[..., WeightSender], threads: ThreadPoolExecutor
) -> None:
    model = many_tensors()
    given = dict(model.named_parameters())
    snapshot = snapshot_of(given)
    bucket = 2**18
    manifest = snapshot.missing([{}], bucket)
    assert len(manifest.tensors) == 579
    assert max(item.size for item in manifest.tensors) > 3 * bucket
    _, got = sent(sender(), threads, snapshot, manifest, [WeightReceiver(), WeightReceiver()])
    for future in got:
        staged = future.result()
        found = {name: xxhash.xxh3_64_intdigest(tensor.view(torch.uint8).numpy()) for name, tensor in staged.items()}
        expected = {
            name: xxhash.xxh3_64_intdigest(tensor.detach().view(torch.uint8).numpy()) for name, tensor in given.items()
        }
        assert found == expected


def test_a_flipped_bit_is_found_and_named(sender: Callable[..., WeightSender], threads: ThreadPoolExecutor) -> None:
    given = tensors()
    snapshot = snapshot_of(given)

    def flipped(name: str) -> Tensor:
        data = snapshot[name].clone()
        if name == "bias":
            data[3] ^= 1
        return data

    learner, manifest = sender(), snapshot.missing([{}], 64)
    receivers = [WeightReceiver(), WeightReceiver()]
    _, got = sent(learner, threads, snapshot, manifest, receivers, source=flipped)
    for future in got:
        with pytest.raises(EngineError, match="weight 'bias' arrived with checksum"):
            future.result()
    _, got = sent(learner, threads, snapshot, manifest, receivers)
    assert torch.equal(got[0].result()["bias"], given["bias"])


def test_two_buckets_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    snapshot, under_way, most = snapshot_of(given), [0], [0]
    manifest = snapshot.missing([{}], 64)
    stream = torch.cat([snapshot[item.name] for item in manifest.tensors]).tolist()

    class Group:
        def broadcast(self, data: Tensor, root: int, seconds: object) -> Group:
            data.copy_(torch.tensor([stream.pop(0) for _ in data]))
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            return self

        def wait(self, seconds: object) -> None:
            under_way[0] -= 1

    monkeypatch.setattr(broadcast, "_connect", lambda invitation, rank: Group())
    got = WeightReceiver().receive(Invitation("127.0.0.1", 1, "secret", "weights-0", 2, SECONDS), 1, manifest)
    assert all(torch.equal(got[name], value) for name, value in given.items())
    assert (most, under_way) == ([2], [0])


def test_small_tensors_of_a_dtype_are_sent_as_one(
    sender: Callable[..., WeightSender], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter's hundreds of tensors of a few KB would take a round each."""
    sent_sizes: list[int] = []
    broadcasts = WeightSender._broadcast

    def counted(self: WeightSender, group: object, parts: Iterable[tuple[str, Tensor]], seconds: object) -> None:
        listed = list(parts)
        sent_sizes.extend(len(part) for _, part in listed)
        broadcasts(self, group, listed, seconds)

    monkeypatch.setattr(WeightSender, "_broadcast", counted)
    small = {f"a.{number}": torch.full((100,), number, dtype=torch.float32) for number in range(500)}
    given = {**small, "odd": torch.tensor([1, 2, 3], dtype=torch.uint8), "large": torch.ones(2**18), "b": torch.ones(7)}
    snapshot = snapshot_of(given)
    _, (future,) = sent(sender(), threads, snapshot, snapshot.missing([{}], 2**23), [WeightReceiver()])
    torch.testing.assert_close(future.result(), given, atol=0, rtol=0)
    assert sent_sizes == [500 * 100 * 4, 3, 2**20, 7 * 4]


def test_small_tensors_are_joined_up_to_a_bucket() -> None:
    """A model of experts has thousands of them: as one block they were GBs, held twice."""
    records = [TensorRecord(str(number), (1000,), torch.uint8, 1000, 0) for number in range(25)]
    blocks = Manifest(tuple(records), bucket_bytes=10_000).blocks()
    assert [record for block in blocks for record in block] == records
    assert [len(block) for block in blocks] == [10, 10, 5]


def test_a_full_gpu_is_no_lost_member(sender: Callable[..., WeightSender], threads: ThreadPoolExecutor) -> None:
    snapshot, fault = snapshot_of(tensors()), torch.OutOfMemoryError("CUDA out of memory")

    def full(name: str) -> Tensor:
        raise fault

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        sent(sender(3.0), threads, snapshot, snapshot.missing([{}], 64), [WeightReceiver()], source=full)


def test_tensors_that_do_not_fit_are_named() -> None:
    staged = {"a": torch.ones(2), "b": torch.ones(2)}
    targets = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(EngineError, match="weight 'b' arrived"):
        check_fit(staged, targets)


def test_a_receiver_that_never_comes_is_named_within_the_deadline(sender: Callable[..., WeightSender]) -> None:
    learner, snapshot = sender(seconds=0.5), snapshot_of(tensors())
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"receiver 1 .* did not join the group within 0.5 s"):
        learner.send(learner.invite(1), snapshot.missing([{}], 64), snapshot.__getitem__)
    assert time.monotonic() - started < 60


def test_a_receiver_whose_sender_is_gone_says_so(threads: ThreadPoolExecutor) -> None:
    snapshot = snapshot_of(tensors())
    nowhere = Invitation("127.0.0.1", 1, "secret", "weights-0", 2, 0.5)
    with pytest.raises(EngineError, match="weight 'wide'"):
        WeightReceiver().receive(nowhere, 1, snapshot.missing([{}], 64))


@pytest.mark.long
def test_a_receiver_killed_in_the_middle_leaves_the_others_whole(
    sender: Callable[..., WeightSender], threads: ThreadPoolExecutor
) -> None:
    given = {"wide": torch.randn(600, 500), "bias": torch.randn(400, 500), "last": torch.randn(700, 500)}
    snapshot, learner = snapshot_of(given), sender(8.0)
    manifest = snapshot.missing([{}], 50_000)
    invitation, survivor = learner.invite(2), WeightReceiver()
    command = [sys.executable, "-m", "tests.support.models.weight_processes"]
    doomed = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ)
    assert doomed.stdin is not None
    assert doomed.stdout is not None
    doomed.stdin.write(pickle.dumps((invitation, manifest)))
    doomed.stdin.close()
    assert doomed.stdout.readline() == b"ready\n"

    def killing(name: str) -> Tensor:
        if name == "bias" and doomed.poll() is None:
            doomed.send_signal(signal.SIGKILL)
            doomed.wait()
        return snapshot[name]

    serving = {name: torch.zeros_like(value) for name, value in given.items()}
    got = threads.submit(survivor.receive, invitation, 2, manifest)
    started = time.monotonic()
    try:
        with pytest.raises(EngineError):
            learner.send(invitation, manifest, killing)
        error = got.exception(100)
        if error is None:
            install(got.result(), serving)
        assert time.monotonic() - started < 90
    finally:
        doomed.stdout.close()
        doomed.kill()
        doomed.wait()
    assert error is None or any(repr(name) in str(error) for name in given)
    whole = {name: torch.zeros_like(value) if error else value for name, value in given.items()}
    assert all(torch.equal(serving[name], whole[name]) for name in given), "the old weights or the new ones"
    _, (future,) = sent(learner, threads, snapshot, manifest, [survivor])
    install(future.result(), serving)
    assert all(torch.equal(serving[name], value) for name, value in given.items())
