"""The rows beside each rank's file: what is written can be read, what ranks tell each other about
them stays small, and pieces that don't cover a state exactly are never a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from functorch_zero import checkpoint, optim
from functorch_zero.checkpoint import (
    CheckpointError,
    CorruptError,
    block_io,
    catalogue,
    manifest,
    places,
    safetensors_file,
    save_job,
    snapshot,
)
from functorch_zero.groups import counted, run_ranks
from functorch_zero.groups.protocol import Group
from functorch_zero.sharded.api import shard
from functorch_zero.step.train import train_step
from tests.checkpoints import assert_same, leftovers, load_on, make_step, on_ranks, rows_of, save_on
from tests.tiers import THOROUGH, crossed, tiers

STEP = "step-000000000002"
LIMITS = {  # where each is, and a file that it limits
    "manifest": ("MAX_BYTES", (manifest, catalogue, save_job), "manifest.json"),
    "rows": ("MAX_BYTES", (places, block_io), "rank-00001-of-00002.rows"),
    "header": ("MAX_HEADER", (safetensors_file,), None),
}


@pytest.mark.parametrize("more", tiers([()], [(0, 1)]), ids=str)
@pytest.mark.parametrize("kind", LIMITS)
def test_what_is_written_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, more: tuple[int, ...]
) -> None:
    """Around the size at which a file is too large: it is found and loaded, or `save` raises on all
    ranks, and there is nothing. `more`: limits by as much above the size."""
    saved = save_on(tmp_path / "free", 2, 3)
    name, modules, file = LIMITS[kind]
    folder = tmp_path / "free" / STEP
    if file is None:
        lengths = [path.read_bytes()[:8] for path in folder.glob("*.safetensors")]
        size = max(int.from_bytes(length, "little") for length in lengths)
    else:
        size = (folder / file).stat().st_size
    outcomes = set()
    for number, limit in enumerate([size - 1, *(size + n for n in more), 2 * size]):
        root = tmp_path / str(number)
        with monkeypatch.context() as patch:
            for module in modules:
                patch.setattr(module, name, limit)
            try:
                save_on(root, 2, 3)
            except CheckpointError as error:
                assert str(root) in str(error) and " bytes" in str(error)
                assert not root.exists() or not [*root.iterdir()]
                assert checkpoint.latest(root) is None
                outcomes.add("refused")
            else:
                assert checkpoint.latest(root) == 2 and checkpoint.verify(root) == {2: []}
                assert_same(load_on(root, 3, 1), saved)
                outcomes.add("loaded")
    assert outcomes == {"refused", "loaded"}


@pytest.mark.parametrize(("count", "outcome"), [(2**60, "found"), (2**63 - 1, ""), (-1, "")])
def test_step_numbers(tmp_path: Path, count: int, outcome: str) -> None:
    """Those that would not be found are refused."""
    step, params, buffers = make_step()
    state = step.init(params, buffers).replace(step=torch.tensor(count))
    if outcome == "found":
        checkpoint.save(tmp_path, step, state)
        assert checkpoint.latest(tmp_path) == count
    else:
        with pytest.raises(CheckpointError, match="the step is no count"):
            checkpoint.save(tmp_path, step, state)
        assert not [*tmp_path.iterdir()]


def refused_user(root: Path, user: Any) -> list[str]:
    """The errors of all ranks."""

    def save(step: Any, state: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(root, step, state, user=user)
        checkpoint.save(root, step, state, user="little")
        return str(caught.value)

    return on_ranks(2, 3, save)


def test_user_data_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on every rank, with root and remedy, before anything is written; then the ranks can
    save."""
    for module in LIMITS["manifest"][1]:
        monkeypatch.setattr(module, "MAX_BYTES", 8000)
    made: list[Any] = []
    temporary = save_job.Temporary
    monkeypatch.setattr(save_job, "Temporary", lambda *args: made.append(args) or temporary(*args))
    user = {"order": list(range(1000, 2600))}  # 5 bytes each
    first, second = refused_user(tmp_path, user)
    assert first == second and len(made) == 1
    assert first.startswith(f"could not save to {tmp_path}: rank 0: the manifest would have ")
    assert "8011 of them for `user`, and `load` reads no more than 8000. Remedy: write" in first
    assert "stack leaves" not in first
    assert checkpoint.latest(tmp_path) == 0 and checkpoint.verify(tmp_path) == {0: []}


@THOROUGH
def test_user_data_of_64_mib(tmp_path: Path) -> None:
    first, second = refused_user(tmp_path, "x" * 2**26)
    assert first == second and f"{2**26 + 2} of them for `user`" in first
    assert checkpoint.latest(tmp_path) == 0


def received(root: Path, num_ranks: int, num_leaves: int) -> int:
    """The bytes that a rank receives in a save: exchanges pad each payload to the longest one."""
    leaves = [torch.randn(2, 3, 4, 5) for _ in range(num_leaves)]
    params = {f"layer{i}": leaf.requires_grad_() for i, leaf in enumerate(leaves)}
    # With an order of dims, which the manifest has
    format = torch.channels_last
    buffers = {name: leaf.detach().to(memory_format=format) for name, leaf in params.items()}

    def loss_fn(params: Any, buffers: Any, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([leaf.square().mean() for leaf in params.values()]).sum()

    def save(group: Group) -> list[int]:
        recorded = counted(group)
        step = shard(train_step(loss_fn, optim.adamw(0.1)), level=1, group=recorded)
        state = step.init(params, buffers)
        recorded.reset()
        checkpoint.save(root, step, state)
        assert {call.kind for call in recorded.calls} == {"exchange"}
        return [call.num_elements for call in recorded.calls]

    payloads = run_ranks(save, num_ranks)
    orders = [leaf.order for leaf in catalogue.read_manifest(root, 0).leaves]
    assert len(orders) > 3 * num_leaves and sum(order is not None for order in orders) == num_leaves
    return sum(num_ranks * max(sizes) for sizes in zip(*payloads, strict=True))


@THOROUGH
def test_bytes_received_at_a_save(tmp_path: Path) -> None:
    """They grow with ranks, and not with leaves."""
    for num_ranks in (2, 4, 8):
        few = received(tmp_path / f"few{num_ranks}", num_ranks, 2)
        many = received(tmp_path / f"many{num_ranks}", num_ranks, 40)
        # Numbers have a few more digits
        assert 100 * num_ranks < few <= many <= few + 16 * num_ranks
        assert many < (500 + 3 * len(str(tmp_path))) * num_ranks


def test_a_reader_keeps_what_concerns_it(tmp_path: Path) -> None:
    """Of all the pieces those with elements that are wanted, one object at a time per file."""
    save_on(tmp_path, 4, 3)
    found = catalogue.read_manifest(tmp_path, 2)
    numbers = {leaf.path: number for number, leaf in enumerate(found.leaves)}
    number = numbers["params.layers.0.weight"]  # (5, 7)
    whole = [p for pieces, _ in rows_of(tmp_path / STEP) for p in pieces if p.leaf == number]
    assert len(whole) > 1
    second = sorted(whole)[1]
    wanted = {number: (second.start, second.start + second.numel)}
    kept = places.find_places(found, tmp_path / STEP, wanted)
    (one,) = [place for _, of_file in kept.by_file(wanted) for place in of_file]
    assert (one.leaf, one.start, one.stop) == (number, *wanted[number])


def test_rows_can_be_read_by_others(tmp_path: Path) -> None:
    save_on(tmp_path, 2, 3)
    for path, (pieces, sums) in zip(
        sorted((tmp_path / STEP).glob("*.rows")), rows_of(tmp_path / STEP), strict=True
    ):
        tensors = load_file(path)
        assert tensors["pieces"].tolist() == [list(piece) for piece in pieces]
        assert tensors["checksums"].tolist() == sums


@pytest.mark.parametrize(("mistake", "level"), crossed(["lacking", "twice", "moved"], [0, 3]))
def test_pieces_that_do_not_cover_are_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int, mistake: str
) -> None:
    """What a mistake of ours would write: the leaf is named, and nothing is left."""
    runs_to_save = snapshot.runs_to_save

    def wrong(held: Any, rank: int, num_ranks: int) -> Any:
        parts = runs_to_save(held, rank, num_ranks)
        if rank == 1 and mistake == "lacking":
            return parts[:-1]
        if rank == 1 and mistake == "twice":
            return [*parts, parts[0]._replace(numel=1)]
        if mistake == "moved":  # of a cut leaf, as many elements as before
            for i, part in enumerate(parts):
                if part.start > 0:
                    parts[i] = part._replace(start=part.start - 1)
        return parts

    monkeypatch.setattr(snapshot, "runs_to_save", wrong)
    story = {"lacking": "not at all", "twice": "twice", "moved": "twice"}[mistake]
    with pytest.raises(CorruptError, match=rf"rank 0: .*element \d+ of .* is there {story}"):
        save_on(tmp_path, 3, level)
    assert checkpoint.latest(tmp_path) is None and not leftovers(tmp_path)
