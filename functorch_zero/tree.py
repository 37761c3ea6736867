"""The few pytree helpers that optree does not have: dotted paths, selection, digests."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import optree
import torch
from optree import tree_map
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._torch_private import has_grad_hooks, is_fake, storage_id
from .errors import StructureError, first_few
from .params import Params, is_on_engine, nodes_of
from .savable import are_savable, fault_of

T = TypeVar("T")
Key = TypeVar("Key")
# Any tree whose leaves are T; optree's own type knows the built-in containers only
PyTree: TypeAlias = T | Any


def paths(tree: PyTree[Any], is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """The dotted path of every leaf, in flatten order.

    >>> paths({"head": {"weight": 1}, "blocks": [2, 3]})
    ['blocks.0', 'blocks.1', 'head.weight']
    """
    # A model's params: no walk through the tree
    if is_leaf is None and _keys_are_paths(tree):
        return list(tree)
    found = []
    for accessor in optree.tree_accessors(tree, is_leaf=is_leaf):
        # A node may leave a name out: "", as a `State` does for its value, so that paths begin with
        # `params`
        found.append(dotted(*map(_name_of, accessor)))
    return found


def dotted(*names: Any) -> str:
    """The path of an entry inside of others; those without a name are left out.

    >>> dotted("blocks", 0, "weight"), dotted("", "weight")
    ('blocks.0.weight', 'weight')
    """
    return ".".join(str(name) for name in names if name != "")


def map_with_paths(fn: Callable[..., Any], tree: PyTree[Any], *rest: PyTree[Any]) -> PyTree[Any]:
    """`tree_map` of `fn(path, leaf, *others)`, with the dotted path of each leaf.

    >>> map_with_paths(lambda path, leaf: f"{path} = {leaf}", {"head": {"weight": 1}})
    {'head': {'weight': 'head.weight = 1'}}
    """
    leaves, treedef = optree.tree_flatten(tree)
    columns = leaves, *map(treedef.flatten_up_to, rest)
    return treedef.unflatten(map(fn, paths(tree), *columns))


def _keys_are_paths(tree: PyTree[Any]) -> bool:
    """Whether these are a model's params, each a tensor: their keys are the paths.

    Steps ask for these paths often, and optree's accessors take long.
    """
    return type(tree) is Params and are_tensors([*tree.values()])


def _name_of(entry: Any) -> str:
    """One name of a path: a field of a NamedTuple or dataclass, else a key or an index."""
    return str(getattr(entry, "field", entry.entry))


def named_leaves(tree: PyTree[Any]) -> dict[str, Any]:
    """Leaves by dotted path. For a model's params, `Module.load_state_dict` takes the result.

    >>> named_leaves({"b": [1, None], "a": 2})
    {'a': 2, 'b.0': 1}
    """
    leaves = optree.tree_leaves(tree)
    named = dict(zip(paths(tree), leaves, strict=True))
    if len(named) < len(leaves):
        (path, count), *_ = Counter(paths(tree)).most_common(1)
        raise StructureError(
            "leaves of a tree have the same path",
            path=path,
            expected="a path of its own for each leaf",
            got=f"{count} leaves",
            remedy="leave dots out of names, and let no two names print the same",
        )
    return named


def check_savable(tree: PyTree[Any], what: str, rank: int | None = None) -> None:
    """Raise, naming the first leaf, unless checkpoints can hold all of the tree's leaves.

    Args:
        tree: a state, or a part of one.
        what: its name, for the error: "the optimizer's state".
        rank: the rank that found it, for the error.
    """
    leaves = optree.tree_leaves(tree)
    if are_savable(leaves):
        return
    for n, leaf in enumerate(leaves):
        fault = fault_of(leaf)
        if fault is not None:
            raise StructureError(
                f"{what} holds what no checkpoint can hold",
                path=paths(tree)[n],
                rank=rank,
                **fault._asdict(),
            )


def check_keys(tree: PyTree[Any], what: str) -> None:
    """Raise, naming the path, if a key of the tree is named by its place in memory, as objects and
    functions are: no other run would find such a leaf in a checkpoint."""
    for accessor in optree.tree_accessors(tree):
        names = [_name_of(entry) for entry in accessor]
        for entry, name in zip(accessor, names, strict=True):
            if f"{id(entry.entry):x}" in name:
                raise StructureError(
                    f"{what} has a key whose name changes from run to run",
                    path=".".join(names),
                    got=f"a {type(entry.entry).__name__}",
                    remedy="take strings or numbers as keys",
                )


def check_no_sharded_tree(tree: Any, what: str) -> None:
    """Raise if a tree that must be whole, of this name, holds a sharded one."""
    if any(map(is_on_engine, nodes_of(tree))):
        raise StructureError(
            f"a sharded tree lies in {what}, whose leaves must be whole",
            got="a ShardedTree, whose leaves may be one rank's pieces",
            remedy="pass fz.unshard(tree), or the tree that it was cut from",
        )


def check_tensors(tree: PyTree[Any], what: str, *, dense: bool = True) -> None:
    """Raise, naming the first leaf that is no plain tensor, and unless each leaf has a path of its
    own.

    Steps keep values in flats of their own. A subclass would lose its class there, and a tensor its
    hooks.

    Args:
        tree: what a step or program is made for.
        what: its name, for the error: "params".
        dense: whether sparse leaves are refused. Flats have no place for them; a buffer may stay.
    """
    check_no_sharded_tree(tree, what)
    for path, leaf in named_leaves(tree).items():
        got = type(leaf).__name__
        if not isinstance(leaf, Tensor):
            remedy = "pass a tree of tensors, with torch.as_tensor(x) for numbers and arrays"
            if isinstance(leaf, nn.Module):
                remedy = (
                    "apply, params, buffers = fz.functionalize(model); pass its params and buffers"
                )
            raise StructureError(f"{what} must be tensors", path=path, got=got, remedy=remedy)
        if not isinstance(path, str):
            raise StructureError(
                f"{what} have a name that is no text",
                path=repr(path),
                got=type(path).__name__,
                remedy="name leaves of fz.Params by dotted paths",
            )
        if type(leaf) not in (Tensor, nn.Parameter) and not is_fake(leaf):
            raise StructureError(
                f"{what} must be plain tensors: values are kept in flats, without their class",
                path=path,
                expected="torch.Tensor or torch.nn.Parameter",
                got=got,
                remedy="pass a plain tensor, from `full_tensor()` of a DTensor for example, "
                "and make the subclass of it inside the loss",
            )
        if dense and (fault := fault_of(leaf)) is not None:
            raise StructureError(
                f"{what} must be tensors that checkpoints can hold",
                path=path,
                **fault._asdict(),
            )
        if has_grad_hooks(leaf):
            raise StructureError(
                f"{what} have hooks, which no step would call",
                path=path,
                got="a hook of register_hook or register_post_accumulate_grad_hook",
                remedy="remove it; change gradients by a transform in the optimizer's chain, "
                "or by a torch.autograd.Function inside the loss",
            )


def outline(tree: PyTree[Any], *, most: int = 12) -> str:
    """The tree's leaves without their values, for errors and prints; `most` of them.

    >>> outline({"x": torch.ones(4, 3), "y": "text"})
    'x: (4, 3) torch.float32 on cpu, y: a str'
    """
    found = []
    nodes = nodes_of(tree)
    for path, node in zip(paths(tree, is_on_engine), nodes, strict=True):
        kind = f"a {type(node).__name__}"
        if isinstance(node, Tensor):
            kind = f"{tuple(node.shape)} {node.dtype} on {node.device}"
        if is_on_engine(node):
            kind = repr(node)
        name = path if path or is_on_engine(node) else "(root)"
        found.append(f"{name}: {kind}" if name else kind)
    return first_few(found, most) or "no leaves"


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a dense tensor without hooks. It may be of a subclass: a whole tree keeps
    its leaves' classes."""
    if not isinstance(leaf, Tensor) or has_grad_hooks(leaf) or is_lazy(leaf):
        return False
    return leaf.layout == torch.strided and not (leaf.is_quantized or leaf.is_nested)


def storages(tree: PyTree[Any]) -> set[int]:
    """The storages that a tree's tensors lie in."""
    # Without a call of Python for each leaf, since steps ask this of all of them
    return {*map(storage_id, filter(Tensor.__instancecheck__, optree.tree_leaves(tree)))}


def is_within(path: str, names: Iterable[str]) -> bool:
    """Whether a leaf's path leads through an entry of one of these names."""
    return path.split(".")[0] in names


def own_copy(leaf: Any) -> Any:
    """A tensor's copy, without its history, trained where the tensor is; anything else itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def are_tensors(leaves: Sequence[Any]) -> bool:
    """Whether all are tensors; without a call of Python for each, since steps ask this of all their
    leaves."""
    return all(map(Tensor.__instancecheck__, leaves))


def requiring_grad(leaves: Sequence[Any]) -> list[bool]:
    """Whether each is a tensor that requires grad."""
    if are_tensors(leaves):
        return [*map(_REQUIRES_GRAD, leaves)]
    return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]


_REQUIRES_GRAD = attrgetter("requires_grad")


def trained_leaves(params: PyTree[Tensor]) -> PyTree[Tensor]:
    """The trained leaves of a whole tree, without their history; None elsewhere."""
    return tree_map(lambda p: p.detach() if p.requires_grad else None, params)


def detached(leaves: Sequence[Any]) -> list[Any]:
    """The tensors without their history, which share their storage, and all else itself."""
    if are_tensors(leaves):
        return [*map(Tensor.detach, leaves)]
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def copied_if_in(tree: PyTree[Any], *others: PyTree[Any]) -> PyTree[Any]:
    """A tree whose tensors lie in none of the storages of the others: copies where they did."""
    own_storages = storages(tree)
    shared = storages(others) if own_storages else set()
    if shared.isdisjoint(own_storages):
        return tree

    def own(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) and storage_id(x) in shared else x

    return tree_map(own, tree)


def settled(leaf: Any) -> Any:
    """A tensor in the places that loading gives it: one for each element, without gaps; anything
    else itself. Kernels round otherwise where elements lie apart, or several in one place."""
    if not isinstance(leaf, Tensor) or (leaf.is_contiguous() and not is_flagged(leaf)):
        return leaf
    plain = leaf.resolve_conj().resolve_neg()
    if not torch.ops.aten.is_non_overlapping_and_dense(plain):
        plain = plain.contiguous()
    return plain.requires_grad_(leaf.requires_grad)


def all_settled(leaves: Sequence[Any]) -> list[Any]:
    """`settled` of each."""
    is_usual = are_tensors(leaves) and all(map(Tensor.is_contiguous, leaves))
    if is_usual and not any(map(Tensor.is_conj, leaves)) and not any(map(Tensor.is_neg, leaves)):
        return [*leaves]
    return [*map(settled, leaves)]


def is_flagged(x: Tensor) -> bool:
    """Whether a tensor is lazily conjugated or negated: its values aren't those in its memory.

    Its storage, offset and strides are the same as without. So whoever goes by places asks.
    """
    return x.is_conj() or x.is_neg()


def is_dtensor(x: Any) -> bool:
    """Whether it is torch's DTensor, which knows that other ranks hold other parts of it."""
    return isinstance(x, dtensor_class())


def dtensor_class() -> Any:
    """torch's DTensor, for `isinstance`; no class where nobody can have one."""
    # Their module takes a while to import, and whoever has one has imported it
    module: Any = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def has_values(x: Tensor) -> bool:
    """Whether a tensor has elements, and not only a shape and a dtype."""
    return not (x.is_meta or is_fake(x))


def tensors_among(*values: Any) -> Iterator[Tensor]:
    """The tensors among some arguments, and in lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_among(*value)


def select(tree: PyTree[Any], mask: PyTree[bool]) -> PyTree[Any]:
    """`tree` with None, which optree skips, where `mask` is false.

    >>> select({"a": 1, "b": 2}, {"a": True, "b": False})
    {'a': 1, 'b': None}
    """
    return tree_map(lambda leaf, keep: leaf if keep else None, tree, mask)


def merge(selected: PyTree[Any], rest: PyTree[Any]) -> PyTree[Any]:
    """Inverse of `select`: where `selected` has None, the leaf of `rest`."""
    # None stands for a leaf that was not selected, so it counts as one here
    chosen = optree.tree_leaves(selected, none_is_leaf=True)
    others = optree.tree_leaves(rest, none_is_leaf=True)
    merged = []
    for leaf, other in zip(chosen, others, strict=True):
        if other is None:  # part of the structure of `rest`, and no leaf
            continue
        merged.append(other if leaf is None else leaf)
    return optree.tree_structure(rest).unflatten(merged)


def mask_of(tree: PyTree[Any], mask: PyTree[bool] | Callable[[str, Any], bool]) -> PyTree[bool]:
    """A tree of bools shaped like `tree`, from such a tree or from a function
    `(path, leaf) -> bool`."""
    # A mask given as a tree: only its structure is checked
    if not callable(mask):
        remedy = "pass a function (path, leaf) -> bool, or a tree of bools as tree_map makes it"
        same_structure(tree, mask, what="the mask", remedy=remedy)
        return mask
    return map_with_paths(lambda path, leaf: bool(mask(path, leaf)), tree)


def same_structure(
    expected: PyTree[Any],
    got: PyTree[Any],
    *,
    what: str,
    rank: int | None = None,
    none_is_leaf: bool = False,
    remedy: str = "pass a tree with the structure of the params that `init` was given",
) -> None:
    """Raise `StructureError`, naming the first path that differs, unless both trees have the same
    structure.

    Args:
        expected: a tree of the right structure.
        got: the tree to check.
        what: its name, for the error: "the mask".
        rank: the rank that found it, for the error.
        none_is_leaf: whether None stands for a leaf.
        remedy: the user's next move, for the error.
    """
    # The usual case, without making paths
    if optree.tree_structure(expected, none_is_leaf=none_is_leaf) == optree.tree_structure(
        got, none_is_leaf=none_is_leaf
    ):
        return
    is_leaf = _is_none if none_is_leaf else None
    expected_paths, got_paths = paths(expected, is_leaf), paths(got, is_leaf)
    missing = _without(expected_paths, got_paths)
    unexpected = _without(got_paths, expected_paths)
    if missing:
        path, story = missing[0], "missing"
    elif unexpected:
        path, story = unexpected[0], "not expected"
    else:  # the same paths, through other containers
        # Names of leaves tell nothing here: a list in place of a tuple, say
        path, wanted, found = _other_container(expected, got)
        story = f"in a {_told(found)} in place of a {_told(wanted)}"
        if {type(wanted), type(found)} == {Params, dict}:
            remedy = (
                "fz.Params(leaves, params.units) makes a dict Params again; tree_map keeps them"
            )
        elif is_on_engine(wanted) and not is_on_engine(found):
            remedy = (
                "tree_map keeps the kind of a tree, and a dict made leaf by leaf doesn't; "
                "fz.apply_updates(params, updates) adds updates to params"
            )
    raise StructureError(
        f"{what} does not have the tree structure it must have",
        path=path,
        expected=f"{len(expected_paths)} leaves in a {type(expected).__name__}",
        got=f"{len(got_paths)} leaves in a {type(got).__name__}; this leaf is {story}",
        rank=rank,
        remedy=remedy,
    )


def _told(container: Any) -> str:
    """A container in words; a sharded one as it is cut, in which two may differ."""
    if not is_on_engine(container):
        return type(container).__name__
    return f"{type(container).__name__} {container.in_words}"


def _other_container(expected: Any, got: Any, path: str = "") -> tuple[str, Any, Any]:
    """The first path at which two trees of the same leaves have different containers, and these."""
    if type(expected) is type(got) and not optree.tree_is_leaf(expected):
        inside, theirs = optree.tree_flatten_one_level(expected), optree.tree_flatten_one_level(got)
        for a, b, entry in zip(inside[0], theirs[0], inside[2], strict=True):
            if optree.tree_structure(a) != optree.tree_structure(b):
                return _other_container(a, b, dotted(path, entry))
    return path, expected, got


def _is_none(node: Any) -> bool:
    return node is None


def _without(names: list[str], others: list[str]) -> list[str]:
    """The names that are not among the others, in order."""
    known = set(others)
    return [name for name in names if name not in known]


_CHUNK = 2**20  # bytes that a digest looks at together: it makes some copies of them


def content_digests(tree: PyTree[Tensor]) -> dict[str, str]:
    """A digest of each leaf's values, by path; leaves on the meta device have none."""
    digests = {}
    for path, leaf in named_leaves(tree).items():
        if leaf.device.type != "meta":
            digests[path] = content_digest(leaf)
    return digests


def content_digest(leaf: Tensor) -> str:
    """A checksum of the leaf's bytes, 16 hexadecimal digits. NaNs equal themselves, and it changes
    when two elements change places."""
    if leaf.layout != torch.strided:
        elements = leaf.detach().to_sparse().coalesce()
        return content_digest(elements.indices()) + content_digest(elements.values())
    data = in_words(leaf, torch.uint8)  # (bytes,)
    total = 0  # a Python integer: it does not overflow
    for start in range(0, data.numel(), _CHUNK):
        # Weights go on from the 8-byte words before this chunk
        total += _weighted_sum(data[start : start + _CHUNK], start // 8)
    return f"{total & (2**64 - 1):016x}"


def in_words(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of a tensor's elements as 1-D numbers of this dtype: a view, or a copy where they
    don't lie side by side."""
    row = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    # One element or none keeps whatever stride it had, and then torch refuses to view it so
    return (row if row.stride() == (1,) else row.as_strided(row.shape, (1,))).view(dtype)


def _weighted_sum(data: Tensor, first: int) -> int:
    """A chunk's share of its leaf's digest.

    Args:
        data: uint8, 1-D, the chunk's bytes.
        first: the number of 8-byte words of the leaf before it.
    """
    padding = data.new_zeros(-data.numel() % 8)  # so that the last bytes make a word
    words = torch.cat([data, padding]).view(torch.int64)  # (words of the chunk,) int64
    # Odd weights, each once in the leaf: a product with an odd number modulo 2**64, to which int64
    # wraps, loses no bit. The shift brings high bits, such as signs, down to low ones.
    weights = torch.arange(1, words.numel() + 1, device=words.device).add_(first).mul_(2).add_(1)
    mixed = words ^ (words >> 29)
    # One wait for the device per chunk
    return int((mixed * weights).sum())


# For errors of patterns that name nothing
PATTERNS = "in a pattern `*` is one name, or a part of one, and `**` is any number of names"


def path_matches(path: str, pattern: str) -> bool:
    """Whether a path fits a pattern, name by name: "layers.*" is each layer, not its insides, and
    "layers.**" is the layers and all in them.

    >>> [path_matches("a.b.c", p) for p in ("a.*", "a.*.c", "a.**", "**.c", "a.b.c.**")]
    [False, True, True, True, True]
    """
    return _names_match(names_of(path), names_of(pattern))


def _names_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether names fit patterns, one by one; "**" takes any number of names, and none, too."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_names_match(names[i:], patterns[1:]) for i in range(len(names) + 1))
    if not names or not fnmatchcase(names[0], patterns[0]):
        return False
    return _names_match(names[1:], patterns[1:])


def pattern_of(path: str, patterns: Iterable[str]) -> str | None:
    """The pattern that counts for a path: of those that name it, or a tree around it, the
    innermost; of several for one name, the last. None: there is none.

    >>> [pattern_of(path, ["", "a.*", "a.b"]) for path in ("a.b.c", "a.x", "b")]
    ['a.b', 'a.*', '']
    """
    backwards = [*patterns][::-1]
    for around in ancestors(path):
        for pattern in backwards:
            if path_matches(around, pattern):
                return pattern
    return None


def check_patterns(
    patterns: Iterable[str],
    known: Sequence[str],
    *,
    option: str,
    names: str,
    remedy: str,
    arguments: Sequence[str] = (),
) -> None:
    """Raise if a pattern names nothing.

    Args:
        known: the paths that patterns may name, or trees around them.
        option: to which the patterns were given; `names`: of what, "leaf" say.
        remedy: that has all paths.
        arguments: of a program's `init`, by whose names paths begin; () for a training step.
    """
    around = {name for path in known for name in ancestors(path)}
    for pattern in patterns:
        if any(path_matches(name, pattern) for name in around):
            continue
        some = f"a path, such as {', '.join(known[:3])}"
        if arguments:
            some = f"one of init's arguments ({', '.join(arguments)}), or {some}"
            remedy = "begin with the name of init's argument"
        raise StructureError(
            f"a pattern of `{option}` names no {names}",
            path=pattern,
            expected=some,
            remedy=f"{remedy}; {PATTERNS}",
        )


def grouped(pairs: Iterable[tuple[Key, T]]) -> dict[Key, list[T]]:
    """From pairs (key, value) the values of each key; keys and values in the order in which they
    come.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[Key, list[T]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def names_of(path: str) -> list[str]:
    """The names of a path; the root has none."""
    return path.split(".") if path else []


def ancestors(path: str) -> list[str]:
    """The path itself, its parents, and the root, innermost first."""
    names = names_of(path)
    return [".".join(names[:depth]) for depth in range(len(names), -1, -1)]
