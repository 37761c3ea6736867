"""`Recorder`: a training loop tells it what each step computed, and it keeps a `Recording`.

All values are kept whole, on the CPU, by the names that a plain module gives its params.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from optree import tree_map
from torch import Tensor, nn

from ..errors import explain
from ..groups import SingleRank
from ..groups.protocol import Group
from ..model.wrappers import without_wrappers
from ..tree import PyTree, named_leaves
from .equality import is_rounded, wide
from .recording import Leaves, RecordedStep, Recording
from .runs import split

Names: TypeAlias = Mapping[str, str] | Callable[[str], str]

# The kinds that a loop tells, in the order in which they are compared; by the first that differs
# the others are spoilt
TOLD = ("loss", "gradients", "norm", "updates", "optimizer state", "buffers")


class Share(NamedTuple):
    """A run that takes batches whole, but of one of them a rank's rows, and ends there."""

    step: int
    part: int
    num_parts: int


@dataclass(frozen=True)
class Task:
    """Which run a recorder is for."""

    first: int = 0  # the number of the first step
    stop: int | None = None  # and of the one that is not run any more
    folder: Path | None = None  # where a run is saved that stops, or is loaded from
    names: Names | None = None
    jitter: int | None = None  # seeds params that are off by a rounding at the start
    rounding: torch.dtype | None = None  # the dtype of that rounding; None: each param's own
    share: Share | None = None  # of the reference's batches
    is_reference: bool = False


class Recorder:
    """The argument of a reference and a candidate of `assert_parallel_equals_reference`: it says
    what to run, and is told what came out.

    Attributes:
        group: the ranks, with their collectives: `group.rank`, `group.size`. In the reference there
            is one. In processes torch.distributed is initialised, too.
        save_to: where this run is to be saved after its last batch, a folder that all ranks share;
            or None.
        load_from: the folder from which this run goes on; or None.

    >>> import torch
    >>> from functorch_zero.testing import assert_parallel_equals_reference
    >>> def train(record):
    ...     model = torch.nn.Linear(3, 2, dtype=torch.float64)
    ...     with torch.no_grad():
    ...         model.weight.fill_(0.5), model.bias.fill_(0.1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ...     record.start(model)
    ...     for x in record.batches([torch.arange(12.0, dtype=torch.float64).view(4, 3)] * 2):
    ...         loss = model(x).square().mean()
    ...         loss.backward()
    ...         for p in model.parameters():
    ...             flat = p.grad.view(-1)
    ...             record.group.all_reduce(flat).wait()
    ...             flat /= record.group.size
    ...         record.gradients(model)
    ...         optimizer.step()
    ...         record.step(model, optimizer, loss=loss)
    ...         optimizer.zero_grad()
    >>> assert_parallel_equals_reference(train, train, ranks=2, start_method="threads")
    """

    def __init__(self, group: Group | None = None, task: Task | None = None) -> None:
        self.group: Group = group or SingleRank()
        self._task = task = task or Task(is_reference=True)
        self.save_to = task.folder if task.stop is not None else None
        self.load_from = task.folder if task.first else None
        self.recording = Recording(first=task.first)
        self._gradients: Leaves = {}  # of the step that isn't recorded yet
        self._random = torch.get_rng_state()  # uint8, of the CPU's generator

    def start(self, params: PyTree[Tensor]) -> PyTree[Tensor]:
        """Tell the params before the first step, and take the ones to train.

        A module is returned itself; of a tree take what is returned. To measure how far one
        rounding carries, some runs of the reference start with params that are off by one.

        Args:
            params: a module, or a tree of tensors. DTensors are made whole, here and in the other
                methods, so that all ranks must call them alike. With `load_from`: the loaded ones.
        """
        if self._task.jitter is not None:
            params = _off_by_a_rounding(params, self._task.jitter, self._task.rounding)
        named = self._named(params)
        recording = self.recording
        recording.start = self._all_whole(named)
        # All where none says so
        recording.trained = {name for name, leaf in named.items() if leaf.requires_grad} or {*named}
        recording.uses = _uses(params, named)
        self._random = torch.get_rng_state()
        return params

    def batches(
        self, batches: Iterable[Any], *, part: int | None = None, parts: int | None = None
    ) -> Iterator[Any]:
        """The batches of this run: whole in the reference, and this rank's rows of each on ranks.

        Batches are cut into consecutive rows; numbers stay whole, so that `range(5)` gives the
        steps' numbers to those who load batches themselves. A run that is resumed gets the batches
        from its first step on.

        Args:
            batches: trees of tensors with rows along dim 0, one per step.
            part: which part of the rows is this rank's. None: its number.
            parts: into how many parts each batch is cut. None: the number of ranks. Ranks along a
                tensor-parallel axis take the same part. The reference ignores both.
        """
        task = self._task
        if task.is_reference:
            part, parts = 0, 1
        part = self.group.rank if part is None else part
        parts = self.group.size if parts is None else parts
        self.recording.part, self.recording.num_parts = part, parts
        for k, batch in enumerate(itertools.islice(batches, task.stop)):
            if task.share is not None and k == task.share.step:
                yield split(batch, task.share.num_parts)[task.share.part]
                return
            if k >= task.first:
                yield batch if parts == 1 else split(batch, parts)[part]

    def gradients(self, gradients: PyTree[Tensor]) -> None:
        """Tell the gradients of this step, reduced over ranks and before they are clipped.

        Args:
            gradients: a module, whose params have them in `grad`, or a tree of tensors, named as
                the params are. A module's gradient of None counts as zero; what a tree leaves out
                is held by other ranks.
        """
        self._check_started()
        named = self._named(gradients)
        if isinstance(gradients, nn.Module):
            start = self.recording.start
            named = {
                name: torch.zeros_like(start[name]) if leaf.grad is None else leaf.grad
                for name, leaf in named.items()
                if leaf.requires_grad
            }
        self._gradients = self._all_whole(named)

    def step(
        self,
        params: PyTree[Tensor],
        optimizer: Any = None,
        *,
        loss: Any = None,
        norm: Any = None,
        buffers: PyTree[Tensor] | None = None,
    ) -> None:
        """Tell the results of this step, after the optimizer's. Whatever the reference tells, the
        candidate must tell, too.

        Args:
            params: a module, or a tree of tensors.
            optimizer: one of torch, or the state as a tree. A rank may leave out what other ranks
                hold.
            loss: a number. Of ranks' losses the mean is taken.
            norm: the gradients' norm as it is logged: the same on all ranks.
            buffers: a tree. A module's own are taken by themselves.
        """
        self._check_started()
        named = self._named(params)
        settings: dict[str, dict[str, float]] = {}
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer, settings = _state_and_settings(optimizer, named)
        if buffers is None and isinstance(params, nn.Module):
            buffers = self._renamed(dict(params.named_buffers()))
        told = {
            "loss": named_leaves({"loss": loss}),  # None is no leaf
            "gradients": self._gradients,
            "norm": named_leaves({"norm": norm}),
            "optimizer state": named_leaves(optimizer),
            "buffers": named_leaves(buffers),
        }
        # In this order on all ranks, since DTensors are made whole
        others = {kind: self._all_whole(values) for kind, values in told.items()}
        random, self._random = self._random, torch.get_rng_state()
        draws = not torch.equal(random, self._random)
        self.recording.steps.append(RecordedStep(self._all_whole(named), others, settings, draws))
        self._gradients = {}

    def _check_started(self) -> None:
        if not self.recording.start:
            raise ValueError(
                explain("a step was told before the start", remedy="call record.start(model)")
            )

    def _named(self, tree: PyTree[Any]) -> dict[str, Any]:
        """A module's params, or a tree's leaves, by their names in the reference."""
        is_module = isinstance(tree, nn.Module)
        return self._renamed(dict(tree.named_parameters()) if is_module else named_leaves(tree))

    def _renamed(self, named: dict[str, Any]) -> dict[str, Any]:
        names = self._task.names
        plain = _as_in_reference(map(without_wrappers, named))
        if callable(names):
            plain = [names(name) for name in plain]
        elif names is not None:
            plain = [names.get(name, name) for name in plain]
        return dict(zip(plain, named.values(), strict=True))

    def _all_whole(self, named: dict[str, Any]) -> Leaves:
        # In this order among optree's leaves, too
        return OrderedDict((name, self._whole(value)) for name, value in named.items())

    def _whole(self, value: Any) -> Tensor:
        """A copy of a value on the CPU; all of a DTensor, whose ranks must all come here."""
        if hasattr(value, "full_tensor"):
            mesh = value.device_mesh
            for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
                self.recording.axes[f"ranks along {axis}"] = size
            value = value.full_tensor()
        if not isinstance(value, Tensor):  # a number, or an array
            value = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        found: Tensor = value.detach()
        if found.layout != torch.strided:  # gradients of a sparse embedding
            found = found.to_dense()
        return found.cpu().clone()


def _as_in_reference(names: Iterable[str]) -> list[str]:
    """The names without the "module" that DDP and DeepSpeed put before all of them."""
    plain = list(names)
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def _uses(params: PyTree[Tensor], named: dict[str, Tensor]) -> dict[str, int]:
    """How many names each param of a module has: tied ones have several."""
    if not isinstance(params, nn.Module):
        return {}
    names = Counter(id(p) for _, p in params.named_parameters(remove_duplicate=False))
    return {name: names[id(p)] for name, p in named.items()}


def _state_and_settings(
    optimizer: torch.optim.Optimizer, named: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The numbers and tensors that an optimizer keeps for each param; and by param the numbers of
    its group, and its count of steps.

    Of its state dict, since `state` may have what one rank holds alone.
    """
    saved, names = optimizer.state_dict(), {id(param): name for name, param in named.items()}
    state: dict[str, Any] = {}
    settings: dict[str, dict[str, float]] = {}
    for group, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        given = {key: x for key, x in group.items() if key not in ("params", "initial_lr")}
        for param, key in zip(group["params"], packed["params"], strict=True):
            if id(param) not in names:
                continue
            name = names[id(param)]
            found = _numbers(saved["state"].get(key, {}))
            state |= {f"{name}.{what}": x for what, x in found.items()}
            told = _numbers(given) | {what: x for what, x in found.items() if what == "step"}
            # Flags choose kernels, and are left out
            settings[name] = {n: float(x) for n, x in told.items() if not isinstance(x, bool)}
    return state, settings


def _numbers(tree: PyTree[Any]) -> dict[str, Any]:
    leaves = named_leaves(dict(tree)).items()
    return {name: x for name, x in leaves if isinstance(x, Tensor | Number)}


def _off_by_a_rounding(
    params: PyTree[Tensor], seed: int, dtype: torch.dtype | None
) -> PyTree[Tensor]:
    """The params with each element off by a rounding to a dtype: a module's in place."""
    generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def off(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_rounded(leaf):
            return leaf
        signs = (
            2 * torch.randint(2, leaf.shape, generator=generator, device="cpu").to(leaf.device) - 1
        )
        # A bit more than the most that rounding may do, so that one of this dtype does move
        unit = 0.51 * torch.finfo(dtype or leaf.dtype).eps
        moved = wide(leaf.detach()) * (1 + unit * signs)
        return moved.to(leaf.dtype).requires_grad_(leaf.requires_grad)

    if not isinstance(params, nn.Module):
        return tree_map(off, params)
    for param in params.parameters():
        param.data.copy_(off(param).detach())
    return params
