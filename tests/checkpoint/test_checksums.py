"""The checksums of a checkpoint's blocks, against their definition written out, and what they must
see."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path

import pytest
import torch

from functorch_zero import checkpoint
from functorch_zero.checkpoint import CorruptError, block_io, save_job
from functorch_zero.checkpoint.checksums import CHECKSUMS
from functorch_zero.checkpoint.legacy import ROWS, RUN, WORDS, sums64
from tests.checkpoints import assert_same, load_on, rows_of, save_on
from tests.tiers import tiers

ROW = 8 * WORDS
TABLE = ROWS * ROW
SIZES = (0, 1, 7, ROW - 1, ROW, ROW + 9, TABLE - 1, TABLE, TABLE + 5 * ROW + 3, 2 * TABLE + 8)


def noise(size: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def written_out(data: bytes) -> int:
    """`sums64`, as its module describes it, in Python's integers."""
    found = b""
    for start in range(0, len(data), TABLE):
        table = data[start : start + TABLE]
        rows = [struct.unpack_from(f"<{WORDS}Q", table, ROW * i) for i in range(len(table) // ROW)]
        sums = [sum(column) for column in zip(*rows, strict=True)]
        sums += [sum(row[at : at + RUN]) for row in rows for at in range(0, WORDS, RUN)]
        found += (
            struct.pack(f"<{len(sums)}Q", *(n % 2**64 for n in sums)) + table[len(rows) * ROW :]
        )
    return zlib.crc32(found)


@pytest.mark.parametrize("size", SIZES)
def test_sums64_is_what_it_says(size: int) -> None:
    assert sums64(memoryview(noise(size))) == written_out(noise(size))
    with torch.device("meta"):  # somebody's default device is not where files are read
        assert sums64(memoryview(noise(size))) == written_out(noise(size))
    # Sums wrap around; nor is this writable
    assert sums64(memoryview(b"\xff" * size)) == written_out(b"\xff" * size)


@pytest.mark.parametrize("name", CHECKSUMS)
def test_what_must_be_seen(name: str) -> None:
    """One bit and two, zeros for a sector or a page, and sectors, pages and words that change
    places."""
    size = TABLE + TABLE // 2 + 100
    intact, chance = noise(size), random.Random(2)
    whole = CHECKSUMS[name](memoryview(intact))

    def seen(data: bytearray) -> bool:
        return data == intact or CHECKSUMS[name](memoryview(data)) != whole

    for _ in range(100):
        data = bytearray(intact)
        for _ in range(chance.choice([1, 2])):
            data[chance.randrange(size)] ^= 1 << chance.randrange(8)
        assert seen(data)
    for length in (8, 512, 4096):
        for _ in range(20):
            a, b = (chance.randrange((size - length) // length) * length for _ in range(2))
            data = bytearray(intact)
            data[a : a + length] = bytes(length)
            assert seen(data)
            data = bytearray(intact)
            data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
            assert seen(data)
    for length in (512, 1024, 4096):  # of an identity's, whose rows have the same sum
        identity = torch.eye(256).repeat(2, 1).numpy().tobytes()
        for _ in range(20):
            a, b = (chance.randrange(len(identity) // length) * length for _ in range(2))
            data = bytearray(identity)
            data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]
            assert data == identity or CHECKSUMS[name](memoryview(data)) != CHECKSUMS[name](
                memoryview(identity)
            )
    for column in (
        7,
        ROW - 1,
    ):  # the topmost bits, which a sum loses in pairs: here two of a column
        data = bytearray(intact)
        data[column] ^= 128
        data[column + 3 * ROW] ^= 128
        assert seen(data)


@pytest.mark.parametrize("name", tiers(thorough=sorted(CHECKSUMS)))
def test_a_checkpoint_with_either_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The manifest names it. Files of older versions, with sums64, are read and checked."""
    for module in (block_io, save_job):
        monkeypatch.setattr(module, "CHECKSUM", name)
    saved = save_on(tmp_path, 2, 3)
    monkeypatch.undo()
    folder = tmp_path / "step-000000000002"
    rows = json.loads((folder / "manifest.json").read_text().split("\n", 1)[1])
    file = folder / "rank-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    expected = {"crc32": zlib.crc32, "sums64": written_out}[name](data)
    assert rows["checksum"] == name and rows_of(folder)[0][1] == [expected]
    assert_same(saved, load_on(tmp_path, 3, 1))
    assert checkpoint.verify(tmp_path) == {2: []}
    data[-1] ^= 1
    file.write_bytes(data)
    assert file.name in checkpoint.verify(tmp_path)[2][0]
    with pytest.raises(CorruptError, match=file.name):
        load_on(tmp_path, 2, 3)
