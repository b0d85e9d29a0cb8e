"""Decoders of compressed files against gzip and zstandard."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
import zstandard

from mrlm_pl import compressed_files
from mrlm_pl.compressed_files import CHUNK, decoder_of, packed, unpacked

TEXT = b"".join(b"line %d\n" % number for number in range(5000))


@pytest.mark.parametrize("fed", [1, 1000, len(gzip.compress(TEXT)) - 1, len(gzip.compress(TEXT)), CHUNK])
def test_pieces_of_any_size_are_the_text_and_end_whole(
    fed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_files, "FED", fed)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(TEXT) * 2)
    assert b"".join(unpacked(path)) == TEXT * 2


@pytest.mark.parametrize("padding", [1, 100, CHUNK])
def test_padded_members_of_gzip_are_read(padding: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes((gzip.compress(TEXT) + bytes(padding)) * 2)
    with gzip.open(path) as file:
        assert b"".join(unpacked(path)) == file.read() == TEXT * 2


def test_frames_and_blocks_of_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    flushing = zstandard.ZstdCompressor(level=19, write_checksum=True).compressobj()
    blocks = flushing.compress(TEXT) + flushing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + flushing.flush()
    skippable = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"
    path.write_bytes(blocks + skippable + zstandard.ZstdCompressor().compress(TEXT) + packed(path, TEXT))
    assert b"".join(unpacked(path)) == TEXT * 3


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_early_end_and_damage_are_errors(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    whole = packed(path, TEXT)
    unpack = {".gz": gzip.decompress, ".zst": zstandard.ZstdDecompressor().decompress}[suffix]
    assert unpack(whole) == TEXT
    path.write_bytes(whole[:-1])
    with pytest.raises(EOFError, match="end early"):
        list(unpacked(path))
    path.write_bytes(whole + b"other bytes")
    with pytest.raises(ValueError, match=r"header|frame descriptor|Unknown"):
        list(unpacked(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_flipped_bit_of_the_content_is_an_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    whole = packed(path, TEXT)
    for place in range(20, len(whole), len(whole) // 50):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises((EOFError, ValueError)):
            list(unpacked(path))


def test_a_chunk_that_expands_without_end_gives_bounded_pieces() -> None:
    header = b"\x28\xb5\x2f\xfd\x00\x58"  # a window of 2 MiB
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"x"  # repeats a byte 131,072 times
    bomb = header + block * 2000
    decoder = decoder_of(Path("a.zst"))
    sizes = [len(piece) for piece in decoder.feed(bomb)]
    assert sum(sizes) == 2000 << 17
    assert max(sizes) <= 1 << 24


def test_another_decoder_starts_at_the_pending_bytes_of_a_whole_one() -> None:
    rng = random.Random(0)
    texts = [rng.randbytes(3000) for _ in range(4)]
    for suffix in (".gz", ".zst"):
        path = Path(f"a{suffix}")
        data = b"".join(packed(path, text) for text in texts)
        decoder, done, others = decoder_of(path), 0, 0
        for piece in decoder.feed(data):
            done += len(piece)
            if decoder.whole:
                others += 1
                rest = data[len(data) - decoder.pending :]
                assert b"".join(decoder_of(path).feed(rest)) == b"".join(texts)[done:]
        assert others >= 4


@pytest.mark.parametrize("padding", [1, 100, CHUNK])
def test_padding_is_no_pending_data(padding: int, tmp_path: Path) -> None:
    decoder = decoder_of(tmp_path / "a.gz")
    assert b"".join(decoder.feed(gzip.compress(TEXT) + bytes(padding))) == TEXT
    assert (decoder.whole, decoder.pending) == (True, 0)
