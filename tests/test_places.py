"""Files as places."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from functorch_zero.errors import StructureError
from functorch_zero.places import File, Place

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (), (0, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_tensor(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    place: Place = File(tmp_path)
    x = torch.randint(0, 2, shape).to(dtype)
    made = place.empty(x)
    assert made.shape == x.shape and made.dtype == dtype and made.is_contiguous()
    place.leave(x, made).wait()
    assert torch.equal(place.bring(made).wait(), x)
    assert place.holds(made) and (place.holds(x) == (x.numel() == 0))


def test_files_have_no_names_and_outlive_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    place = File(folder)
    one, two = place.empty(torch.ones(1000)), place.empty(torch.ones(1000))
    assert not [*folder.iterdir()]
    shutil.rmtree(folder)
    one.fill_(1), two.fill_(2)
    assert one.sum() == 1000 and place.holds(one)
    with pytest.raises(StructureError, match=r"No such file.*a folder that exists"):
        place.empty(one)


def test_no_room(tmp_path: Path) -> None:
    """At once, and not when the file is written to."""
    with pytest.raises(StructureError, match=r"could not make a file.*with room for .* bytes"):
        File(tmp_path).empty(torch.ones(1).expand(2**55))
    assert not [*tmp_path.iterdir()]


def test_copies_lie_in_memory(tmp_path: Path) -> None:
    place = File(tmp_path)
    x = place.empty(torch.ones(5)).fill_(3)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.clone()):
        assert torch.equal(x, other) and not place.holds(other)
    assert not File(tmp_path / "other").holds(x)


def test_other_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="meta"):
        File(tmp_path).empty(torch.ones(5, device="meta"))


def test_a_forked_process_is_told(tmp_path: Path) -> None:
    """It would write to the files of the one that it was forked from."""
    place = File(tmp_path)
    x = place.empty(torch.ones(5))
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            place.holds(place.empty(x))  # one of its own
            place.holds(x)
        except StructureError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert b"forked" in os.read(read, 1000)
    os.close(read)
    assert place.holds(x)
