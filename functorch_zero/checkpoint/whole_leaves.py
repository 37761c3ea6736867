"""A state's leaves, whole and one after the other, on one rank: for a server, a file or a hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod

import optree
import torch
from torch import Tensor

from ..errors import StructureError
from ..groups import labelled
from ..groups.checks import check_source
from ..groups.protocol import Group
from ..sharded.failures import sharing_failures
from ..sharded.words import exchange_data
from ..sharded_optim.mail import Mail
from ..step.state import State
from ..tree import in_words
from .agreement import together
from .contents import LocalLeaf, Step, contents_of, frozen_in, group_of


def leaves(
    step: Step,
    state: State,
    *,
    of: str = "params",
    frozen: bool = True,
    to: int = 0,
    dtype: torch.dtype | None = None,
    max_bytes: int = 2**26,
) -> Iterator[tuple[str, Tensor]]:
    """The whole leaves of a state, one after the other, on one rank; the others' loops have no
    turns.

    Every rank runs the loop to its end. What iterates may be another program's, such as an
    inference engine's `load_weights`:

        for path, leaf in checkpoint.leaves(step, state, dtype=torch.bfloat16):
            server.send(path, leaf)

    Leaves travel in packs, each by one all-to-all: what the receiver lacks arrives once. It holds
    two packs at most, and what the loop keeps; the others hold no more than their pieces of one
    pack besides.

    Args:
        step: that the state belongs to, sharded or not.
        state: is only read.
        of: a path in the state, as checkpoints have them: "params", "opt_state", "buffers"; of a
            program, one in its value, such as "generator". "": all leaves but `State.parts`.
        frozen: False: without the params that a training step does not train.
        to: the rank that gets them.
        dtype: to cast leaves of floating point to, before they travel.
        max_bytes: of one pack. A larger leaf is a pack by itself.

    Yields:
        The path below `of`, and the leaf in its own shape, on the device of the receiver's piece: a
        tensor of the loop's own.

    Raises:
        StructureError: nothing lies at `of`, or the state is not of this step; on all ranks.
        PeerError: on the other ranks, where the loop of `to` was left before its end.
    """
    group = group_of(step)
    check_source(group.size, to)

    def choose() -> list[LocalLeaf]:
        names = frozenset() if frozen else frozen_in(step, state)
        found = contents_of(step, state).leaves
        # The parts are a state's last leaves. By number, since a program may have an entry "parts"
        found = found[: len(found) - len(optree.tree_leaves(state.parts))]
        return [local for local in _at(found, of, group.rank) if local.path not in names]

    def digest(chosen: list[LocalLeaf]) -> str:
        """Of what ranks must have alike."""
        rows = [(local.path, local.shape, str(local.tensor.dtype)) for local in chosen]
        return hashlib.sha256(repr((to, of, str(dtype), max_bytes, rows)).encode()).hexdigest()

    chosen, digests = together(group, "send leaves", choose, digest)
    if len({*digests}) > 1:
        raise StructureError(
            "the ranks send leaves of different states, or to different ranks. Remedy: the same "
            "arguments on every rank"
        )
    yield from _send(chosen, of, to, dtype, max_bytes, labelled(group, "leaves"))


def _inside(of: str, path: str) -> str:
    """The path of a leaf from there on, of one that is there or below."""
    return path[len(f"{of}.") :] if of else path


def _at(found: list[LocalLeaf], of: str, rank: int) -> list[LocalLeaf]:
    """Those of a state's leaves at a path or below."""
    if not of:
        return found
    below = [local for local in found if local.path == of or local.path.startswith(f"{of}.")]
    if not below:
        names = sorted({local.path.split(".")[0] for local in found})
        raise StructureError(
            "no tensors lie there in the state", path=of, expected=names, rank=rank
        )
    return below


def _send(
    chosen: Sequence[LocalLeaf],
    of: str,
    to: int,
    dtype: torch.dtype | None,
    max_bytes: int,
    group: Group,
) -> Iterator[tuple[str, Tensor]]:
    with sharing_failures(group, call="leaves", settles=True):
        for pack in _packs(chosen, dtype, max_bytes):
            # Cast now, so that no rank has all of its leaves twice
            sent = (_to_send(local, dtype, to, group.rank) for local in pack)
            # None but at the receiver
            rows = zip(_gather([*sent], to, group), pack, strict=False)
            whole = [(_inside(of, local.path), leaf) for leaf, local in rows]
            while whole:
                try:
                    yield whole.pop(0)
                except GeneratorExit:
                    what = "the loop over a state's leaves was left before its end"
                    group.fail(StructureError(what))
                    raise


def _packs(
    chosen: Sequence[LocalLeaf], dtype: torch.dtype | None, max_bytes: int
) -> Iterator[list[LocalLeaf]]:
    """The leaves in runs of at most so many bytes, each on one device."""
    pack: list[LocalLeaf] = []
    size = 0
    for local in chosen:
        number = prod(local.shape) * _travels_as(local.tensor, dtype).itemsize
        if pack and (size + number > max_bytes or local.tensor.device != pack[0].tensor.device):
            yield pack
            pack, size = [], 0
        pack.append(local)
        size += number
    if pack:
        yield pack


def _travels_as(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _to_send(local: LocalLeaf, dtype: torch.dtype | None, to: int, rank: int) -> LocalLeaf:
    """The elements (n,) that this rank sends of a leaf, in the dtype that travels."""
    # One of the ranks that have the same elements sends them
    sends = rank == to if local.everywhere else local.saved
    here = local.tensor.detach().reshape(-1)[: None if sends else 0]
    here = here.to(_travels_as(here, dtype)).resolve_conj().resolve_neg().contiguous()
    return local._replace(tensor=here)


def _gather(pack: Sequence[LocalLeaf], to: int, group: Group) -> list[Tensor]:
    """The leaves of a pack, whole, at the rank that gets them; elsewhere none. One exchange of
    where each rank's elements lie, and one all-to-all of bytes."""
    own = [(sent.start * sent.tensor.element_size(), sent.tensor.nbytes) for sent in pack]
    # By rank and leaf, in bytes of the leaf: where its elements start, and their number
    spans = exchange_data(group, own)
    mail = Mail(group)
    for sent in pack:
        mail.send(to, in_words(sent.tensor, torch.uint8))
    for rank, of_rank in enumerate(spans) if group.rank == to else ():
        for i, (start, n) in enumerate(of_rank):
            mail.expect(rank, (i, start), n)
    arrived = mail.exchange(pack[0].tensor.new_empty(0, dtype=torch.uint8))
    if group.rank != to:
        return []
    whole = [sent.tensor.new_empty(sent.shape) for sent in pack]
    for (i, start), runs in arrived.items():
        for run in runs:
            whole[i].view(-1).view(torch.uint8)[start : start + run.numel()] = run
    return whole
