"""Programs whose optimizers' states have a place of their own: the same numbers to the bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import StructureError
from functorch_zero.groups import run_ranks
from functorch_zero.optim.states import ScaleByLearningRateState
from functorch_zero.places import Here
from functorch_zero.testing import assert_equal_values
from tests.local import part
from tests.places import Away, Counted
from tests.tiers import thinned, tiers

EXACT = "bitwise"
FIRST = {
    "w": torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_(),
    "b": torch.randn(3, generator=torch.Generator().manual_seed(2)).requires_grad_(),
    "frozen": torch.full((3,), 0.5),
}
BATCHES = [torch.randn(12, 5, generator=torch.Generator().manual_seed(n)) for n in range(6)]
adamw = optim.adamw(0.1)


def loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]) * params["frozen"]).square().mean()


def program_of(optimizer: Any) -> Any:
    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        return optimizer.apply(grads, state, params), {"loss": mean}

    return fz.program_step(program, init=lambda params: (params, optimizer.init(params)))


def places_of(state: Any) -> Any:
    return None if state is None else {"state": state}


def train(sharded: Any, state: Any, batches: Any = BATCHES) -> Any:
    for x in batches:
        state, _ = sharded(state, part(x, sharded.group))
    return state


def reads(value: Any, x: Tensor) -> Any:
    """A program that reads a field of its state, maps the state, puts a rate into it, and averages
    old and new ones."""
    params, state = value
    mean, grads = fz.value_and_grad(loss)(params, x)
    update, state = adamw.update(grads, state, params)
    update = tree_map(lambda u, m: u + 0.01 * m if m is not None else u, update, like(grads, state))
    state = tree_map(lambda s: 0.9 * s if s.is_floating_point() else s, state)
    state = optim.states.replace_states(
        state, ScaleByLearningRateState, lambda s: s._replace(learning_rate=mean.double())
    )
    rate = optim.state_metrics(state)["learning_rate"]
    return (fz.apply_updates(params, update), state), {"loss": mean, "rate": rate}


def like(grads: Any, state: Any) -> Any:
    """The first moments as a tree like the gradients."""
    moments = state[0].mu
    return optree.tree_map_with_path(lambda path, g: moments[path[-1]], grads)


@pytest.mark.parametrize("level", tiers([3], [0, 1]))
def test_a_program_reads_its_state(level: int) -> None:
    step = fz.program_step(reads, init=lambda params: (params, adamw.init(params)))

    def run(group: Any) -> None:
        wholes = []
        for donate in (False, True):
            for storage in (None, Away()):
                options = {"level": level, "group": group, "donate": donate}
                sharded = fz.shard(step, **options, place=places_of(storage))
                wholes.append(sharded.unshard(train(sharded, sharded.init(FIRST))))
        for whole in wholes[1:]:
            assert_equal_values(wholes[0], whole, grade=EXACT)

    run_ranks(run, 2)


def test_reports_bring_nothing_and_a_state_that_is_read_stays() -> None:
    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        count = state[0].count
        mean, grads = fz.value_and_grad(loss)(params, x)
        params, state = adamw.apply(grads, state, params)
        return (params, state), {"loss": mean, "count": count, **optim.state_metrics(state)}

    step = fz.program_step(program, init=lambda params: (params, adamw.init(params)))

    def run(group: Any) -> None:
        storage = Away()
        sharded = fz.shard(step, level=1, group=group, donate=True, place=places_of(storage))
        state, _ = sharded(sharded.init(FIRST), part(BATCHES[0], group))
        storage.calls.clear()
        after, metrics = sharded(state, part(BATCHES[1], group))
        # Two flats, for the field that is read, for the update, and for a look
        assert storage.calls == {"bring": 2 * 3, "empty": 2, "leave": 2}
        assert metrics["count"] == 1 and metrics["learning_rate"] == 0.1
        assert state.value[1].tree[0].count == 1  # its leaves were read, so it stays
        assert set(optim.state_metrics(after.value[1])) == {"learning_rate"}

    run_ranks(run, 2)


@pytest.mark.parametrize("donate", tiers([True], [False]))
def test_a_step_without_a_place_brings_the_state_of_one_with(donate: bool) -> None:
    """Also in a call that isn't looked at, in which nobody else reads leaves: the sixth."""

    def program(value: Any, x: Tensor) -> Any:
        params, state = value
        _, grads = fz.value_and_grad(loss)(params, x)
        params = fz.apply_updates(params, tree_map(lambda g, m: g + m, grads, like(grads, state)))
        return (params, state), {}

    reading = fz.program_step(program, init=lambda params: (params, adamw.init(params)))

    def run(group: Any) -> None:
        options: dict[str, Any] = {"level": 1, "group": group, "donate": donate}
        wholes = []
        for storage in (None, Away()):
            writer = fz.shard(program_of(adamw), **options, place=places_of(storage))
            reader = fz.shard(reading, **options)
            train(reader, reader.init(FIRST), [*BATCHES[:3], *BATCHES[:2]])
            state = train(writer, writer.init(FIRST), BATCHES[:2])
            wholes.append(reader.unshard(train(reader, state, BATCHES[3:4])))
        assert_equal_values(*wholes, grade=EXACT)

    run_ranks(run, 2)


def test_outside_of_a_step() -> None:
    """A loop of the user's own goes on with a step's trees, and copies and pickles them."""
    step = program_of(adamw)

    def run(group: Any) -> None:
        values = []
        for storage in (None, Away()):
            sharded = fz.shard(step, level=3, group=group, place=places_of(storage))
            value = train(sharded, sharded.init(FIRST), BATCHES[:2]).value
            params, state = copy.deepcopy(value) if storage is None else value
            _, grads = fz.value_and_grad(loss)(params, part(BATCHES[2], group))
            params, state = adamw.apply(grads, state, params)
            values.append((fz.unshard(params), fz.unshard(state)))
        assert_equal_values(*values, grade=EXACT)
        # As it lies, like the state of a training step
        assert state.as_it_lies[0].mu["w"].eq(-state.beside[0].mu["w"]).all()
        assert pickle.loads(pickle.dumps(state)).holding.brought is None

    run_ranks(run, 2)


def test_a_state_that_the_program_needs_later_stays() -> None:
    """An average of the old and the new state."""

    def program(value: Any, x: Tensor) -> Any:
        params, old = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        params, new = adamw.apply(grads, old, params)
        state = tree_map(lambda o, n: 0.5 * (o + n) if n.is_floating_point() else n, old, new)
        return (params, state), {"loss": mean}

    step = fz.program_step(program, init=lambda params: (params, adamw.init(params)))

    def run(group: Any) -> None:
        storage, wholes = Away(), []
        for own in (None, storage):
            sharded = fz.shard(step, level=1, group=group, donate=True, place=places_of(own))
            wholes.append(sharded.unshard(train(sharded, sharded.init(FIRST))))
        assert_equal_values(*wholes, grade=EXACT)
        assert storage.calls["leave"] == storage.calls["empty"]

    run_ranks(run, 2)


@pytest.mark.parametrize("method", ["bring", "empty"])
def test_a_tensor_of_another_form_is_refused(method: str) -> None:
    class Other(Away):
        pass

    for made, words in ((Tensor.half, r"torch\.float16"), (lambda x: None, "NoneType")):
        wrong = (lambda x, made=made: Here(made(x))) if method == "bring" else made
        setattr(Other, method, lambda self, x, wrong=wrong: wrong(x))
        sharded = fz.shard(
            program_of(optim.adam(0.1)),
            level=1,
            group=fz.groups.SingleRank(),
            place={"state": Other()},
        )
        with pytest.raises(StructureError, match=rf"Other returned.*float64, got .*{words}"):
            sharded(sharded.init(FIRST), BATCHES[0])


@pytest.mark.parametrize("donate", thinned([True, False]))
@pytest.mark.parametrize("level", thinned([3, 1, 0]))
def test_everything_in_files(level: int, donate: bool, tmp_path: Path) -> None:
    """Also a tree that the program makes by `tree_map`: an average."""

    def program(value: Any, x: Tensor) -> Any:
        params, state, average = value
        mean, grads = fz.value_and_grad(loss)(params, x)
        params, state = adamw.apply(grads, state, params)
        average = tree_map(lambda a, p: (0.9 * a + 0.1 * p).detach(), average, params)
        return (params, state, average), {"loss": mean}

    def init(params: Any) -> Any:
        return params, adamw.init(params), tree_map(lambda p: p.detach().clone(), params)

    step, disk = fz.program_step(program, init=init), Counted(tmp_path)
    everything = dict.fromkeys(("state", "params", "gradients", "saved"), disk)

    def run(group: Any) -> None:
        wholes = []
        for place in (None, everything):
            sharded = fz.shard(step, level=level, group=group, donate=donate, place=place)
            state = train(sharded, sharded.init(FIRST))
            wholes.append(sharded.unshard(state))
        for tree in (state.value[0], state.value[2]):
            assert all(map(disk.holds, tree.flats()))
        assert_equal_values(*wholes, grade=EXACT)

    run_ranks(run, 3)
