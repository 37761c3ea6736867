"""A state's leaves, whole, on one rank: from every level and mesh, and loops that are left."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim
from functorch_zero.errors import PeerError, StructureError
from functorch_zero.groups import HybridGroup, SingleRank, ThreadGroup, run_ranks
from tests.tiers import crossed, tiers

QUICK, OTHERS = [(3, 3), (3, 4), (1, 3)], [(0, 2), (2, 2), (3, 1)]  # levels and ranks
MOST_BYTES = [1, 100, 2**26]


def model() -> Any:
    torch.manual_seed(0)
    return fz.functionalize(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))


def trained(group: Any, level: int) -> tuple[Any, Any]:
    """A step and its state: AdamW in pieces, Muon's matrices with owners, and buffers."""
    apply, params, buffers = model()

    def loss_fn(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        y, buffers = apply(params, buffers, x)
        return (y - 1).square().mean(), fz.Aux(buffers=buffers)

    step = fz.shard(fz.train_step(loss_fn, optim.muon(1e-2)), level=level, group=group)
    state = step.init(params, buffers)
    for seed in range(2):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))
        state, _ = step(state, fz.data.share(x, group))
    return step, state


def same(found: list[tuple[str, torch.Tensor]], tree: Any) -> None:
    """The leaves are those of a whole tree, to the bit."""
    wanted = dict(fz.named_leaves(tree))
    wanted = {path: leaf for path, leaf in wanted.items() if isinstance(leaf, torch.Tensor)}
    assert [path for path, _ in found] == [*wanted]
    for path, leaf in found:
        assert leaf.shape == wanted[path].shape and torch.equal(leaf, wanted[path]), path


@pytest.mark.parametrize(
    ("at", "max_bytes"),
    [*crossed(QUICK, MOST_BYTES), *tiers(thorough=product(OTHERS, MOST_BYTES), rows=True)],
)
def test_one_rank_gets_the_whole_leaves(at: tuple[int, int], max_bytes: int) -> None:
    level, ranks = at

    def run(group: Any) -> None:
        mesh = HybridGroup(group, shard_size=2) if ranks == 4 else group
        step, state = trained(mesh, level)
        whole, to = step.unshard(state), ranks - 1
        for of in ("params", "opt_state", "buffers", ""):
            found = list(checkpoint.leaves(step, state, of=of, to=to, max_bytes=max_bytes))
            if group.rank == to:
                same(found, getattr(whole, of) if of else whole)
            else:
                assert not found

    run_ranks(run, ranks)


def test_of_a_program_and_of_one_process() -> None:
    apply, params, _ = fz.functionalize(nn.Linear(5, 3))
    adamw = optim.adamw(1e-2)

    def init(params: Any) -> Any:
        return {"net": params, "opt": adamw.init(params)}

    def program(value: Any, x: torch.Tensor) -> Any:
        call = lambda p, x: apply(p, {}, x)[0].square().mean()
        loss, grads = fz.value_and_grad(call)(value["net"], x)
        updates, opt = adamw.update(grads, value["opt"], value["net"])
        return {"net": fz.apply_updates(value["net"], updates), "opt": opt}, {"loss": loss}

    unsharded = fz.program_step(program, init=init)

    def run(group: Any) -> None:
        step = unsharded if group is None else fz.shard(unsharded, level=3, group=group)
        state, _ = step(step.init(params), torch.ones(4, 5))
        whole = state if group is None else step.unshard(state)
        found = list(checkpoint.leaves(step, state, of="net"))
        if group is None or group.rank == 0:
            same(found, whole.value["net"])

    run(None)
    run_ranks(run, 2)


@pytest.mark.parametrize("name", ["parts", "net", ".net"])
def test_a_program_names_its_leaves_as_it_likes(name: str) -> None:
    """As the state's own parts, which are left out, and with dots at the ends."""

    def program(value: Any, x: torch.Tensor) -> Any:
        return value, {}

    unsharded = fz.program_step(program, init=lambda net: {name: net})

    def run(group: Any) -> list[str]:
        step = fz.shard(unsharded, level=3, group=group)
        state = step.init({"w.": torch.ones(5, requires_grad=True)})
        return [path for path, _ in checkpoint.leaves(step, state, of="")]

    assert run_ranks(run, 2) == [["step", f"{name}.w.", "seed"], []]


def test_leaves_travel_in_another_dtype_and_in_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[int] = []
    all_to_all = ThreadGroup.all_to_all

    def counted(self: Any, out: torch.Tensor, *args: Any) -> Any:
        arrived.append(out.nbytes)
        return all_to_all(self, out, *args)

    def run(group: Any) -> Any:
        step, state = trained(group, 3)
        whole = step.unshard(state).params
        group.barrier()
        monkeypatch.setattr(ThreadGroup, "all_to_all", counted)
        sent = checkpoint.leaves(step, state, dtype=torch.bfloat16, max_bytes=64)
        for path, leaf in sent:
            assert torch.equal(leaf, whole[path].bfloat16())
            leaf.zero_()  # the loop's own
        return sum(leaf.numel() for leaf in state.params.local_tree.values())

    numels = run_ranks(run, 2)
    # Those of the other rank. The largest leaf, of 35 elements, is one of three packs by itself
    assert sum(arrived) == 2 * numels[1] and len(arrived) == 2 * 3


@pytest.mark.parametrize("how", tiers(["raise"], ["break"]))
def test_a_loop_that_is_left_is_an_error_on_the_others(how: str) -> None:
    def run(group: Any) -> str:
        step, state = trained(group, 3)
        told = ""
        try:
            for _ in checkpoint.leaves(step, state, max_bytes=1):
                if how == "break":
                    break
                raise OSError("the server is gone")
        except OSError:
            told = "own"
        except PeerError as error:
            told = str(error)
        # All go on together
        state, _ = step(state, fz.data.share(torch.ones(4, 5), group))
        assert len(list(checkpoint.leaves(step, state))) == (6 if group.rank == 0 else 0)
        return told

    first, second = run_ranks(run, 2)
    assert first == ("" if how == "break" else "own")
    assert "left before its end" in second


def test_what_differs_or_is_nowhere_is_refused() -> None:
    step, state = trained(SingleRank(), 3)
    with pytest.raises(StructureError, match=r"path paramz, expected \['buffers', 'opt_state'"):
        list(checkpoint.leaves(step, state, of="paramz"))
    with pytest.raises(ValueError, match="source must be a rank"):
        list(checkpoint.leaves(step, state, to=1))

    def run(group: Any) -> None:
        step, state = trained(group, 3)
        list(checkpoint.leaves(step, state, dtype=torch.float16 if group.rank else None))

    with pytest.raises(StructureError, match="the same arguments on every rank"):
        run_ranks(run, 2)
