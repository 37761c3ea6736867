"""The step of a program, for one process: of any gradients and updates, and the oracle of its
sharded form."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from types import MappingProxyType
from typing import Any

import optree
import torch
from optree import tree_map
from torch import Tensor
from torch.nn import Parameter

from .._torch_private import transforms_active
from ..errors import StructureError, explain
from ..model.deferred_init import DeferredInit
from ..model.untouched import Untouched, is_looked_at
from ..optim.arguments import check_takes
from ..params import as_local, is_on_engine
from ..shared_elements import check_apart
from ..tree import (
    all_settled,
    are_tensors,
    check_keys,
    check_no_sharded_tree,
    check_savable,
    check_tensors,
    detached,
    is_within,
    named_leaves,
    own_copy,
    paths,
    requiring_grad,
    same_structure,
    settled,
)
from .background import Background
from .backward import noting_missing_graphs
from .loss import Metrics, as_metric, check_metrics
from .loss_calls import LossCalls
from .refit import carried, check_forms, check_no_parts, check_own_tensors, forms_of
from .rng import Streams
from .scope import StepScope, rank_of_step, running
from .state import State, Trained, check_policies, check_whole_state
from .trainable import Trainable, check_trained, mark_trainable

Program = Callable[..., tuple[Any, Mapping[str, Any]]]

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ProgramStep:
    """`step(state, *args) -> (state, metrics)` for one process. Made by `program_step`."""

    program: Program
    first_value: Callable[..., Any]
    trainable: Mapping[str, Trainable] = field(default_factory=dict, hash=False)
    buffers: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    num_gradients: int | None = None  # that each step takes; None: nobody has said
    # Entries of the value whose leaves may have another shape or dtype in the next one
    free: tuple[str, ...] = ()
    # The argument of `init`, the only one that is cut, and entry of the value whose leaves keep
    # their own paths: as the params of a training step do, in options, logs and `State.parts`
    nameless: str | None = None
    calls: LossCalls = field(default_factory=LossCalls, repr=False, compare=False)
    background: Background = field(default_factory=Background, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = [*inspect.signature(self.first_value).parameters]
        unknown = [name for name in self.trainable if name not in known]
        if unknown:
            raise ValueError(
                explain(
                    "trainable has a rule for a tree that the program's init doesn't take",
                    expected=f"names among {known}",
                    got=unknown,
                    remedy="name the parameters of init: trainable={'params': rule}",
                )
            )

    @property
    def is_training_step(self) -> bool:
        """Whether the library has written the program: one gradient, and an update that follows
        from it."""
        return self.nameless is not None

    def __repr__(self) -> str:
        return f"program_step({getattr(self.program, '__qualname__', self.program)})"

    def init(
        self,
        *args: Any,
        seed: int | None = 0,
        values: DeferredInit | Mapping[str, DeferredInit] | None = None,
        **named: Any,
    ) -> State:
        """The first state, whose value is what the program's `init` makes of copies of the
        arguments.

        Args:
            args, named: of `init`: trees of whole leaves, of which those with `requires_grad` are
                trained, and whatever else it takes.
            seed: of each step's random numbers. None: the global random state is used.
            values: from `deferred_init`: the values of leaves on the meta device, of all trees or
                by the names of `init`'s parameters.
        """
        given = named_args(self.first_value, args, named)
        values = named_values(given, values)
        for name, arg in given.items():
            check_no_sharded_tree(arg, name)
            check_apart(arg)
            given[name] = values[name].fill(arg) if name in values else arg
        return self._first_state(self.marked(given), seed)

    def _first_state(self, given: Mapping[str, Any], seed: int | None) -> State:
        """The first state, of arguments of `init` that know which of their leaves are trained."""
        # Copies, so that nobody who holds the tensors given can change the state
        own_args = [tree_map(own_copy, arg) for arg in given.values()]
        with torch.no_grad():
            value = self.first_value(*own_args)
            check_value(value)
            self.check_buffers(value)
            value = tree_map(settled, value)
        return State.first(value, seed, trained=self.trained_of(value))

    def marked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `init` by name, of which those that `trainable` names have
        `requires_grad` as its rules say, and buffers none."""
        found = dict(given)
        for name in {*given} & {*self.trainable}:
            found[name] = mark_trainable(given[name], self.trainable[name])
        for name in {*given} & {*self.buffers}:
            check_tensors(given[name], name)
            found[name] = tree_map(torch.detach, given[name])
        return found

    def trained_of(self, value: Any) -> Trained:
        """Which leaves of a whole value are trained; with a tree that has no name, which of that
        one's, by its own paths."""
        return Trained.of(self.known_tree(value))

    def known_tree(self, value: Any) -> Any:
        """The tree whose paths are those of `State.trained`: the one without a name, or else the
        whole value."""
        return value if self.nameless is None else entry_of(value, self.nameless)

    def as_trained(self, state: State) -> Any:
        """The value for the program: leaves without a history, which require grad where they are
        trained."""
        flags = state.trained.flags(self.known_tree(state.value))
        leaves, treedef = optree.tree_flatten(state.value)
        value = treedef.unflatten(detached(leaves))
        for leaf in compress(optree.tree_leaves(self.known_tree(value)), flags):
            if isinstance(leaf, Tensor):
                leaf.requires_grad_()
        return value

    def _check_rule(self, value: Any) -> None:
        """Raise if the rule for the tree without a name chooses other leaves than are trained."""
        if self.nameless is None:
            return
        params = self.known_tree(value)
        # A gradient names leaves that are no tensors
        if are_tensors(optree.tree_leaves(params)):
            check_trained(self.trainable.get(self.nameless), params)

    def run(
        self,
        value: Any,
        args: tuple[Any, ...],
        scope: StepScope,
        device: torch.device,
        *,
        look: bool,
    ) -> tuple[Any, Metrics]:
        """The program's next value, and its metrics as 0-d tensors.

        Args:
            value, args: that it is given.
            scope: of this call.
            device: beside the CPU, where it draws numbers.
            look: whether writes to the value are looked for by its values.
        """
        with (
            unwritten(value, scope.rank, look=look),
            running(scope, device),
            torch.no_grad(),
            noting_missing_graphs(),
        ):
            result = self.program(value, *args)
        taken = scope.streams.num_gradients
        if self.num_gradients not in (None, taken):
            raise StructureError(
                "a program has taken another number of gradients in a step than it says",
                expected=f"num_gradients={self.num_gradients}",
                got=taken,
                rank=scope.rank,
                remedy="program_step without num_gradients= counts them in the first step",
            )
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not isinstance(result[1], Mapping):
            raise TypeError(
                explain(
                    "a program returns its next value and a dict of metrics",
                    expected="(value, {name: number})",
                    got=f"a {type(result).__name__}",
                    rank=scope.rank,
                    remedy="return value, {} where there are no metrics",
                )
            )
        new, metrics = result
        check_metrics(metrics, scope.rank)
        return new, {name: as_metric(metric) for name, metric in metrics.items()}

    def check_buffers(self, value: Any) -> None:
        """Raise unless a value, or the arguments of `init`, have trees of the names of buffers."""
        known = inspect.signature(self.first_value).parameters
        for name in self.buffers:
            if name not in known and not any(is_within(path, [name]) for path in paths(value)):
                raise ValueError(
                    explain(
                        "the program has no buffers of this name",
                        path=name,
                        expected=f"a parameter of init, among {[*known]}, or an entry of the value",
                        got=f"a {type(value).__name__}",
                        remedy='buffers=("buffers",) of program_step, for value.buffers',
                    )
                )

    def refit(self, state: State, *args: Any, **named: Any) -> State:
        """Another program's state as one of this program: leaves of the value keep what they are
        where the state's value has a leaf of that path, and all others are those of `init(*args)`.
        Step number and seed go on. The state given stays valid.

        Args:
            args, named: of `init`. Their values count only where the state's value has no tree of
                the parameter's name with a leaf of that path. Those left out, or None, are the
                value's own trees of that name.

        Raises:
            StructureError: a leaf has another shape or dtype than before, or a reduction keeps
                tensors in the state. Or other leaves are trained, and the value has a tensor of
                all of them together, or `init` can't run on the meta device.
        """
        check_whole_state(state)
        check_no_parts(state.parts)
        known = self.as_trained(state)
        given = args_of_refit(self.first_value, args, known, named)
        begun = {n: carried_tree(arg, entry_of(known, n), n) for n, arg in given.items()}
        begun = self.marked(begun)
        fresh = self._first_state(begun, None)
        was, now = (Trained.of(value).paths for value in (known, self.as_trained(fresh)))
        check_own_tensors(self.first_value, begun, was, now, paths(known))
        value = carried(fresh.value, state.value, "the value")
        return fresh.replace(step=state.step, seed=state.seed, value=value)

    def __call__(self, state: State, *args: Any) -> tuple[State, Metrics]:
        """One step of the program; the state given stays valid."""
        check_whole_state(state)
        check_policies(state, self.known_tree(state.value))
        value = self.as_trained(state)
        # By numbers of steps, which need not be those of calls: nobody else looks
        look = is_looked_at(int(state.step))
        if look:
            self._check_rule(value)
        scope = StepScope(
            streams=Streams(state.seed, state.step), calls=self.calls, rank=rank_of_step()
        )
        shown = optree.tree_leaves(value)  # from before: a program may change its value's dicts
        new, metrics = self.run(value, args, scope, device_of(value), look=look)
        check_next_value(state.value, new, free=self.free)
        next_value = _next_value(state.value, shown, new)
        return state.replace(step=state.step + 1, value=next_value), metrics


def program_step(
    program: Program,
    *,
    init: Callable[..., Any],
    trainable: Mapping[str, Trainable] | None = None,
    buffers: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
    num_gradients: int | None = None,
) -> ProgramStep:
    """Make a step of a program of your own, for one process. `shard` turns it into the same step
    for N ranks.

    Args:
        program: `(value, *args) -> (value, metrics)`, pure. The value is any pytree: trees of
            params, optimizers' states, counters. It takes gradients by `fz.value_and_grad` and
            updates by transforms, as many as it likes. Metrics are 0-d tensors or numbers by name.
        init: `(first_tree, ...) -> value`, the first one, with a parameter per tree. It is given
            trees of whole leaves, sharded: trees that are cut already.
        trainable: by the name of a parameter of `init`, which leaves of that tree are trained: a
            tree of bools or a function `(path, leaf) -> bool`. Of other trees they are those with
            `requires_grad`.
        buffers: names of trees of buffers, which every rank holds whole: arguments of `init` that
            aren't cut, and entries of the value, which each rank keeps for itself with
            `shard(sync_buffers="local")`. A loss may give them another shape or dtype, where ranks
            need not send them.
        facts: plain data by name that all ranks must have alike, such as hyperparameters; compared
            in `init`.
        num_gradients: how many gradients each step takes, where that is always the same. A step
            that donates then writes over its params from the first one on, so that the program
            can't use the old ones after their update; None: the first step counts, copies, and
            notes such uses.

    >>> from typing import NamedTuple
    >>> import functorch_zero as fz
    >>> from functorch_zero import optim
    >>> optimizer = optim.sgd(0.1)
    >>> class Value(NamedTuple):
    ...     params: dict
    ...     opt_state: tuple
    >>> def init(params):
    ...     return Value(params, optimizer.init(params))
    >>> def loss(params, x):
    ...     return ((params["w"] - x) ** 2).sum()
    >>> def program(value, x):
    ...     loss_value, grads = fz.value_and_grad(loss)(value.params, x)
    ...     params, opt_state = optimizer.apply(grads, value.opt_state, value.params)
    ...     return Value(params, opt_state), {"loss": loss_value}
    >>> step = program_step(program, init=init)
    >>> state = step.init({"w": torch.zeros(2, requires_grad=True)})
    >>> state, metrics = step(state, 1.0)
    >>> state.value.params["w"], metrics["loss"]
    (tensor([0.2000, 0.2000], requires_grad=True), tensor(2.))
    """
    if isinstance(buffers, str):
        raise TypeError(f"buffers must be a list of names, got the string {buffers!r}")
    rules = {} if trainable is None else dict(trainable)
    for name, rule in rules.items():
        if callable(rule):
            check_takes(rule, ("path", "leaf"), 2, by=f"trainable[{name!r}]")
    own_facts, names = {} if facts is None else dict(facts), tuple(buffers)
    # A loss may replace buffers
    return ProgramStep(program, init, rules, names, own_facts, num_gradients, free=names)


def named_args(
    first_value: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any] = _NONE
) -> dict[str, Any]:
    """The arguments of a program's `init`, by the names of its parameters, which say how sharded
    trees are cut.

    Args:
        args, named: those given by their places, and by their names.
    """
    signature = inspect.signature(first_value)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                explain(
                    "a program's init takes any number of arguments, and each tree needs a name, "
                    "by which it is given its level",
                    expected="a parameter per tree: init(gen, disc)",
                    got=f"init{signature}, with {parameter}",
                    remedy="name the parameters, or pass one tree that holds them all",
                )
            )
    try:
        return signature.bind(*args, **named).arguments
    except TypeError as error:
        raise TypeError(
            explain(
                "a program's init was given other arguments than it takes",
                expected=f"those of init{signature}",
                got=f"{len(args) + len(named)} ({error})",
                remedy="pass one argument per parameter, each tree as one of its own",
            )
        ) from None


def args_of_refit(
    first_value: Callable[..., Any],
    args: tuple[Any, ...],
    value: Any,
    named: Mapping[str, Any] = _NONE,
) -> dict[str, Any]:
    """The arguments of a program's `init`, by name: those given, and the value's own trees in
    place of those that are None or left out."""
    given: dict[str, Any] = {}
    names = [*inspect.signature(first_value).parameters]
    # The rest, so that too many are refused as usual
    all_named = {**dict.fromkeys(names[len(args) :]), **named}
    for name, arg in named_args(first_value, args, all_named).items():
        own = entry_of(value, name)
        if arg is None and own is None:
            raise StructureError(
                "refit was not given an argument of the program's init, and the state's value "
                "has no tree of its name",
                path=name,
                got=f"a {type(value).__name__}",
                remedy=f"step.refit(state, {', '.join(names)})",
            )
        given[name] = own if arg is None else arg
    return given


def entry_of(value: Any, name: str) -> Any:
    """A value's entry of this name; None where it has none."""
    if isinstance(value, Mapping):
        return value.get(name)
    return getattr(value, name) if name in getattr(value, "_fields", ()) else None


def carried_tree(tree: Any, known: Any, name: str) -> Any:
    """A tree with the leaves that a known one has, too, of which `init` is given copies."""
    is_same = known is None or known is tree
    return tree if is_same else carried(tree, known, name, copies=False)


def named_values(
    given: Mapping[str, Any], values: DeferredInit | Mapping[str, DeferredInit] | None
) -> Mapping[str, DeferredInit]:
    """The values for trees on the meta device, by the names of `init`'s parameters."""
    if values is None:
        return {}
    if isinstance(values, DeferredInit):
        return {name: values for name, arg in given.items() if _lacks_values(arg)}
    if not isinstance(values, Mapping):
        raise TypeError(
            explain(
                "a program's init takes values of all its trees, or by their names",
                expected=f"fz.deferred_init(model), or {{name: fz.deferred_init(model)}} of "
                f"{[*given]}",
                got=f"a {type(values).__name__}",
            )
        )
    unknown = [name for name in values if name not in given]
    if unknown:
        raise ValueError(
            explain(
                "a program's init was given values for a tree that it doesn't take",
                expected=f"names among {[*given]}",
                got=unknown,
                remedy="name the parameters of the program's init",
            )
        )
    return values


def _lacks_values(tree: Any) -> bool:
    """Whether a tree has a leaf on the meta device."""
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in optree.tree_leaves(tree))


def device_of(value: Any) -> torch.device:
    """The device of a value's first tensor that is no counter."""
    tensors: list[Tensor] = [*filter(Tensor.__instancecheck__, optree.tree_leaves(value))]
    return next(filter(Tensor.dim, tensors), tensors[0]).device


def check_value(value: Any, rank: int | None = None) -> None:
    """Raise, naming the first leaf, unless a program's value is made of what checkpoints can hold,
    with a tensor in it, and each leaf has a path of its own."""
    value = as_local(value)
    check_savable(value, "a program's value", rank)
    named_leaves(value)  # which names a path that two leaves have
    check_keys(value, "a program's value")
    if not any(isinstance(leaf, Tensor) for leaf in optree.tree_leaves(value)):
        raise StructureError(
            "a program's value holds no tensor",
            got=f"a {type(value).__name__}",
            rank=rank,
            remedy="return the trees of params and the optimizers' states from init",
        )


@contextmanager
def unwritten(value: Any, rank: int | None, *, look: bool) -> Iterator[None]:
    """Around a program that is given this value. Raise, naming the path, if it has written to a
    tensor of it: the state that was given would change. See `Untouched`. A step that donates may
    use up nodes.

    Args:
        look: whether values are compared.
    """
    # Under a transform of torch.func tensors stand for others
    if transforms_active():
        yield
        return
    nodes, treedef = optree.tree_flatten(value, is_leaf=is_on_engine)
    # From before, by their numbers: leaves all at once, of which whole values have many; and trees
    leaves = _counted(nodes)
    own = Untouched([*leaves.values()], look=look)
    trees = {
        n: Untouched([*_counted(node.tensors).values()], look=look)
        for n, node in enumerate(nodes)
        if is_on_engine(node)
    }
    yield
    changed = own.first_changed()
    written = [] if changed is None else [[*leaves][changed]]
    for n, untouched in trees.items():
        node = nodes[n]
        if node.is_used_up:
            continue
        if node.are_leaves_shown:
            node.story  # noqa: B018  counts writes to leaves by plain views
        if untouched.first_changed() is not None:
            written.append(n)
    if written:
        # Not earlier: paths of all leaves take longer than their check
        given = treedef.unflatten(nodes)
        raise StructureError(
            "a program has written to its value in place, and the state that it was given "
            "has changed with it",
            path=paths(given, is_on_engine)[min(written)],
            expected="new tensors: a step is a pure function",
            got="a write to the value's own",
            rank=rank,
            remedy="`p * 0.5` instead of `p.mul_(0.5)`, also in tree_map; "
            "tree_map(torch.clone, tree) first for a copy to write to; BatchNorm's buffers "
            "as value_and_grad(loss)(tree, buffers=buffers). The state is as the program "
            "has left it: make it anew, or load it",
        )


def _counted(leaves: Sequence[Any]) -> dict[int, Tensor]:
    """By their numbers, the leaves that are tensors which count writes."""
    # The usual case, by functions of C alone: a state may have many
    layouts = map(operator.attrgetter("layout"), leaves)
    if _PLAIN.issuperset(map(type, leaves)) and {torch.strided}.issuperset(layouts):
        return dict(enumerate(leaves))
    return {n: x for n, x in enumerate(leaves) if type(x) in _PLAIN and x.layout == torch.strided}


_PLAIN = {Tensor, Parameter}  # subclasses may be of several tensors


_AS_IT_WAS = "return the value that the program was given, with new leaves"


def check_next_value(
    old: Any,
    new: Any,
    rank: int | None = None,
    *,
    free: Sequence[str] = (),
    what: str = "the program's next value",
    remedy: str = _AS_IT_WAS,
) -> None:
    """Raise, naming the first leaf, unless a program returns its value in the structure, shapes and
    dtypes that it was given.

    Args:
        free: names of entries whose leaves may have others.
        what, remedy: for errors.
    """
    same_structure(old, new, what=what, rank=rank, remedy=remedy)
    check_savable(new, what, rank)
    given, found = optree.tree_leaves(old), optree.tree_leaves(new)
    # The usual case, without a call of Python for each leaf
    if are_tensors(given) and are_tensors(found) and _forms(given) == _forms(found):
        return
    bound = {path: form for path, form in forms_of(old).items() if not is_within(path, free)}
    what = f"a leaf of {what} has another shape or dtype"
    check_forms(bound, forms_of(new), what, rank=rank, remedy=remedy)


def _forms(tensors: Sequence[Tensor]) -> list[Any]:
    return [*map(_FORM, tensors)]


_FORM = operator.attrgetter("shape", "dtype")


def _next_value(old: Any, shown: Sequence[Any], new: Any) -> Any:
    """A program's result as the next state holds it: without a history, trained as before. A leaf
    that isn't trained, and that the program returns as it was given, is the old one itself.

    Args:
        shown: the leaves that the program was given.
    """
    (leaves, treedef), before = optree.tree_flatten(new), optree.tree_leaves(old)
    own = all_settled(detached(leaves))
    for leaf in compress(own, requiring_grad(shown)):
        leaf.requires_grad_()
    for n in compress(range(len(own)), map(operator.is_, leaves, shown)):
        if _is_as_held(before[n], shown[n]):
            own[n] = before[n]
    return treedef.unflatten(own)


def _is_as_held(leaf: Any, shown: Any) -> bool:
    """Whether a state may hold a leaf as it is, which a program was shown."""
    if not isinstance(leaf, Tensor):
        return True
    # A trained one may have collected a gradient, which ends with its step
    is_trained = leaf.requires_grad or shown.requires_grad
    return not is_trained and settled(leaf) is leaf
