"""`deferred_init`: values for a model on the meta device, made when and where they are wanted.

Note [the same draws]: a module is initialised with the leaves that are wanted in their places and
all others on the meta device, where writing does nothing. What would be drawn for those is drawn
all the same, into nothing, so that the values of a leaf don't depend on which others are made with
it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn

from .._torch_private import TorchDispatchMode, buffers_dict, params_dict, version_of
from ..errors import StructureError, explain
from ..tree import PyTree, ancestors, paths
from .copying import without_values

Init = Callable[[str, nn.Module], Any]


class DeferredInit:
    """Values of a model's leaves and buffers, fixed by seed and path. Made by `deferred_init`."""

    def __init__(self, model: nn.Module, seed: int, init: Init | None, device: torch.device):
        self._model = without_values(model)
        self._modules = dict(self._model.named_modules())
        self.seed, self._init, self._device = seed, init, device
        self._places: dict[
            str, list[_Place]
        ] = {}  # of each leaf and buffer, the one of its name first
        names = {
            id(x): name
            for name, x in (*self._model.named_parameters(), *self._model.named_buffers())
        }
        for path, module in self._modules.items():
            for held in (params_dict(module), buffers_dict(module)):
                for attribute, x in held.items():
                    if x is not None:
                        self._places.setdefault(names[id(x)], []).append(
                            _Place(path, held, attribute, x)
                        )

    def fill(self, tree: PyTree[Tensor]) -> PyTree[Tensor]:
        """The tree with values for what is on the meta device, whole; leaves that have values stay
        as they are.

        Raises:
            StructureError: a leaf that the model doesn't have, or that nobody initialised, by its
                path.
        """
        leaves, treedef = optree.tree_flatten(tree)
        return treedef.unflatten(self.fill_leaves(paths(tree), leaves))

    def fill_leaves(self, names: Sequence[str], leaves: Sequence[Tensor]) -> list[Tensor]:
        """The same for leaves of these paths."""
        wanted = [name for name, leaf in zip(names, leaves, strict=True) if leaf.is_meta]
        made = self._make(wanted)
        return [
            made[name].to(leaf.dtype).requires_grad_(leaf.requires_grad) if leaf.is_meta else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]

    @torch.no_grad()
    def _make(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole leaves by path, from the initialisation of the modules that hold them and of those
        around them."""
        unknown = next((name for name in names if name not in self._places), None)
        if unknown is not None:
            raise StructureError(
                explain(
                    "a leaf is on the meta device, and the model that values are deferred of does "
                    "not have it",
                    path=unknown,
                    remedy="pass the params of functionalize(model), of the same model",
                )
            )
        blank = {name: _blank(self._places[name][0].meta, self._device) for name in names}
        for name, x in blank.items():
            for place in self._places[name]:
                place.put(x)
        try:
            holders = {path for name in names for path in ancestors(self._places[name][0].module)}
            for path in sorted(holders, key=lambda path: (-_depth(path), path)):
                self._initialise(path)
            return {name: self._result(name, x) for name, x in blank.items()}
        finally:
            for name in names:
                for place in self._places[name]:
                    place.put(place.meta)

    def _initialise(self, path: str) -> None:
        """Run what initialises one module."""
        module = self._modules[path]
        around = (self._modules[p] for p in ancestors(path))
        model = next(
            (m for m in around if _num_arguments(getattr(m, "_init_weights", None)) == 1), None
        )
        own = ("reset_parameters", "_reset_parameters", "_init_weights")
        reset = next(
            (m for m in (getattr(module, n, None) for n in own) if _num_arguments(m) == 0), None
        )
        with (
            self._tied_elsewhere(path),
            _seeded(self.seed, path, self._device),
            _SameDraws(self._device),
        ):
            if reset is not None:
                reset()
            if model is not None:
                model._init_weights(module)
            if self._init is not None:
                self._init(path, module)

    @contextmanager
    def _tied_elsewhere(self, path: str) -> Iterator[None]:
        """While a module is initialised, its places of leaves that have their name elsewhere are on
        the meta device."""
        places = [
            place for found in self._places.values() for place in found[1:] if place.module == path
        ]
        before = [place.get() for place in places]
        for place in places:
            place.put(place.meta)
        yield
        for place, x in zip(places, before, strict=True):
            place.put(x)

    def _result(self, name: str, blank: Tensor) -> Tensor:
        """What has become of a leaf."""
        place = self._places[name][0]
        x = place.get().detach()
        expected, got = (tuple(place.meta.shape), place.meta.dtype), (tuple(x.shape), x.dtype)
        if expected != got:
            raise StructureError(
                explain("initialising a leaf changed it", path=name, expected=expected, got=got)
            )
        if x.is_floating_point() or x.is_complex():
            missing = bool(torch.isnan(x).any())
        else:
            missing = place.get() is blank and version_of(blank) == 0
        if missing:
            holder = type(self._modules[place.module]).__name__
            raise StructureError(
                explain(
                    "nobody initialised a leaf, or not all of it: neither "
                    f"{holder}.reset_parameters nor an _init_weights of a module around it",
                    path=name,
                    remedy="pass deferred_init(model, init=...), a function (path, module) that "
                    "does; or make this leaf, with its value, off the meta device",
                )
            )
        return x if x.device == self._device else x.to(self._device)


class _Place:
    """Where a leaf or a buffer is in the model."""

    def __init__(self, module: str, held: dict[str, Any], attribute: str, meta: Tensor):
        self.module, self._held, self._attribute, self.meta = module, held, attribute, meta

    def get(self) -> Tensor:
        x: Tensor = self._held[self._attribute]
        return x

    def put(self, x: Tensor) -> None:
        self._held[self._attribute] = x


def deferred_init(
    model: nn.Module, seed: int = 0, *, init: Init | None = None, device: torch.device | str = "cpu"
) -> DeferredInit:
    """Values for a model on the meta device, for `step.init(params, buffers, values=...)`.

    They come from the modules' own `reset_parameters`, from Hugging Face's `_init_weights`, and
    from `init`, in this order, module by module, inner ones first. A leaf's values depend on `seed`
    and path only: they are the same at every level and world size. Nothing is made before it is
    asked for; `init` makes one bucket at a time, of which a
    rank keeps its piece. No collective but a comparison of digests. The model is not changed.

    Args:
        model: as given to `functionalize`, on the meta device in whole or in part.
        seed: of the values. The global random state is left as it is.
        init: `(path, module)`, called last for each module, to initialise its leaves in place.
        device: where leaves are made and stay.

    After torch's `param_init_fn` and torchdistx's deferred_init.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(2, 3)
    >>> values = deferred_init(model).fill(dict(model.named_parameters()))
    >>> values["weight"].shape, values["weight"].device.type
    (torch.Size([3, 2]), 'cpu')
    """
    return DeferredInit(model, seed, init, torch.device(device))


class _SameDraws(TorchDispatchMode):
    """Draws random numbers for the meta device too, into nothing. See Note [the same draws]."""

    def __init__(self, device: torch.device):
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if any(x.is_meta for x in given):
                real_args, real_kwargs = optree.tree_map(self._off_meta, (args, kwargs))
                func(*real_args, **real_kwargs)
        return func(*args, **kwargs)

    def _off_meta(self, x: Any) -> Any:
        return (
            torch.empty_like(x, device=self._device) if isinstance(x, Tensor) and x.is_meta else x
        )


def _blank(meta: Tensor, device: torch.device) -> Tensor:
    """A tensor to be initialised: NaN all over, where there is one."""
    x = torch.empty_like(meta, device=device)
    if x.is_floating_point() or x.is_complex():
        x.fill_(torch.nan)
    return (
        nn.Parameter(x, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else x
    )


@contextmanager
def _seeded(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """Random numbers as a function of (seed, path); the global state is as before afterwards."""
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(int.from_bytes(digest[:8]) >> 1)
        yield


def _num_arguments(method: Any) -> int | None:
    """How many arguments a method must be given."""
    if not callable(method):
        return None
    parameters = inspect.signature(method).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _depth(path: str) -> int:
    return path.count(".") + bool(path)
