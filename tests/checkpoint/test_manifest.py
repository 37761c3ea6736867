"""Manifests, rows and headers from somebody who wants harm: an error, soon, in little memory, and
nothing run."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functorch_zero import checkpoint
from functorch_zero.checkpoint import CheckpointError, CorruptError
from functorch_zero.checkpoint.catalogue import chosen
from functorch_zero.checkpoint.checksums import CHECKSUMS
from functorch_zero.checkpoint.convert import map_file
from functorch_zero.checkpoint.manifest import NAME, Manifest, encode_manifest, parse_manifest
from functorch_zero.checkpoint.places import Places, find_places
from functorch_zero.checkpoint.rows import SavedRange, decode_rows
from functorch_zero.errors import StructureError
from tests.checkpoints import make_old, make_step, put_rows, rows_of, save_on, sealed
from tests.tiers import drawn

HOSTILE = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    2**63,
    10**30,
    1.5,
    1e308,
    "",
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "F32",
    "crc32",
    [],
    {},
    [[]],
    [-1],
    [2**62] * 64,
    [0] * 70,
    {"a": {}},
    "x" * 1000,
    [1, 2, 3, 4],
    [0, 0, 1, 8],
    "00000000",
]


STEP = "step-000000000002"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save_on(root, 2, 3)
    return root


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of version 1."""
    root = tmp_path_factory.mktemp("old")
    save_on(root, 2, 3)
    make_old(root / STEP)
    return root


def body_of(root: Path) -> Any:
    return json.loads((root / STEP / NAME).read_bytes().split(b"\n", 1)[1])


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every node of nested data."""
    found = [at]
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, child in items:
        found += places(child, (*at, key))
    return found


def put(node: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    made = copy.copy(node)
    made[at[0]] = put(node[at[0]], at[1:], value)
    return made


@cache
def fresh() -> tuple[Any, Any]:
    """A step and its first state, for all examples: loading makes a new state."""
    step, params, buffers = make_step()
    return step, step.init(params, buffers)


def load_hostile(root: Path, data: bytes) -> None:
    """Load with this manifest: numbers, or an error of ours, soon."""
    path = root / STEP / NAME
    good = path.read_bytes()
    step, like = fresh()
    path.write_bytes(data)
    start = time.process_time()
    try:
        checkpoint.load(root, step, like=like, count=2)
    except (CheckpointError, StructureError):
        pass
    finally:
        path.write_bytes(good)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("version", ["saved", "old"])
@drawn(data=st.data(), quick=4, thorough=100)
def test_any_value_in_any_place(
    request: pytest.FixtureRequest, version: str, data: st.DataObject
) -> None:
    root = request.getfixturevalue(version)
    rows = body_of(root)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(places(rows)))
        rows = put(
            rows,
            at,
            data.draw(st.sampled_from(HOSTILE) | st.integers() | st.text("a\0ß😀/.", max_size=9)),
        )
    load_hostile(root, sealed(json.dumps(rows).encode()))


@drawn(data=st.data(), quick=30, thorough=200)
def test_numbers_that_are_nearly_right(saved: Path, data: st.DataObject) -> None:
    """Pieces and sizes off by a little: overlaps, gaps, reads past the end. What is found covers
    all exactly once."""
    files = [[list(piece) for piece in pieces] for pieces, _ in rows_of(saved / STEP)]
    body = body_of(saved)
    for _ in range(data.draw(st.integers(1, 2))):
        kind = data.draw(st.sampled_from(["piece", "size", "leaf", "swap"]))
        number = data.draw(st.sampled_from([0, 1]))
        by = data.draw(st.sampled_from([-8, -1, 1, 8, 64, 4096]))
        if kind == "piece":
            files[number][data.draw(st.integers(0, 9))][data.draw(st.integers(0, 2))] += by
        elif kind == "size":
            body["files"][number][1] += by
        elif kind == "leaf":
            body["leaves"][data.draw(st.integers(0, 9))][2] = [abs(by)]
        else:
            files[number][0], files[1 - number][0] = files[1 - number][0], files[number][0]
    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / STEP
        shutil.copytree(saved / STEP, step)
        (step / NAME).write_bytes(sealed(json.dumps(body).encode()))
        try:
            for rank, pieces in enumerate(files):
                put_rows(step, rank, [SavedRange(*piece) for piece in pieces], [0])
            manifest, _ = chosen(folder, 2)
            places = find_everything(manifest, step)
        except CorruptError:
            return
    for number, leaf in enumerate(manifest.leaves):
        covered = sorted((p.start, p.stop) for _, found in places.by_file([number]) for p in found)
        ends = [0, *(stop for _, stop in covered)]
        assert [start for start, _ in covered] == ends[:-1] and ends[-1] == leaf.numel


def find_everything(manifest: Manifest, folder: Path) -> Places:
    wanted = {number: (0, leaf.numel) for number, leaf in enumerate(manifest.leaves)}
    return find_places(manifest, folder, wanted)


@settings(max_examples=100)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes(saved: Path, junk: bytes, seal: bool) -> None:
    with pytest.raises(CorruptError):
        parse_manifest(sealed(junk) if seal else junk, "it")
    with pytest.raises(ValueError, match="expected rows of"):
        decode_rows(junk, 3, 1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        for data in (junk, (len(junk) + 1).to_bytes(8, "little") + junk + b"!"):
            file.write_bytes(data)
            with pytest.raises(CorruptError, match=r"x\.safetensors: "):
                map_file(file)


def test_what_is_encoded_is_parsed(saved: Path) -> None:
    data = (saved / STEP / NAME).read_bytes()
    manifest = parse_manifest(data, "it")
    assert encode_manifest(manifest) == data


BODIES = {
    "duplicate keys": b'{"format": "functorch_zero checkpoint", "format": "functorch_zero '
    b'checkpoint"}',
    "NaN": b'{"format": NaN}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "long number": b'{"step": ' + b"9" * 5000 + b"}",
    "pickle": pickle.dumps({"a": 1}),
    "not text": b"\xff\xfe\x00",
    "other format": b'{"format": "other"}',
    "a list": b"[]",
}


@pytest.mark.parametrize("name", [*BODIES])
def test_json_that_is_refused(saved: Path, name: str) -> None:
    with pytest.raises(CorruptError, match="it: "):
        parse_manifest(sealed(BODIES[name]), "it")
    load_hostile(saved, sealed(BODIES[name]))


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (
            ("files", 0, 0),
            "../rank-00001-of-00002.safetensors",
            "expected the file rank-00001-of-00002",
        ),
        (("files", 0, 0), "/etc/passwd", "expected the file"),
        (("version",), 4, "of version 4"),
        (("extra",), 1, "keys"),
        (("ranks",), 10**9, "number of ranks"),
        (("leaves", 0, 2), [2**40, 2**40], "is not a shape"),
        (("leaves", 0, 1), "F99", "unknown dtype"),
        (("files", 0, 2), -1, "no counts"),
        (("files", 0, 3), 1.0, "no counts"),
        (("block",), 2**40, "size for a block"),
        (("checksum",), "md5", "unknown checksum"),
    ],
)
def test_what_is_wrong_is_said(saved: Path, at: Any, value: Any, text: str) -> None:
    rows = body_of(saved)
    rows = {**rows, "extra": value} if at == ("extra",) else put(rows, at, value)
    with pytest.raises(CorruptError, match=text):
        parse_manifest(sealed(json.dumps(rows).encode()), "it")


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("files", 0), 7),
        (("files", 0, 0), ["a"]),
        (("files", 0, 2), "x" * 8),
        (("files", 0, 3), 7),
        (("files", 0, 3, 0), [0, 0]),
        (("files", 0, 3, 0, 1), 2**70),
        (("files", 0, 3, 0, 1), 1.5),
    ],
)
def test_what_is_wrong_in_version_1_is_said(old: Path, at: Any, value: Any) -> None:
    with pytest.raises(CorruptError, match="it: no files of version 1"):
        parse_manifest(sealed(json.dumps(put(body_of(old), at, value)).encode()), "it")


def changed(rank: int, number: int, **fields: int) -> Callable[[Any], None]:
    """Rows in which a piece has other numbers."""

    def change(files: list[list[SavedRange]]) -> None:
        files[rank][number] = files[rank][number]._replace(**fields)

    return change


def of_several(files: list[list[SavedRange]]) -> int:
    """The number of the first piece of several elements."""
    return next(i for i, piece in enumerate(files[0]) if piece.numel > 1)


def shorter(files: list[list[SavedRange]]) -> None:
    """A piece ends before it did."""
    i = of_several(files)
    files[0][i] = files[0][i]._replace(numel=files[0][i].numel - 1)


def repeated(files: list[list[SavedRange]]) -> None:
    """The last piece is an element of another one."""
    files[1][-1] = files[0][of_several(files)]._replace(numel=1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (changed(0, 0, leaf=10**6), "a leaf which there isn't"),
        (changed(0, 0, leaf=-1), "a leaf which there isn't"),
        (changed(0, 0, start=10**6), "outside of its leaf"),
        (changed(0, 0, start=-1), "outside of its leaf"),
        (changed(0, 0, start=2**63 - 1), "outside of its leaf"),
        (changed(0, 0, numel=2**63 - 1), "outside of its leaf"),
        (changed(0, 0, numel=0), "outside of its leaf"),
        (lambda files: files[0].extend(files[0] * 20), "bytes of pieces, for a file of"),
        (shorter, "not at all"),
        (repeated, "twice"),
        (lambda files: files[0].pop(), "not at all"),
    ],
)
def test_rows_that_are_refused(
    saved: Path, tmp_path: Path, version: int, change: Callable[[Any], None], text: str
) -> None:
    """With checksums that fit. By a rank that is to hold the elements, an export, and `verify`."""
    folder = tmp_path / STEP
    shutil.copytree(saved / STEP, folder)
    rows = rows_of(folder)
    files = [pieces for pieces, _ in rows]
    change(files)
    if version == 1:
        make_old(folder)
        body = body_of(tmp_path)
        for entry, pieces in zip(body["files"], files, strict=True):
            entry[3] = [[*piece, 8] for piece in pieces]
        (folder / NAME).write_bytes(sealed(json.dumps(body).encode()))
    else:
        for rank, (pieces, (_, sums)) in enumerate(zip(files, rows, strict=True)):
            put_rows(folder, rank, pieces, sums)
    step, like = fresh()
    for read in (
        lambda: checkpoint.load(tmp_path, step, like=like),
        lambda: checkpoint.export_weights(
            tmp_path, tmp_path / "out", trees=["params", "opt_state"]
        ),
    ):
        with pytest.raises(CorruptError, match=f"{STEP}.*{text}"):
            read()
    assert any(
        "its header and its rows differ" in problem or re.search(text, problem)
        for problem in checkpoint.verify(tmp_path)[2]
    )


def test_a_huge_manifest_is_not_read(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-000000000001"
    folder.mkdir()
    with open(folder / NAME, "wb") as file:
        file.truncate(10**11)  # takes no room
    start = time.process_time()
    assert "more than the" in checkpoint.verify(tmp_path)[1][0]
    assert time.process_time() - start < 1


def text_of(table: Any) -> bytes:
    return json.dumps(table, separators=(",", ":")).encode()


def rows_changed(**changes: Any) -> Callable[[Any], bytes]:
    """A header in which every tensor says this."""
    return lambda table: text_of({name: {**row, **changes} for name, row in table.items()})


def twice(table: Any) -> bytes:
    """A tensor twice, the same both times."""
    name, row = next(iter(table.items()))
    return text_of(table)[:-1] + b"," + text_of({name: row})[1:]


def moved(by: int) -> Callable[[Any], bytes]:
    """The last tensor ends at another place."""

    def change(table: Any) -> bytes:
        row = table[list(table)[-1]]
        row["data_offsets"][1] += by
        return text_of(table)

    return change


HEADERS: dict[str, Callable[[Any], bytes]] = {
    "overlap": rows_changed(data_offsets=[0, 8]),
    "a gap": lambda table: text_of(dict(list(table.items())[1:])),
    "an end too late": moved(8),
    "an end too early": moved(-8),
    "offsets that fall": rows_changed(data_offsets=[8, 0]),
    "negative offsets": rows_changed(data_offsets=[-8, 0]),
    "an offset": rows_changed(data_offsets=[8]),
    "another shape": rows_changed(shape=[10**6]),
    "a huge shape": rows_changed(shape=[2**62, 2**62]),
    "a negative shape": rows_changed(shape=[-1]),
    "a shape of fractions": rows_changed(shape=[1.5]),
    "a shape that is text": rows_changed(shape="1"),
    "an unknown dtype": rows_changed(dtype="F99"),
    "another dtype": rows_changed(dtype="U8"),
    "no dtype": rows_changed(dtype=None),
    "rows that are numbers": lambda table: text_of(dict.fromkeys(table, 1)),
    "duplicate keys": twice,
    "half of it": lambda table: text_of(table)[: len(text_of(table)) // 2],
    "not text": lambda table: text_of(table).replace(b"params", b"param\xff"),
    "NaN": lambda table: text_of({**table, "__metadata__": float("nan")}),
    "deep": lambda table: b"[" * 100_000 + b"]" * 100_000,
    "a list": lambda table: b"[]",
    "no tensors": lambda table: b"{}",
    "nothing": lambda table: b"",
    "a pickle": pickle.dumps,
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_refused(saved: Path, tmp_path: Path, name: str) -> None:
    """In somebody's file that is imported; and in our own, with checksums that fit."""
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    own = root / STEP / "rank-00001-of-00002.safetensors"
    data = own.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    assert set(map_file(own)) == set(json.loads(header)) and checkpoint.verify(root) == {2: []}
    bad = HEADERS[name](json.loads(header))
    foreign = tmp_path / "model.safetensors"
    foreign.write_bytes(len(bad).to_bytes(8, "little") + bad + body)
    with pytest.raises(CorruptError, match=r"model\.safetensors: .*Remedy: fetch or write"):
        map_file(foreign)
    own.write_bytes(data[:8] + bad.ljust(length)[:length] + body)
    reseal(own)
    (problem,) = checkpoint.verify(root)[2]
    remedy = "Remedy: load another step (`count=`)"
    assert problem == f"{own}: its header and its rows differ. {remedy}"


def reseal(file: Path) -> None:
    """Give a file that was changed the checksums that it has now."""
    rank = int(file.name[5:10]) - 1
    pieces, _ = rows_of(file.parent)[rank]
    manifest, _ = chosen(file.parent.parent, 2)
    data = memoryview(file.read_bytes())
    blocks = [data[i : i + manifest.block] for i in range(0, len(data), manifest.block)]
    put_rows(file.parent, rank, pieces, [CHECKSUMS[manifest.checksum](block) for block in blocks])


@pytest.mark.parametrize("length", [0, 1, 7, 10**7, 10**8, 2**63, 2**64 - 1])
def test_headers_of_any_length(saved: Path, tmp_path: Path, length: int) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    own = root / STEP / "rank-00001-of-00002.safetensors"
    own.write_bytes(length.to_bytes(8, "little") + own.read_bytes()[8:])
    with pytest.raises(CorruptError, match=r"rank-00001-of-00002\.safetensors: .*Remedy: "):
        map_file(own)
    reseal(own)
    (problem,) = checkpoint.verify(root)[2]
    assert problem.startswith(f"{own}: ") and "Remedy: " in problem


def test_a_header_over_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CorruptError, match=r"x\.safetensors: ends at byte 0"):
        map_file(path)
    path.write_bytes((10**8).to_bytes(8, "little"))
    os.truncate(path, 2 * 10**8)
    with pytest.raises(CorruptError, match="says that its header"):
        map_file(path)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("bomb",))


def test_nothing_is_unpickled(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that torch.load would run are damage like any other, and `pickle` isn't called between
    ranks."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    save_on(root, 1, 0)
    folder = root / STEP
    torch.save({"a": Bomb()}, folder / NAME)
    assert checkpoint.verify(root)[2]
    save_on(root, 1, 0, steps=3)
    size = (root / "step-000000000003" / "rank-00001-of-00001.safetensors").stat().st_size
    (root / "step-000000000003" / "rank-00001-of-00001.safetensors").write_bytes(
        pickle.dumps(Bomb()).ljust(size)
    )
    step, params, buffers = make_step()
    with pytest.raises(CorruptError):
        checkpoint.load(root, step, like=step.init(params, buffers), count=3)
    assert not (tmp_path / "bomb").exists()
    sources = Path(checkpoint.__file__).parent.glob("*.py")
    assert not [
        path.name
        for path in sources
        if re.search(r"\bpickle\b|torch\.load\(|torch\.save\(", path.read_text())
    ]


@pytest.mark.parametrize(
    ("about", "optimizer"),
    [
        ({"optimizer": {"printed": "sgd(learning_rate=0.1)"}}, "sgd(learning_rate=0.1)"),
        ({"optimizer": '["POINTWISE", []]'}, None),  # as earlier versions wrote it
        ({}, None),
        ({"optimizer": {"printed": 3}}, None),
        ({"optimizer": {"printed": "\x1b[2J"}}, None),  # it would reach a terminal
    ],
)
def test_the_optimizer_of_a_manifest(about: dict[str, Any], optimizer: str | None) -> None:
    manifest = Manifest(0, 1, None, 4096, "crc32", (), {}, (), None, about)
    assert manifest.optimizer == optimizer
