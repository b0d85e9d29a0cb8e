"""The generation loop of a device that runs behind the host, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mrlm_pl.engines import SampleRequest
from mrlm_pl.engines.local.decoder import Decoder
from mrlm_pl.engines.local.generation import SessionCache
from mrlm_pl.engines.local.llama import FusedDecoder
from tests.engines.conftest import VOCABULARY, build, generated, request
from tests.support.models.device_waits import DeviceWaits

TOKENS = 40
SAMPLINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "greedy": {"temperature": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
}


def decoder(name: str = "qwen2", asynchronous: bool = True) -> FusedDecoder:
    backend = FusedDecoder(build(name), torch.float32)
    backend.asynchronous = asynchronous
    return backend


def waits(backend: FusedDecoder, requests: Sequence[SampleRequest]) -> list[str]:
    with DeviceWaits() as device:
        device.place(backend.weights.tensors())
        generated(backend, requests)
    return device.places


@pytest.mark.parametrize("sampling", [*SAMPLINGS, "several"])
@pytest.mark.long_after(2)
def test_the_host_reads_the_tokens_of_eight_steps_at_once(sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.engines.local.sampling._NUCLEUS_CANDIDATES", 4)
    kinds = list(SAMPLINGS.values()) if sampling == "several" else [SAMPLINGS[sampling]] * 4
    rows = [request((1, 2, 3 + seed % 2), seed, max_tokens=TOKENS, **kind) for seed, kind in enumerate(kinds)]
    # Two copies to the host, of tokens and log-probabilities, for every 8 steps.
    assert len(waits(decoder(), rows)) == 2 * TOKENS // 8
    assert len(waits(decoder(asynchronous=False), rows)) >= 2 * TOKENS


def test_rows_that_leave_at_any_step_add_no_waits() -> None:
    rows = [request((1, 2, 3), seed, max_tokens=1 + 5 * seed) for seed in range(9)]
    assert len(waits(decoder(), rows)) <= 2 * -(-41 // 8)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_tokens_read_late_are_those_read_at_once(name: str) -> None:
    rows = [
        request(
            [1 + (seed * 7 + place) % (VOCABULARY - 1) for place in range(3 + seed % 3)],
            seed,
            max_tokens=1 + 4 * seed,
            stop_ids=(seed, seed + 20),
            session=f"session/{seed}",
            **list(SAMPLINGS.values())[seed % 4],
        )
        for seed in range(10)
    ]
    kept: list[SessionCache] = [SessionCache(2**20), SessionCache(2**20)]
    at_once = generated(decoder(name, asynchronous=False), rows, kept[0])
    late = generated(decoder(name), rows, kept[1])
    assert {out.finish_reason for out in at_once} == {"stop", "length"}
    for one, other in zip(at_once, late, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=3e-6)
    for one in rows:
        fed = (*one.token_ids, *at_once[one.seed].token_ids)
        first, second = (cache.get("p", one.session or "", fed) for cache in kept)
        assert first is not None
        assert second is not None
        torch.testing.assert_close(torch.cat(first.parts, 3), torch.cat(second.parts, 3))


def test_only_a_gpu_whose_copies_have_events_runs_behind_the_host() -> None:
    class Plain(Decoder):
        prefill = rotation = None  # type: ignore[assignment]

    asynchronous = {name: Plain(torch.device(name), torch.float32).asynchronous for name in ("cpu", "cuda", "mps")}
    assert asynchronous == {"cpu": False, "cuda": True, "mps": False}
