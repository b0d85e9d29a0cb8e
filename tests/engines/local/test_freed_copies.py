"""Copies of weights between generation and the next update: freed where they are large, and read again when needed."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from transformers import PreTrainedModel

from mrlm_pl.engines import InProcessEngine
from mrlm_pl.engines.local import engine as engine_module
from mrlm_pl.policy.lora import LoRA
from tests.engines.conftest import build, request, run
from tests.engines.local.test_adapters import adapted, engine_of, weights_of

MODELS = {
    "one": lambda: {"p": build("qwen3")},
    "two": lambda: {"p": build("qwen3"), "q": build("qwen3", seed=1)},
    "on one base": lambda: adapted("qwen2", [LoRA(rank=2)] * 2),
}


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize(("more", "own"), [(0, False), (0, True), (1, False)])
@pytest.mark.parametrize("models", MODELS)
def test_copies_are_freed_after_rollouts_and_the_next_sample_reads_them_again(
    models: str, more: int, own: bool, other_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: dict[str, PreTrainedModel] = MODELS[models]()
    engine = engine_of(policies, own_weights=own)
    copied = sum(weights_of(engine, policy).copied for policy in policies)
    monkeypatch.setattr(engine_module, "MIN_FREED_WEIGHTS", copied + more)
    rows = [request([1, 2, 3], seed, max_tokens=6, policy=policy) for seed, policy in enumerate(policies)]
    held = [weakref.ref(weights_of(engine, policy).layers[0].down.weight) for policy in policies]
    played = engine.compute_during(lambda: other_thread.submit(run, engine, *rows))
    freed = not more and not own
    assert [copy() is None for copy in held] == [freed] * len(held)
    assert run(engine, *rows) == played
    assert all(weights_of(engine, policy).layers for policy in policies)
    engine.close()


def test_copies_are_freed_when_rollouts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MIN_FREED_WEIGHTS", 1)
    engine = InProcessEngine()
    engine.load("p", build("qwen3"), 1)
    with pytest.raises(RuntimeError, match="no rollouts"):
        engine.compute_during(lambda: (_ for _ in ()).throw(RuntimeError("no rollouts")))
    assert not weights_of(engine, "p").layers


def test_an_interrupt_does_not_wait_for_other_samples(
    other_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are cancelled only after it."""
    engine = InProcessEngine()
    engine.load("p", build("qwen3"), 1)
    asked, told, ended = (threading.Event() for _ in range(3))

    def generate(*_: Any) -> list[Any]:
        if threading.current_thread() is threading.main_thread():
            asked.wait(60)
            raise KeyboardInterrupt
        told.wait(60)
        ended.set()
        raise RuntimeError("cancelled")

    async def play() -> None:
        samples = [asyncio.ensure_future(engine.sample([request([1, 2], seed)])) for seed in (0, 1)]
        await asyncio.sleep(0)
        asked.set()
        await asyncio.gather(*samples, return_exceptions=True)

    monkeypatch.setattr(engine_module, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        engine.compute_during(lambda: other_thread.submit(asyncio.run, play()))
    assert not ended.is_set()
    told.set()
    engine.close()
