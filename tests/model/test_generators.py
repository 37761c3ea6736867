"""Which generators a seed reaches, on a machine with two GPUs. Two generators of the CPU stand for
theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functorch_zero.errors import StructureError
from functorch_zero.model.deferred_init import deferred_init
from functorch_zero.model.generators import is_seeded, seeded
from functorch_zero.model.initialisation import Initialisation
from functorch_zero.step.rng import replayed


class TwoGPUs:
    """The part of torch.cuda that has to do with generators."""

    def __init__(self) -> None:
        self.default_generators = [torch.Generator().manual_seed(n) for n in range(2)]
        self.current = 0

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, self._number(device)
        yield
        self.current = before

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.default_generators[self._number(device)].get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.default_generators[self._number(device)].set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.default_generators[self.current].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def _number(self, device: torch.device) -> int:
        return self.current if device.index is None else device.index

    def states(self) -> list[list[int]]:
        return [generator.get_state().tolist() for generator in self.default_generators]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGPUs:
    gpus = TwoGPUs()
    for name in dir(gpus):
        if not name.startswith("_") and name not in ("current", "states"):
            monkeypatch.setattr(torch.cuda, name, getattr(gpus, name))
    return gpus


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_other_gpus_are_left_alone(gpus: TwoGPUs, name: str) -> None:
    device = torch.device(name)
    here, other = (1, 0) if name == "cuda:1" else (0, 1)
    before, on_cpu = gpus.states(), torch.get_rng_state()
    drawn = []
    for seed in (3, 3, 4):
        with seeded(seed, device):
            inside = gpus.states()
            assert inside[other] == before[other] and inside[here] != before[here]
            drawn.append([torch.rand(2), torch.rand(2, generator=gpus.default_generators[here])])
        assert gpus.states() == before and torch.equal(torch.get_rng_state(), on_cpu)
    first, again, others = drawn
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first), torch.cat(others))


def test_the_cpu_leaves_all_gpus_alone(gpus: TwoGPUs) -> None:
    before = gpus.states()
    with seeded(3, torch.device("cpu")):
        assert gpus.states() == before
    assert gpus.states() == before


@pytest.mark.parametrize("name", ["cuda:1", "cpu"])
def test_steps_and_initialisers_leave_other_gpus_alone(gpus: TwoGPUs, name: str) -> None:
    before = gpus.states()
    with replayed(torch.tensor(1), torch.tensor(2), 0, torch.device(name)):
        assert gpus.states()[0] == before[0]
    assert gpus.states() == before


def test_deferred_initialisation_leaves_gpus_alone(gpus: TwoGPUs) -> None:
    before = gpus.states()
    model = nn.Linear(2, 2, device="meta")
    made = deferred_init(model, seed=0).fill(dict(model.named_parameters()))
    assert made["weight"].abs().sum() > 0
    assert gpus.states() == before


def test_an_initialiser_that_draws_from_another_gpu(gpus: TwoGPUs) -> None:
    """No seed has reached its generator, so one that has drawn before is refused."""
    other = gpus.default_generators[1]
    torch.rand(1, generator=other)
    here = gpus.default_generators[0]
    assert is_seeded(here, torch.device("cuda")) and is_seeded(here, torch.device("cuda:0"))
    assert is_seeded(torch.default_generator, torch.device("cuda"))
    assert not is_seeded(other, torch.device("cuda")) and not is_seeded(here, torch.device("cpu"))
    initialisation: Any = Initialisation("block", torch.device("cuda:0"))
    with initialisation:
        torch.rand(1, generator=here)
        with pytest.raises(StructureError, match="drawn before"):
            torch.rand(1, generator=other)
