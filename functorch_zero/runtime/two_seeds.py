"""Whether a backward is proportional to its seed: custom functions and hooks, tried with two seeds.

Note [proportional]: ranks begin backward with a share of the whole as the seed, see Note [seeds] in
`sharded/grad_mean.py`. That is right where twice the gradient going into a node gives twice the
gradients coming out, as all operators of torch do. The backward of a custom `autograd.Function` and
a hook are a user's own, and may do anything: add a constant, clip, normalise. Their gradients are
then not those of the whole batch, and nothing would tell. So in passes that look closely each of
them also runs aside, on twice the gradient. A factor of two rounds nothing.

Note [aside]: a run aside must leave no trace. It gets copies of the saved tensors, since kernels
write over them; what it writes to `ctx` is dropped; random numbers are those of the real run. Saved
tensors are unpacked once for both runs, since `torch.utils.checkpoint` gives them once. Ranks need
not run the same nodes aside, so that no collective may follow: a run that comes to a unit's module,
or brings gradients to a unit, ends there, and its function isn't tried.

Note [tensor hooks]: no node tells of the hooks on its outputs. They run between the node that sends
a gradient and the one that is given it. So where hooks were registered, copies of sent gradients
are compared with given ones, and where they differ the way between the nodes is run once more, by
itself. A hook that only writes to what it is given returns no other tensor, and shows there, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import starmap, zip_longest
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._torch_private import function_of, module_hooks_of
from ..errors import StructureError
from ..model.lazy_param import LazyParam
from ..tree import has_values

# Their functions are linear: this library's own, and what torch.compile makes, which runs only once
_LINEAR = ("functorch_zero.", "torch._functorch._aot_autograd.")

Grads = tuple[Tensor | None, ...]


class CantBeTried(Exception):
    """A backward that runs aside has come to a unit; see Note [aside]."""


class TwoSeeds:
    """The trial of one backward; see Note [proportional].

    Args:
        device: of the pass.
        rank: for errors.

    Attributes:
        is_aside: whether a function or a hook runs aside now.
    """

    def __init__(self, device: torch.device, rank: int):
        self._rank, self.is_aside = rank, False
        self._devices = [device] if device.type == "cuda" else []

    @contextmanager
    def trying(
        self, nodes: Sequence[Any], root: Tensor, seed: Tensor, *, hooked: bool
    ) -> Iterator[None]:
        """Around a backward: each custom function in it is tried, and each hook.

        Args:
            nodes: of the graph.
            root: the result that is differentiated, 0-d.
            seed: the gradient that backward begins with, 0-d.
            hooked: whether there may be hooks.

        Raises:
            StructureError: out of the backward, where one of them is not proportional.
        """
        ways = _Ways(self, root, seed)
        with ExitStack() as undo:
            # Without values, in a plan, there is nothing to compare
            for node in nodes if has_values(root) else ():
                function = function_of(node)
                if function is not None and not function.__module__.startswith(_LINEAR):
                    # In place of the class's method, which autograd would call
                    node.apply = partial(self._backward, node, function)
                    undo.callback(delattr, node, "apply")
                if hooked:
                    given = node.register_prehook(partial(ways.given, node))
                    self._wrap_hooks(node, given, undo)
                    _put_first(given)  # the node's own are tried by themselves
                    self._wrap_hooks(node, node.register_hook(partial(ways.sent, node)), undo)
            yield

    def _backward(self, node: Any, function: Any, *grads: Tensor | None) -> Any:
        """A custom function's backward: aside, and then for real."""
        run, saved = type(node).apply, cache(partial(self._saved_of, node))
        twice = self.aside(lambda: run(_Copies(node, saved), *map(_doubled, grads)))
        once = run(_Context(node, saved), *grads)
        self.compare(once, twice, f"the backward of {_told(function, function.backward)}")
        return once

    def _saved_of(self, node: Any) -> Any:
        """The saved tensors of a custom function's node, which are unpacked once."""
        # A checkpoint runs its region again here, for real
        before, self.is_aside = self.is_aside, False
        try:
            return node.saved_tensors
        finally:
            self.is_aside = before

    def _wrap_hooks(self, node: Any, own: Any, undo: ExitStack) -> None:
        """Let the hooks be tried that are in one dict of a node with a hook of our own."""
        undo.callback(own.remove)
        hooks = own.hooks_dict_ref()
        for number, hook in [*hooks.items()]:
            if number == own.id:
                continue
            of_module = module_hooks_of(hook)
            if of_module is None:
                undo.callback(_put_back, hooks, number, hook)
                hooks[number] = partial(self._hook, hook, f"a hook on {node.name()}")
                continue
            # A module's run in this one, which would not run twice
            undo.callback(vars(of_module).update, vars(of_module).copy())
            what = f"a backward hook of {type(of_module.module).__name__}"
            for name in "user_hooks", "user_pre_hooks":
                wrapped = [partial(self._hook, user, what) for user in vars(of_module)[name]]
                setattr(of_module, name, wrapped)

    def _hook(self, hook: Callable[..., Any], what: str, *given: Any) -> Any:
        """A hook, and aside once more where it has changed a gradient, also in place."""
        twice_given = [*map(_doubled, given)]  # before it may write to them
        once = hook(*given)
        if once is not None or not _are_twice(given, twice_given):
            # The second time, too, it may have written to what it was given
            twice = self.aside(lambda: (hook(*twice_given), twice_given))
            self.compare((once, given), twice, f"{what}, {_told(hook, hook)},")
        return once

    def aside(self, run: Callable[[], Any]) -> Any:
        """The results of a run aside; None where it can't be tried."""
        self.is_aside = True
        try:
            with torch.no_grad(), torch.random.fork_rng(self._devices):
                return run()
        except CantBeTried:
            return None
        except Exception as error:
            error.add_note(_IT_RAN_ASIDE)
            raise
        finally:
            self.is_aside = False

    def compare(self, once: Any, twice: Any, what: str) -> None:
        """Raise unless the second results, if there are some, are twice the first."""
        if twice is None or _are_twice(once, twice):
            return
        raise StructureError(
            f"{what} is not linear in the gradient that it is given. On ranks that is the "
            "gradient of a share of the batch, and the sum over ranks would not be the whole "
            "batch's",
            expected="twice as much out of it for twice the gradient",
            rank=self._rank,
            remedy="if backward adds a gradient, a balancing loss's say, take that loss out "
            "of backward and add it to the loss; if it clips or normalises, do so in the "
            "optimizer: optim.chain(optim.clip_by_global_norm(1.0), ...)",
        )


_IT_RAN_ASIDE = (
    "This backward or hook ran aside, on twice its gradient, to see whether it is linear in that: "
    'see docs/howto/inside-a-loss.md, "Linear in the gradient".'
)


# Under no names: `ctx` has those that a user's forward has chosen
_NODE, _SAVED = "(node)", "(saved)"


class _Context:
    """The `ctx` of a real run: the node, but for its saved tensors."""

    def __init__(self, node: Any, saved: Callable[[], Any]):
        vars(self).update({_NODE: node, _SAVED: saved})

    @property
    def saved_tensors(self) -> Any:
        return vars(self)[_SAVED]()

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)[_NODE], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)[_NODE], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)[_NODE], name)


class _Copies(_Context):
    """The `ctx` of a run aside: copies, and what is written to it is dropped."""

    @property
    def saved_tensors(self) -> Any:
        return _copied(super().saved_tensors)

    def __getattr__(self, name: str) -> Any:
        # Copied once: the function finds again in it what it has written
        copied = vars(self)[name] = _copied(super().__getattr__(name))
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        vars(self).pop(name, None)


class _Ways:
    """The gradients on their way between nodes; see Note [tensor hooks].

    Args:
        root, seed: where backward begins, and with what.
    """

    def __init__(self, trial: TwoSeeds, root: Tensor, seed: Tensor):
        self._trial = trial
        # By node and the number of its output, in the order of their coming. Copies: a hook may
        # write to what it is given
        self._sent: dict[tuple[Any, int], list[Tensor]] = {}
        self._sent[root.grad_fn, root.output_nr] = [seed.clone()]

    def sent(self, node: Any, grads: Grads, _: Grads) -> None:
        """A hook of a node: it has sent these gradients, one along each way, a pair (node, number
        of its output). What came in doesn't count."""
        for way, grad in zip(node.next_functions, grads, strict=True):
            if grad is not None:
                self._sent.setdefault(way, []).append(grad.clone())

    def given(self, node: Any, grads: Grads) -> None:
        """A node is given these gradients."""
        for number, grad in enumerate(grads):
            sent = self._sent.pop((node, number), [])
            if grad is None or not sent:
                continue
            total = sum(sent[1:], sent[0])
            if not _is_same(total, grad):
                self._try(node, number, total, grad)

    def _try(self, node: Any, number: int, sent: Tensor, given: Tensor) -> None:
        """Run the way to a node once more, with twice what was sent."""
        way = [GradientEdge(node, number)]

        def again() -> Any:
            return torch.autograd.grad(way, way, [2 * sent], retain_graph=True)

        self._trial.compare(
            given, self._trial.aside(again), f"a hook on an output of {node.name()}"
        )


def _put_first(own: Any) -> None:
    """Let a hook run before the others in its dict."""
    hooks = own.hooks_dict_ref()
    # Torch goes by the order in which they were put in, not by an OrderedDict's own
    for number in [*hooks]:
        if number != own.id:
            hooks[number] = hooks.pop(number)


def _put_back(hooks: dict[int, Any], number: int, hook: Any) -> None:
    # Unless it has removed itself
    if number in hooks:
        hooks[number] = hook


def _are_twice(once: Any, twice: Any) -> bool:
    """Whether all of the second results are twice the first."""
    flat = [optree.tree_leaves(result, none_is_leaf=True) for result in (once, twice)]
    return all(starmap(_is_twice, zip_longest(*flat)))


def _doubled(given: Any) -> Any:
    """An argument of a hook or a backward, with twice the gradients in it."""
    return optree.tree_map(lambda x: 2 * x if isinstance(x, Tensor) else x, given)


def _copied(value: Any) -> Any:
    """A value with copies of its tensors; a sharded param is only read."""

    def copied(x: Any) -> Any:
        is_copied = isinstance(x, Tensor) and not isinstance(x, LazyParam)
        return x.detach().clone() if is_copied else x

    return optree.tree_map(copied, value)


def _is_same(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype and a.layout == b.layout == torch.strided
    return same and torch.equal(a, b)


def _is_twice(once: Any, twice: Any) -> bool:
    """Whether one result is twice the other, where both are finite; None is zeros."""
    if not isinstance(once, Tensor) and not isinstance(twice, Tensor):
        return True
    once = torch.zeros_like(twice) if once is None else once
    twice = torch.zeros_like(once) if twice is None else twice
    once, twice = _dense(once), _dense(twice)
    if torch.equal(2 * once, twice) or not once.numel():
        return True
    eps = torch.finfo(once.dtype).eps
    # Sums may come in another order, as atomic ones of a device do; halves have little room
    tolerance = min(64 * eps, 0.03) if once.is_cpu else max(4 * eps, 1e-4)
    wide = torch.promote_types(once.dtype, torch.float32)
    expected, found = 2 * once.to(wide), twice.to(wide)
    off, size = (found - expected).abs(), expected.abs()
    # Twice a large gradient may overflow
    fine = off.isfinite() & size.isfinite()
    largest = torch.where(fine, size, 0).max()
    return not bool((torch.where(fine, off, 0) > tolerance * largest).any())


def _dense(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad if grad.layout == torch.strided else grad.to_dense()


def _told(named: Any, code_of: Any) -> str:
    """A function or class in words: its name, and the line where its code begins."""
    name = getattr(named, "__qualname__", type(named).__name__)
    code = getattr(inspect.unwrap(code_of), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
