"""Operations over streams: answered as they are done, within bounds on what is under way and on sizes of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress

import grpc

from mrlm_pl.serving.transport import environment_pb2 as pb

MAX_IN_FLIGHT = 4096
MAX_RESULTS = 256
MAX_REPLY_BYTES = 1 << 20
"""A reply is closed at this size, so that many large results do not make one that is too large."""

MESSAGE_MARGIN = 1024
SIZE_HEADER = "mrlm-message-bytes"
"""Metadata in which each end of a stream tells how large a message it takes."""


async def exchanged(
    requests: AsyncIterator[pb.BatchRequest],
    answer_at_once: Callable[[pb.Operation], pb.Result | None],
    answer: Callable[[pb.Operation], Awaitable[pb.Result]],
    stopping: asyncio.Event,
) -> AsyncIterator[pb.BatchReply]:
    """Yield the results of all operations, in batches, each as soon as it is there.

    Operations that are under way when the stream ends are finished, for the one that comes after it. It also ends when
    the server is stopping.

    Args:
        requests: the operations.
        answer_at_once: the result of an operation for which nothing is waited for, else None.
        answer: the result of any other.
        stopping: is set when the server goes down.

    Raises:
        Exception: whatever reading the requests raised, after the answers to those that were read.
    """
    results: asyncio.Queue[pb.Result | None] = asyncio.Queue()
    allowed = asyncio.Semaphore(MAX_IN_FLIGHT)  # a client that does not read its answers is not read either
    under_way: set[asyncio.Task[None]] = set()

    async def put(operation: pb.Operation) -> None:
        results.put_nowait(await answer(operation))

    async def read() -> None:
        fault: Exception | None = None
        try:
            async for batch in requests:
                for operation in batch.operations:
                    await allowed.acquire()
                    result = answer_at_once(operation)
                    if result is not None:
                        results.put_nowait(result)
                        continue
                    task = asyncio.ensure_future(put(operation))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
        except Exception as error:
            fault = error
        except asyncio.CancelledError:
            results.put_nowait(None)
            raise
        while under_way:
            await asyncio.wait(under_way)
        results.put_nowait(None)
        if fault is not None:
            raise fault

    reading, ending = asyncio.ensure_future(read()), asyncio.ensure_future(stopping.wait())
    ending.add_done_callback(lambda _: reading.cancel())
    try:
        async for batch in _batches(results):
            yield pb.BatchReply(results=batch)
            for _ in batch:
                allowed.release()
        if not stopping.is_set():
            await reading
    finally:
        ending.cancel()
        reading.cancel()
        with suppress(asyncio.CancelledError, Exception):  # told above, where anybody listens
            await reading


def smaller_size(own: int, metadata: Iterable[tuple[str, str | bytes]] | None) -> int:
    """Return how many bytes a message may have that this end and the one that sent the metadata both take.

    >>> smaller_size(100, [("mrlm-message-bytes", "70")]), smaller_size(100, [])
    (70, 100)
    """
    theirs = str(dict(metadata or ()).get(SIZE_HEADER, ""))
    return min(own, int(theirs)) if theirs.isdigit() else own


def fitting(result: pb.Result, largest: int) -> pb.Result:
    """Return the result, or that it is too large for messages of so many bytes."""
    size = result.ByteSize()
    if size <= largest - MESSAGE_MARGIN:
        return result
    text = f"the answer has {size / (1 << 20):.1f} MiB, and messages up to {largest >> 20}; raise message_mb"
    return pb.Result(id=result.id, code=grpc.StatusCode.OUT_OF_RANGE.value[0], message=text)


async def _batches(results: asyncio.Queue[pb.Result | None]) -> AsyncIterator[list[pb.Result]]:
    """Yield the items of the queue in batches, up to the first None."""
    next_one = await results.get()
    while next_one is not None:
        batch, size = [next_one], next_one.ByteSize()
        next_one = None
        while next_one is None and len(batch) < MAX_RESULTS and not results.empty():
            found = results.get_nowait()
            if found is None:
                yield batch
                return
            size += found.ByteSize()
            if size > MAX_REPLY_BYTES:
                next_one = found
            else:
                batch.append(found)
        yield batch
        next_one = next_one or await results.get()
