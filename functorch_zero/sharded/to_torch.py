"""`optim.to_torch`: a transform as a torch.optim.Optimizer, for params that torch holds, whole or
as DTensors.

The params and their gradients stay torch's. A layout says what each rank holds of each leaf, and
`Sharded` answers the transform's questions, as for a sharded step. `torch_state` has the ways of
the state into torch's state dicts, and back.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor, nn

from .._torch_private import load_hooks, run_untraced, unhidden
from ..errors import MismatchError, StructureError, explain
from ..groups import labelled
from ..groups.dtensors import locals_of, placed, reshard, unwrapped
from ..groups.protocol import Group
from ..layout.extent import Extent
from ..layout.home import HomedLeaves
from ..layout.placed import PlacedLeaf, placed_layout
from ..model.untouched import is_looked_at
from ..model.wrappers import is_of_first_fsdp, without_wrappers
from ..optim.apply_updates import check_no_complex_for_real
from ..optim.arguments import check_is_transform
from ..optim.base import Needs, Transform
from ..optim.claims.check import check_claims
from ..optim.claims.operators import OperatorWatch
from ..optim.naming import NamedFunction, described
from ..sharded_optim.across import Sharded
from ..sharded_optim.state_plan import StatePlan, plan_state
from ..step.backward import dense
from ..step.evaluate import check_fits
from ..tree import content_digests, same_structure
from .agreement import agree, releases_and_ranks
from .failures import sharing_failures
from .refit import without_values
from .torch_state import ByParam, TorchState, unfit
from .words import exchange_data

# In torch's state of each param: the steps that it took part in
_NUM_STEPS = "num_steps"
_HAS_OWN_RATE = "has_own_lr"  # in the param group, so that a load notices
_OWN_RATE = 1.0  # in the param group of a transform that has a learning rate of its own

# What torch's optimizers and schedulers keep in param groups, and a transform has inside
_UNREAD = {"betas", "momentum", "weight_decay", "eps", "maximize"}

_MOST_TOGETHER = 16  # whose plans are kept

# From a learning rate, which is a schedule, to a transform
OfRate = Callable[[Any], Transform]


def to_torch(
    transform: Transform | OfRate,
    model_or_params: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    lr: float | None = None,
) -> TorchOptimizer:
    """A transform as a torch.optim.Optimizer, the mirror of `from_torch`: for loops and engines
    that hold the params themselves.

    `step()` after `backward()` makes the update that the transform makes of the whole params in one
    process. The params may be plain, of `DistributedDataParallel`, of `fully_shard` along one axis
    or with replicas (HSDP), of torch's tensor parallelism, or of both. Each rank holds of the state
    what it holds of the params: whole where these are whole, in pieces where they are DTensors.
    Ranks communicate as in a sharded step: not at all in pointwise updates, an all-reduce per
    question about statistics, two all-to-alls for whole leaves, among the ranks over which params
    are cut.

    Args:
        transform: one with a learning rate of its own; or a function from the learning rate to a
            transform, such as `optim.adamw`, with `lr`.
        model_or_params: a module, whose params with `requires_grad` are trained; or params by name,
            `module.named_parameters()`. Masks and labels are given these names.
        lr: the first learning rate. The function is called once, with a schedule that reads
            `param_groups[0]["lr"]` at each step: so schedulers of torch change it, on each rank
            alike. Without it that entry is 1 and must stay so.

    Every rank calls it, `step`, `state_dict` and `load_state_dict`. At construction ranks compare
    transforms, leaves, and the values that several of them hold, in three exchanges; and the
    transform's claims are checked. `state_dict` is torch's, with DTensors placed as the params are.
    State at one owner (Shampoo's) is spread by rows there, by an all-to-all. Gradients that are
    None come and go as in torch, if the transform is pointwise: each param has counts of its own.
    Else a param that had none in a step may have none later.

    Raises:
        StructureError: a placement is none of those above, or params lie on different meshes.
        MismatchError: on every rank, if ranks were given different things.
        TransformError: a transform does what its `needs` says it does not.

    >>> from functorch_zero import optim
    >>> model = nn.Linear(3, 1)
    >>> def with_clipping(lr):
    ...     return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(lr))
    >>> optimizer = optim.to_torch(with_clipping, model, lr=1e-3)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> optimizer.step()
    """
    if isinstance(transform, type | torch.optim.Optimizer):
        check_is_transform("to_torch's transform", transform)
    has_own_rate = isinstance(transform, Transform)
    if has_own_rate != (lr is None) or not (has_own_rate or callable(transform)):
        raise _wrong_rate(transform, lr)
    module = group = None
    named: Any = model_or_params
    if isinstance(model_or_params, nn.Module):
        module, group = unwrapped(model_or_params)
        _check_wrappers(module)
        named = [(path, p) for path, p in module.named_parameters() if p.requires_grad]
    return TorchOptimizer(transform, _pairs(named), lr, module, group)


def _check_wrappers(model: nn.Module) -> None:
    """Raise if a module's params don't say what they are pieces of."""
    for path, module in model.named_modules():
        if is_of_first_fsdp(module):
            raise StructureError(
                "FSDP's first version cuts params into plain tensors, which don't say of what "
                "they are pieces",
                path=path,
                expected="a plain module, or one of DistributedDataParallel, fully_shard or "
                "tensor parallelism",
                got=type(module).__name__,
                remedy="shard the model by torch.distributed.fsdp.fully_shard",
            )


def _pairs(params: Any) -> list[tuple[str, Tensor]]:
    """Names and params, of a mapping or of pairs; none twice."""
    given = params.items() if isinstance(params, Mapping) else params
    pairs = [*given] if isinstance(given, Iterable) else [given]
    if not all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in pairs):
        raise TypeError(
            explain(
                "params came without names, by which masks and state dicts know them",
                expected="a module, or pairs of a name and a param",
                got=type(params).__name__,
                remedy="pass the model, or model.named_parameters()",
            )
        )
    seen: dict[Any, str] = {}  # both by name and by the param's id
    for path, param in pairs:
        for of, key in (("name", path), ("param", id(param))):
            if key in seen:
                raise StructureError(
                    f"a {of} was given twice",
                    path=path,
                    got=f"the same {of} as {seen[key]}",
                    remedy="give each param once; model.named_parameters() leaves out ties",
                )
            seen[key] = path
    # As before torch.compile, for masks, noise and state dicts
    return [(without_wrappers(path), param) for path, param in pairs]


class _Together(NamedTuple):
    """Params that are updated together."""

    across: Sharded
    plan: StatePlan  # of their state


class TorchOptimizer(torch.optim.Optimizer):
    """Made by `to_torch`.

    Attributes:
        transform: that makes the updates.
    """

    def __init__(
        self,
        transform: Transform | OfRate,
        named: Sequence[tuple[str, Any]],
        lr: float | None,
        module: nn.Module | None = None,
        ranks_of_module: Group | None = None,
    ):
        self._module, self._ranks_of_module = module, ranks_of_module
        self._is_ready = self._is_evaluating = False
        self._saved: ByParam | None = None  # what `state` shows while a state dict is made
        self._has_own_rate = lr is None
        options = {"lr": _OWN_RATE if lr is None else lr, _HAS_OWN_RATE: self._has_own_rate}
        super().__init__([*named], options)
        if isinstance(transform, Transform):
            self.transform = transform
        else:
            rate = NamedFunction(lambda count: self._options["lr"], name="lr of param_groups")
            self.transform = transform(rate)
            if not isinstance(self.transform, Transform):
                raise _wrong_rate(self.transform, lr)
        self._prepare()
        self._is_ready = True

    @property
    def _options(self) -> dict[str, Any]:
        """torch's one group: the params, their names, and the learning rate."""
        return self.param_groups[0]

    # At construction: plans, which follow from the places of params

    @torch.no_grad()
    def _prepare(self) -> None:
        """Plan, compare ranks, and make a first state. Every rank calls it."""
        named = dict(zip(self._options["param_names"], self._options["params"], strict=True))
        self._given = tuple(self._options["params"])
        self._params = {path: named[path] for path in sorted(named)}  # in optree's order
        self._placed = where = placed(self._params)
        everyone = where.everyone if where.mesh is not None else self._ranks_of_module
        groups = dict.fromkeys([everyone or where.group, where.group])
        self._groups = [group for group in groups if group.size > 1]
        with sharing_failures(*self._groups, call="optim.to_torch"):
            leaves = {
                path: PlacedLeaf((*p.shape,), p.dtype, where.cuts[path])
                for path, p in self._params.items()
            }
            self._layout = layout = placed_layout(leaves, where.sizes)
            self._check_locals()
            self._agree()
            check_claims(self.transform, without_values(layout, read_only=True))
            self._together: dict[tuple[str, ...], _Together] = {}
            one = self._together_of([*self._params])
            pieces = self._pieces(self._locals(self._params))
            tree = optree.tree_map(torch.clone, self.transform.init(pieces, one.across))
            self._state = TorchState(
                *(tree, one.plan, self._shared(), layout, self._params, where),
                apart=self._is_apart,
            )
        self._num_steps = dict.fromkeys(self._params, 0)
        self._calls = itertools.count()  # of `step`, on each rank alike

    @property
    def _is_apart(self) -> bool:
        """Whether each param is updated as by an optimizer of its own."""
        return self.transform.needs == Needs.POINTWISE

    def _plan(self, paths: Collection[str]) -> StatePlan:
        """The plan of the state of these params."""
        init, num_ranks = self.transform.init_fn, self._placed.group.size
        return plan_state(init, self._layout, self._mask(paths), num_ranks)

    def _mask(self, paths: Collection[str]) -> dict[str, bool]:
        chosen = set(paths)
        return {path: path in chosen for path in self._params}

    def _shared(self) -> set[str]:
        """The paths of the leaves of the state that belong to no param: which any two have."""
        first, *_, last = [*self._params] * 2
        if first == last:
            return set()
        return {*self._plan([first]).paths} & {*self._plan([last]).paths}

    def _check_locals(self) -> None:
        """Raise unless each leaf's local part is what its placements say."""
        rank, locals_ = self._placed.group.rank, self._locals(self._params)
        for leaf, bucket in zip(self._layout.leaves, self._layout.buckets, strict=True):
            local, extent = locals_[leaf.path], bucket.extent(0, rank)
            if local.is_meta or local.numel() != extent.num_here:
                raise StructureError(
                    "a param's part on this rank is not what its placements say",
                    path=leaf.path,
                    expected=f"{extent.num_here} elements with values",
                    got=f"shape {(*local.shape,)} on {local.device}",
                    rank=rank,
                    remedy="make it with distribute_tensor or fully_shard, and fill it first",
                )

    def _agree(self) -> None:
        """Raise on every rank unless all have the same transform and leaves, and those that hold
        the same part of a leaf have the same values."""
        if not self._groups:
            return
        everyone = labelled(self._groups[0], "to_torch/agreement")
        facts = releases_and_ranks(everyone)
        facts |= {"lr": repr(self._options["lr"]), "optimizer": described(self.transform)}
        facts |= {"layout": self._layout.describe(), "cuts": repr(self._placed.cuts)}
        agree(everyone, facts)
        digests = content_digests(self._locals(self._params))
        remedy = (
            "build the model from one seed on all ranks, or load the same weights, before "
            "optim.to_torch"
        )
        self._compare("to_torch/values", [*digests.values()], operator.eq, "param", remedy)

    def _compare(
        self, label: str, values: list[Any], alike: Callable[[Any, Any], bool], of: str, remedy: str
    ) -> None:
        """Raise on every rank unless those that hold the same part of a leaf have the same values,
        and all or none have one. One exchange."""
        everyone = labelled(self._groups[0], label)
        told = exchange_data(everyone, [self._placed.group.rank, values])
        numbers, everyones = zip(*told, strict=True)
        for bucket, *own in zip(self._layout.buckets, *everyones, strict=True):
            first: dict[Extent, int] = {}  # part -> the first rank that has it
            for rank, number in enumerate(numbers):
                known = first.setdefault(bucket.extent(0, number), rank)
                if (own[rank] is None) != (own[0] is None):
                    known = 0
                elif own[rank] is None or alike(own[rank], own[known]):
                    continue
                raise MismatchError(
                    f"ranks have other values of the same part of a {of}",
                    path=bucket.name,
                    expected=f"on rank {rank} the same as on rank {known}",
                    got=f"{own[rank]} and {own[known]}",
                    rank=everyone.rank,
                    remedy=remedy,
                )

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the params by their gradients. Returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_params()
        with sharing_failures(*self._groups, call="optimizer step"):
            self._check_not_evaluating("step")
            self._check_options()
            grads = self._gradients()
            look = is_looked_at(next(self._calls))
            if look or len(grads) < len(self._params):
                self._check_model()
            if look and self._groups:
                facts = {"lr in param_groups": float(self._options["lr"])}
                counts = {_NUM_STEPS: self._num_steps}
                agree(labelled(self._groups[0], "optimizer/rate"), facts | counts)
                self._compare_gradients(grads)
            for paths in self._state.together(grads):
                self._update(paths, grads)
        return loss

    def _gradients(self) -> dict[str, Tensor]:
        """This rank's pieces (n,) of the gradients that there are."""
        num_steps = max(self._num_steps.values())
        grads = {}
        for path, param in self._params.items():
            grad = param.grad
            if grad is None:
                continue
            wanted = getattr(param, "placements", "a plain tensor")
            got = getattr(grad, "placements", "a plain tensor")
            if got != wanted:
                raise _wrong_gradient(path, wanted, got)
            if self._num_steps[path] != num_steps and not self._is_apart:
                raise _late_gradient(path, num_steps - self._num_steps[path])
            grads[path] = grad
        locals_ = zip(grads, locals_of(grads.values()), strict=True)
        return {path: dense(grad).flatten() for path, grad in locals_}

    def _compare_gradients(self, grads: Mapping[str, Tensor]) -> None:
        """Raise on every rank unless ranks that hold the same part of a param have the same
        gradient of it, up to rounding. Waits for the device."""
        told = []
        for grad in map(grads.get, self._params):
            # Of partial sums, one per rank, both differ
            told.append(None if grad is None else [float(grad.sum()), float(grad.norm())])
        remedy = (
            "sum the gradients of params that torch doesn't reduce, such as ignored ones of "
            "fully_shard, or norms under sequence parallelism; and give a param a gradient on all "
            "ranks or on none"
        )
        self._compare("optimizer/gradients", told, _is_close, "gradient", remedy)

    def _update(self, paths: Sequence[str], grads: Mapping[str, Tensor]) -> None:
        """Update these params, and their state."""
        one = self._together_of(paths)
        params = self._locals(paths)
        own = dict.fromkeys(self._params) | {path: grads[path] for path in paths}
        state = self._state.local(one.plan, paths)
        # Not the gradients, which somebody may read after a step
        one.across.current.begin(donate="leaves")
        try:
            updates, leaves = self._run(one, own, state, params)
        finally:
            # Else the flats that it has made would be alive as long as the optimizer
            one.across.current.begin()
        self._state.take(one.plan, paths, leaves)
        for path in paths:
            self._num_steps[path] += 1
        if updates is not None:
            leaves, moves = [*params.values()], [updates[path] for path in params]
            check_no_complex_for_real(moves, leaves, [*params].__getitem__)
            rows = zip(leaves, moves, strict=True)
            torch._foreach_add_(leaves, [move.to(p.dtype).view(p.shape) for p, move in rows])

    def _run(
        self, one: _Together, grads: Any, state: HomedLeaves, locals_: Mapping[str, Tensor]
    ) -> tuple[Any, Sequence[Any]]:
        """The updates to add, None where a kernel has added them, and the leaves of the next state.

        Args:
            locals_: the params' tensors on this rank.
        """
        pieces = self._pieces(locals_)
        # Only to the params themselves, and not to copies, may kernels add their updates
        are_views = all(map(Tensor.is_contiguous, locals_.values()))
        update = self.transform.update_and_add if are_views else self.transform.update
        updates, tree = update(grads, state.tree, pieces, one.across)
        if updates is not None:
            same_structure(pieces, updates, what="the optimizer's updates")
        return updates, state.treedef.flatten_up_to(tree)

    def _locals(self, paths: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these params on this rank."""
        return dict(zip(paths, locals_of(map(self._params.__getitem__, paths)), strict=True))

    def _pieces(self, locals_: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Pieces (n,) of tensors on this rank; None of other params."""
        return {p: locals_[p].detach().reshape(-1) if p in locals_ else None for p in self._params}

    def _together_of(self, paths: Sequence[str]) -> _Together:
        key = (*paths,)
        if key not in self._together:
            resting = self._params.keys() - key
            if resting and self._state.has_owners:
                raise StructureError(
                    "a param has no gradient, and the optimizer has state at owners, which "
                    "are chosen for all params together",
                    path=min(resting),
                    expected="a gradient",
                    got=None,
                    remedy="param.requires_grad_(False) before optim.to_torch, or a gradient "
                    "of zeros",
                )
            # Experts may rest in ever new combinations
            if len(self._together) == _MOST_TOGETHER:
                self._together.clear()
            group, mask = labelled(self._placed.group, "optimizer/update"), self._mask(paths)
            across = Sharded(self._layout, group, mask=mask)
            self._together[key] = _Together(across, self._plan(paths))
        return self._together[key]

    def _check_model(self) -> None:
        """Raise if the model has a gradient for a param that this optimizer doesn't have."""
        if self._module is None:
            return
        known = set(map(id, self._options["params"]))
        for path, param in self._module.named_parameters():
            if param.grad is not None and id(param) not in known:
                raise StructureError(
                    "a param of the model has a gradient, and is none of the optimizer's: it "
                    "was added, unfrozen, or replaced, as fully_shard replaces params",
                    path=path,
                    expected="the params of the model that optim.to_torch was given",
                    got="another one",
                    remedy="call optim.to_torch after the last change of the model",
                )

    def _check_options(self) -> None:
        """Raise if somebody has changed what the transform doesn't read."""
        for name in _UNREAD & self._options.keys():
            raise ValueError(
                explain(
                    f"{name} stands in param_groups, where nothing reads it",
                    expected="lr alone",
                    got=self._options[name],
                    remedy="give it to the transform; a schedule of optim changes it by step",
                )
            )
        if self._has_own_rate and self._options["lr"] != _OWN_RATE:
            raise ValueError(
                explain(
                    "the learning rate in param_groups was changed, and the transform has one of "
                    "its own",
                    expected=_OWN_RATE,
                    got=self._options["lr"],
                    remedy="optim.to_torch(function, model, lr=...), with a function from the "
                    "learning rate to the transform; or a schedule of optim in the transform, and "
                    "none of torch's",
                )
            )

    def _follow_params(self) -> None:
        """Begin anew with the params that somebody has put into the param group: accelerate puts
        sharded ones in the place of whole ones."""
        now = self._options["params"]
        if len(now) == len(self._given) and all(map(operator.is_, now, self._given)):
            return
        if any(self._num_steps.values()):
            raise StructureError(
                "the params in param_groups were replaced after the first step, and the state "
                "is of the others",
                expected="the same params in all steps",
                got="others",
                remedy="make a new optimizer by optim.to_torch, and load the state dict of "
                "this one",
            )
        self._prepare()

    # Other params to evaluate on

    @contextmanager
    def evaluating(self, params: Callable[[Any, Any], Any]) -> Iterator[None]:
        """Inside, the model has the params that the state holds to evaluate on; then its own again.

            with optimizer.evaluating(optim.ema_params):
                loss_fn(model(x), y)

        They are written where the params lie: of `fully_shard` each rank's rows. So
        `model.state_dict()` is theirs as well, and the optimizer's stays as it is. What else is
        written to the params inside is lost. Every rank calls it. Nothing is sent, but for the
        gathers of `fully_shard`'s next forward. Takes the memory of one more copy of the params.

        Args:
            params: as in `eval_step(params=...)`, such as `optim.ema_params` or
                `optim.schedule_free_eval_params`: `(state, params) -> params`. Its leaves are this
                rank's pieces, 1-D.

        Raises:
            TransformError: the function is not elementwise.
            StructureError: it gives other leaves; or the model, whose whole params `fully_shard`
                may keep, is not known, since `to_torch` was given names and params.
        """
        self._follow_params()
        with sharing_failures(*self._groups, call="optimizer evaluating"), torch.no_grad():
            self._check_not_evaluating("evaluating")
            self._reshard()
            locals_ = self._locals(self._params)
            chosen = self._chosen(params, locals_)
            own = [x.clone() for x in locals_.values()]
            torch._foreach_copy_([*locals_.values()], chosen)
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False
            with torch.no_grad():
                self._reshard()
                torch._foreach_copy_([*self._locals(self._params).values()], own)

    def _chosen(
        self, read: Callable[[Any, Any], Any], locals_: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """The params to evaluate on, as they lie on this rank."""
        found: dict[str, Tensor] = {}
        for paths in self._state.together(self._params):
            one = self._together_of(paths)
            state = self._state.local(one.plan, paths).tree
            pieces = self._pieces({path: locals_[path] for path in paths})
            values = [x for x in optree.tree_leaves(state) if x.dim()], pieces
            # A function of a piece that is not elementwise has another value on each rank
            with OperatorWatch("optimizer.evaluating(params)").running("pieces", params=values):
                chosen = read(state, pieces)
            what = "optimizer.evaluating(params)"
            same_structure(pieces, chosen, what=f"the tree of {what}")
            check_fits(pieces, chosen, by=what)
            found |= {path: chosen[path] for path in paths}
        return [found[path].view(x.shape) for path, x in locals_.items()]

    def _reshard(self) -> None:
        """Let `fully_shard` forget the whole params that it keeps, which are gathered before the
        pieces were written to."""
        if self._placed.mesh is None:
            return
        module = self._module or nn.Module()
        reshard(module)
        known = set(map(id, module.parameters()))
        for path, param in self._params.items():
            if id(param) not in known:
                raise StructureError(
                    "optimizer.evaluating changes params of fully_shard, and doesn't know the "
                    "module that may keep whole copies of them",
                    path=path,
                    expected="a param of the module that optim.to_torch was given",
                    got="another one",
                    remedy="optim.to_torch(transform, model), behind fully_shard",
                )

    def _check_not_evaluating(self, call: str) -> None:
        if self._is_evaluating:
            raise RuntimeError(
                f"optimizer.{call} was called inside optimizer.evaluating, where the params are "
                "not those that the optimizer moves. Remedy: call it outside of the `with`"
            )

    # State dicts, as torch has them

    @property
    def state(self) -> Any:
        """torch's view of the state: per param, tensors by name. It is made anew each time."""
        if not self._is_ready:
            return {}
        self._follow_params()
        return self._by_torch(self._saved or self._state.shown())

    @state.setter
    def state(self, value: Any) -> None:
        """torch sets an empty one at construction. The state is not kept there."""
        if self._is_ready:
            raise AttributeError(
                "the state of an optimizer of optim.to_torch is not kept in `state`, which is made "
                "anew each time. Remedy: load_state_dict; or a new optimizer, whose state is new"
            )

    def _by_torch(self, shown: ByParam) -> dict[Tensor, dict[str, Any]]:
        found = {}
        for path, tensors in shown.items():
            count = torch.tensor(self._num_steps[path], device="cpu")
            found[self._params[path]] = tensors | {_NUM_STEPS: count}
        return found

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As torch's: of each param tensors by name, which lie as the param does.

        They are the optimizer's own, but for those at owners, of which an all-to-all per dtype
        makes rows.
        """
        if self._state.has_owners:
            with sharing_failures(*self._groups, call="optimizer state_dict"):
                self._saved = self._state.saved()
        try:
            # It reads `state`, between hooks
            made: dict[str, Any] = unhidden(torch.optim.Optimizer.state_dict)(self)
            return made
        finally:
            self._saved = None

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a state dict, and the learning rate. Whole tensors may stand for
        DTensors. Of what is at owners, an all-to-all per dtype brings the rows.

        Raises:
            StructureError: it is of another optimizer, or of other params; nothing has changed.
        """
        self._follow_params()
        before, after = load_hooks(self)
        with sharing_failures(*self._groups, call="optimizer load_state_dict"):
            state_dict = dict(state_dict)
            for hook in before:
                state_dict = hook(self, state_dict) or state_dict
            options = state_dict["param_groups"][0]
            given: ByParam = {}
            for key, path in zip(options["params"], self._names_in(options), strict=True):
                given[path] = dict(state_dict["state"].get(key, {}))
            counts = {path: tensors.pop(_NUM_STEPS, None) for path, tensors in given.items()}
            for path, count in counts.items():
                if count is None:
                    raise unfit(path, _NUM_STEPS, "a number", "none")
            if options.get(_HAS_OWN_RATE) != self._has_own_rate:
                raise unfit("param_groups", "lr", *map(_whose_rate, (self._options, options)))
            self._state.load(given)
        self._num_steps = {path: int(counts[path]) for path in self._params}
        own = ("params", "param_names")
        others = {key: x for key, x in options.items() if key not in own}
        # Schedulers write to a learning rate in a tensor, which may be another optimizer's
        self._options.update(copy.deepcopy(others))
        for hook in after:
            hook(self)

    def _names_in(self, options: Mapping[str, Any]) -> list[str]:
        """The paths of the params of a state dict's group."""
        # torch.distributed.checkpoint.state_dict has paths in the place of numbers
        names = [key for key in options["params"] if key in self._params]
        if not names:
            names = options.get("param_names", self._options["param_names"])
        if len(names) != len(options["params"]) or set(names) != self._params.keys():
            differing = sorted(set(names) ^ self._params.keys())
            raise StructureError(
                "a state dict is of other params",
                path=differing[0] if differing else None,
                expected=f"{len(self._params)} params",
                got=f"{len(options['params'])} params",
                remedy="load the state of an optimizer of the same model",
            )
        return names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after the construction: masks and labels choose among the params of one group."""
        if self._is_ready:
            raise NotImplementedError(
                explain(
                    "optim.to_torch makes an optimizer of one param group",
                    expected="all params at construction",
                    got="another group",
                    remedy="optim.partition treats leaves by their paths, and a new optimizer has "
                    "the params of now",
                )
            )
        unhidden(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, without an import of torch._dynamo."""
        unhidden(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def __getstate__(self) -> Any:
        raise TypeError(
            "an optimizer of optim.to_torch is bound to its ranks, and can't be copied or pickled. "
            "Remedy: save its state_dict()"
        )


# torch.compile would trace its Python and communication. Not the decorator: others have its code
run_untraced(TorchOptimizer.step.__wrapped__)  # type: ignore[attr-defined]


def _is_close(told: list[float], other: list[float]) -> bool:
    """Whether (sum, norm) of two gradients may be those of one, summed in other orders."""
    (total, norm), (other_total, other_norm) = told, other
    if not (math.isfinite(norm) and math.isfinite(other_norm)):
        # A sum of these is any of them
        return math.isfinite(norm) == math.isfinite(other_norm)
    return max(abs(norm - other_norm), abs(total - other_total)) <= 1e-2 * max(norm, other_norm)


def _wrong_rate(transform: Any, lr: Any) -> TypeError:
    return TypeError(
        explain(
            "optim.to_torch takes a transform, or a function of the learning rate that returns one "
            "and lr",
            expected="to_torch(optim.adamw(1e-3), model) or to_torch(optim.adamw, model, lr=1e-3)",
            got=f"{getattr(transform, '__name__', transform)} with lr={lr}",
            remedy="lambda lr: optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(lr)) is "
            "such a function",
        )
    )


def _whose_rate(options: Mapping[str, Any]) -> str:
    """Words for an error: which learning rate a state dict, or an optimizer, has."""
    return "the transform's own rate" if options.get(_HAS_OWN_RATE) else "a rate by `lr=`"


def _wrong_gradient(path: str, wanted: object, got: object) -> StructureError:
    return StructureError(
        "a gradient lies otherwise than its param",
        path=path,
        expected=wanted,
        got=got,
        remedy="leave gradients as backward made them, or redistribute this one",
    )


def _late_gradient(path: str, num_steps: int) -> StructureError:
    return StructureError(
        "a param has a gradient again after steps without one: torch would count its steps "
        "apart, and this transform, which is not pointwise, has one state for all params",
        path=path,
        expected="a gradient in every step, or in none",
        got=f"none in {num_steps} of them",
        remedy="a gradient of zeros in those steps, and optim.apply_if_nonzero, in which each "
        "leaf has a count of its own",
    )
