"""`deferred_init`: values for a model on the meta device, made when and where they are wanted."""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn

from .._torch_private import buffers_dict, params_dict, version_of
from ..errors import StructureError
from ..tree import PyTree, ancestors, paths
from .copying import without_values
from .generators import seeded
from .initialisation import Initialisation
from .slots import Place, put, put_by_path, slots_of, tensors_in

Init = Callable[[str, nn.Module], Any]


class DeferredInit:
    """Values of a model's leaves and buffers, fixed by seed and path. Made by `deferred_init`."""

    def __init__(self, model: nn.Module, seed: int, init: Init | None, device: torch.device):
        self.seed = seed
        self._init = init
        self._device = device
        self._model = without_values(model)  # each tensor on the meta device, unless being made
        self._modules = dict(self._model.named_modules())
        # Of each leaf and buffer: the tensor without values; the module that its name is in, which
        # initialises it; and its places, of which a tied one has several
        self._metas: dict[str, Tensor] = {}
        self._holders: dict[str, str] = {}
        self._places: dict[str, list[Place]] = {}
        # Of each module, the places in it and in those inside it; and whether it holds the leaf
        # there, which another one initialises
        self._inside: dict[str, list[tuple[Place, bool]]] = {path: [] for path in self._modules}
        self._add_places(self._model.named_parameters(), params_dict)
        self._add_places(self._model.named_buffers(), buffers_dict)

    def _add_places(
        self, named: Iterable[tuple[str, Tensor]], held_by: Callable[[nn.Module], dict[str, Any]]
    ) -> None:
        for module, attribute, name in slots_of(named, self._model, held_by):
            container, is_tied = held_by(self._modules[module]), name in self._places
            place = Place(container, attribute, name)
            self._metas[name] = container[attribute]
            self._holders.setdefault(name, module)
            self._places.setdefault(name, []).append(place)
            for around in ancestors(module):
                self._inside[around].append((place, is_tied and around == module))

    def fill(self, tree: PyTree[Tensor]) -> PyTree[Tensor]:
        """The tree with values for leaves on the meta device, whole; others stay as they are.

        Raises:
            StructureError: a leaf that the model doesn't have, or that nobody initialised, by its
                path.
        """
        leaves, treedef = optree.tree_flatten(tree)
        return treedef.unflatten(self.fill_leaves(paths(tree), leaves))

    def fill_leaves(self, names: Sequence[str], leaves: Sequence[Tensor]) -> list[Tensor]:
        """`fill` for the leaves of a tree, given with their paths."""
        # Leaves with values are kept: they were made off the meta device on purpose
        wanted = [name for name, leaf in zip(names, leaves, strict=True) if leaf.is_meta]
        made = self._make(wanted)
        filled = []
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.is_meta:
                _check_shape(name, leaf, made[name])
                value = made[name].to(leaf.dtype)  # another than the model's where a policy says so
                filled.append(value.requires_grad_(leaf.requires_grad))
            else:
                filled.append(leaf)
        return filled

    @torch.no_grad()
    def _make(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole leaves by path, from the initialisation of the modules that hold them and of those
        around them."""
        unknown = next((name for name in names if name not in self._places), None)
        if unknown is not None:
            raise StructureError(
                "a leaf is on the meta device, and the model that values are deferred of does "
                "not have it",
                path=unknown,
                remedy="pass the params of functionalize(model), of the same model",
            )
        blanks: dict[str, Tensor] = {}  # path -> the tensor being made
        holders: set[str] = set()  # the modules that may have something to say about these leaves
        for name in names:
            blanks[name] = _blank(self._metas[name], self._device)
            holders.update(ancestors(self._holders[name]))
        # A tied leaf goes into all its places
        places = [place for name in names for place in self._places[name]]
        # From here on the model holds blanks: they must go again, whatever happens
        try:
            put_by_path(places, blanks)
            # Inner modules first, so that those around them have the last word
            for path in sorted(holders, key=lambda path: (-_depth(path), path)):
                self._initialise(path)
            # Read from the place: an initialiser may have put another tensor there
            return {name: self._result(name, blank) for name, blank in blanks.items()}
        finally:
            # Meta tensors again, so that no value outlives this call in the model
            put_by_path(places, self._metas)

    def _initialise(self, path: str) -> None:
        """Initialise one module, by all who know how."""
        module = self._modules[path]
        reset = _own_reset(module)
        initialiser = self._initialiser_of(path)
        # Most modules around others have nothing to say, and are large
        if reset is None and initialiser is None and self._init is None:
            return
        initialisation = Initialisation(path, self._device)
        # Seeded per module, so that a leaf's values don't depend on which others are made
        with (
            self._others_unwanted(path, initialisation),
            _seeded(self.seed, path, self._device),
            initialisation,
        ):
            # From the general to the special: the last to write counts
            if reset is not None:
                reset()
            if initialiser is not None:
                initialiser._init_weights(module)
            if self._init is not None:
                self._init(path, module)

    def _initialiser_of(self, path: str) -> Any | None:
        """The innermost module around this one, or itself, that initialises others by
        `_init_weights(module)`, as Hugging Face's models do."""
        for around in ancestors(path):
            candidate = self._modules[around]
            # One argument: others' modules; without one it is the module's own reset
            if _num_arguments(getattr(candidate, "_init_weights", None)) == 1:
                return candidate
        return None

    @contextmanager
    def _others_unwanted(self, path: str, initialisation: Initialisation) -> Iterator[None]:
        """Inside, no leaf of the module or of those inside it is on the meta device.

        In the module's places that are not the first of their leaf lies an unwanted one. So a tied
        leaf is initialised once, in the place that it is named after.
        """
        others: list[Place] = []
        unwanted: dict[str, Tensor] = {}  # one per leaf, in all its places
        for place, is_tied in self._inside[path]:
            if is_tied or place.held[place.attribute].is_meta:
                others.append(place)
                if place.leaf not in unwanted:
                    meta = self._metas[place.leaf]
                    make = partial(_blank, meta, self._device)
                    unwanted[place.leaf] = initialisation.unwanted(meta, make)
        before = tensors_in(others)
        put_by_path(others, unwanted)
        # Without `finally`: on an error `_make` clears all places
        yield
        put(others, before)

    def _result(self, name: str, blank: Tensor) -> Tensor:
        """The leaf's values, whole, after all modules around it were initialised.

        Raises:
            StructureError: nobody gave it values, or somebody another shape or dtype.
        """
        meta, (in_place, *_) = self._metas[name], tensors_in(self._places[name])
        x: Tensor = in_place.detach()
        expected, got = (tuple(meta.shape), meta.dtype), (tuple(x.shape), x.dtype)
        if expected != got:
            raise StructureError(
                "initialising a leaf changed it", path=name, expected=expected, got=got
            )
        # NaN is what blanks were filled with
        if x.is_floating_point() or x.is_complex():
            missing = bool(torch.isnan(x).any())
        else:
            # There is no NaN among integers. Missing if the blank is still in place, never written
            # to; one that was written in part passes
            missing = in_place is blank and version_of(blank) == 0
        if missing:
            holder = type(self._modules[self._holders[name]]).__name__
            raise StructureError(
                "nobody initialised a leaf, or not all of it: neither "
                f"{holder}.reset_parameters nor an _init_weights of a module around it",
                path=name,
                remedy="pass deferred_init(model, init=...), a function (path, module) that "
                "does; or make this leaf, with its value, off the meta device",
            )
        # An initialiser may have made it elsewhere
        return x.to(self._device)  # itself, if it is there


def deferred_init(
    model: nn.Module, seed: int = 0, *, init: Init | None = None, device: torch.device | str = "cpu"
) -> DeferredInit:
    """Values for a model on the meta device, for `step.init(params, buffers, values=...)`.

    They come from the modules' own `reset_parameters`, from Hugging Face's `_init_weights`, and
    from `init`, in this order, module by module, inner ones first. A leaf's values depend on `seed`
    and path only: they are the same at every level and world size. Nothing is made before it is
    asked for; `init` makes one bucket at a time, of which a rank keeps its piece. No collective but
    a comparison of digests. The model is not changed.

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


def _blank(meta: Tensor, device: torch.device) -> Tensor:
    """A tensor to be initialised: all NaN, where its dtype has one, so that an element left out
    shows."""
    x = torch.empty_like(meta, device=device)
    if x.is_floating_point() or x.is_complex():
        x.fill_(torch.nan)
    # A parameter for a parameter: initialisers ask isinstance
    if isinstance(meta, nn.Parameter):
        return nn.Parameter(x, requires_grad=meta.requires_grad)
    return x


def _check_shape(path: str, leaf: Tensor, made: Tensor) -> None:
    """Raise unless a leaf was made in its shape; another model's may have the same path."""
    expected, got = tuple(leaf.shape), tuple(made.shape)
    if expected != got:
        raise StructureError(
            "values were deferred of a model in which this leaf has another shape",
            path=path,
            expected=expected,
            got=got,
            remedy="pass deferred_init(model) of the model that was given to functionalize",
        )


def _own_reset(module: nn.Module) -> Callable[[], Any] | None:
    """The module's method that initialises its own leaves; torch's modules have one of these."""
    for name in ("reset_parameters", "_reset_parameters", "_init_weights"):
        method = getattr(module, name, None)
        if _num_arguments(method) == 0:
            return method
    return None


@contextmanager
def _seeded(seed: int, path: str, device: torch.device) -> Iterator[None]:
    """Random numbers of torch, Python and numpy as a function of (seed, path); the global states
    are as before afterwards."""
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    number = int.from_bytes(digest[:8]) >> 1  # 63 bits: positive as a signed integer
    numpy = sys.modules.get("numpy")  # an initialiser that draws from it has imported it
    pythons, numpys = random.getstate(), numpy and numpy.random.get_state()
    try:
        random.seed(number)
        if numpy:
            numpy.random.seed(number >> 31)  # it takes 32 bits
        # Tensors that initialisers make themselves come on this device too
        with seeded(number, device), device:
            yield
    finally:
        random.setstate(pythons)
        if numpy:
            numpy.random.set_state(numpys)


def _num_arguments(method: Any) -> int | None:
    """The number of arguments that a method must be given; None: it is no method."""
    if not callable(method):
        return None
    required = 0
    for p in inspect.signature(method).parameters.values():
        # *args and keyword-only ones needn't be given by position
        positional = p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        if positional and p.default is p.empty:
            required += 1
    return required


def _depth(path: str) -> int:
    """The number of modules around the one of this path; 0 for the model itself."""
    return path.count(".") + bool(path)
