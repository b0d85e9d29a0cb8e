"""Pretrained models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mrlm_pl.policy import pretrained
from mrlm_pl.policy.pretrained import reading_weights


def test_threads_read_weights_one_after_another(tmp_path: Path) -> None:
    """Transformers changes the whole process while one reads."""
    with ThreadPoolExecutor(1) as other, reading_weights(tmp_path):
        assert not other.submit(pretrained._READING.acquire, blocking=False).result()
