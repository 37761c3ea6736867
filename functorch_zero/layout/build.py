"""Building a layout: leaves into units, units into buckets, buckets into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import optree

from ..compress import block_of, dtype_of
from ..errors import StructureError, explain
from ..params import Params, UnitSpec
from ..precision import Dtypes, Precision, short
from ..tree import PyTree, dotted, paths
from .layout import Bucket, Cut, Layout, LeafSpec, Unit

# Bytes that a leaf starts at a multiple of, in each dtype that its flat takes. Libraries for GPUs
# choose a matrix product's kernel by alignment, and others round otherwise. torch's allocator for
# them gives 512 bytes, but a leaf that starts inside of a flat is only aligned to its start there.
LEAF_ALIGNMENT = 256
# Bytes that a rank's piece starts at a multiple of. Pieces are only copied and updated, and more
# would pad small buckets for many ranks.
PIECE_ALIGNMENT = 64
LARGE = 2**23  # bytes; leaves of at least this size get a bucket of their own (levels 2 and 3)

CutOf = Callable[[str, Any, Dtypes | None], Cut]


def leaf_specs(
    tree: PyTree[Any],
    trainable: Callable[[str, Any], bool],
    cut: CutOf,
    policies: Mapping[str, Precision],
) -> list[LeafSpec]:
    """The specs of a tree of tensors, in tree order. The meta device will do.

    Args:
        policies: by path; leaves without one are used as they are stored.
    """
    specs = []
    for path, leaf in zip(paths(tree), optree.tree_leaves(tree), strict=True):
        dtypes = policies[path].dtypes(leaf.dtype) if path in policies else None
        spec = LeafSpec(
            path=path,
            shape=tuple(leaf.shape),
            dtype=leaf.dtype,
            trainable=bool(trainable(path, leaf)),
            cut=cut(path, leaf, dtypes),
            dtypes=dtypes,
        )
        specs.append(spec)
    return specs


def make_layout(
    tree: PyTree[Any],
    num_ranks: int,
    *,
    trainable: Callable[[str, Any], bool],
    units: Sequence[UnitSpec] | None = None,
    cut: CutOf | None = None,
    aligned: bool = True,
    name: str = "",
) -> Layout:
    """Cut `tree` over `num_ranks` ranks.

    Args:
        tree: of tensors; the meta device will do.
        trainable: by path and leaf.
        units: None: `default_units`.
        cut: by path, leaf and its policy's dtypes; None: each leaf into a piece per rank.
        aligned: whether leaves and pieces start at aligned bytes, for speed and equal rounding. In
            a proof they don't: aligned small leaves lie whole on one rank, and none would be cut.
            At multiples of a codec's block they start in any case.
        name: of the tree, by which its units' paths begin.

    Raises:
        ValueError: the units don't have each leaf exactly once.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if units is None:
        units = default_units(tree)
    # Without levels: all is cut, as at level 3
    everything = Cut(level=3, num_pieces=num_ranks, num_held=num_ranks)
    cut_of = cut or (lambda path, leaf, dtypes: everything)
    policies: dict[str, Precision] = {}  # by path
    # A path in two units is refused below, so no policy is lost
    for unit in units:
        policies |= unit.policies
    specs = leaf_specs(tree, trainable, cut_of, policies)
    number_of = {spec.path: n for n, spec in enumerate(specs)}  # path -> its number in tree order
    made: list[Unit] = []
    buckets: list[Bucket] = []
    for unit in units:
        # Units are a model's, and the tree may hold some of its leaves only
        own = [number_of[path] for path in unit.leaves if path in number_of]
        for unit_name, modules, leaves in _without_tables(unit, specs, own):
            new = _buckets_of(unit_name, specs, leaves, aligned=aligned)
            # The numbers in the layout of this unit's buckets
            numbers = tuple(range(len(buckets), len(buckets) + len(new)))
            path = dotted(name, unit_name)
            why = unit.why if unit_name == unit.name else ""
            made.append(Unit(unit_name, modules, numbers, path, why))
            buckets += new
    # A leaf in no unit would never be gathered, one in two would be trained twice
    covered = sorted(n for bucket in buckets for n in bucket.leaves)
    if covered != list(range(len(specs))):
        raise ValueError(
            "each leaf must be in exactly one unit; the units given don't cover the tree exactly "
            "once"
        )
    return Layout(
        num_ranks=num_ranks,
        leaves=tuple(specs),
        units=tuple(made),
        buckets=tuple(buckets),
        treedef=optree.tree_structure(tree),
    )


def default_units(tree: PyTree[Any]) -> tuple[UnitSpec, ...]:
    """The units that models in the tree have (`Params.units`). Of the rest, each child of the root
    that is itself a tree is one unit, and bare leaves share one."""
    found: list[UnitSpec] = []
    # A dict keeps the order of first leaves, and so the order is the same on all ranks
    rest: dict[str, list[str]] = {}  # by the name of a root's child, paths; "": bare leaves
    accessors = optree.tree_accessors(tree, is_leaf=_has_units)
    for accessor, path in zip(accessors, paths(tree, is_leaf=_has_units), strict=True):
        node = accessor(tree)
        if _has_units(node):
            found += [_inside(unit, path) for unit in node.units]
            continue
        is_bare = len(accessor) <= 1  # the root's own leaf, or the tree itself
        name = "" if is_bare else path.split(".")[0]
        rest.setdefault(name, []).append(path)
    for name, leaves in rest.items():
        found.append(UnitSpec(name, (), tuple(leaves)))
    return tuple(found)


def _has_units(node: Any) -> bool:
    return isinstance(node, Params) and bool(node.units)


def _inside(unit: UnitSpec, path: str) -> UnitSpec:
    """The unit of a model that lies at `path` of a tree. Its modules keep their paths in the
    model."""
    if not path:
        return unit
    leaves = tuple(f"{path}.{leaf}" for leaf in unit.leaves)
    sparse = tuple(f"{path}.{leaf}" for leaf in unit.sparse)
    name = dotted(path, unit.name)
    return replace(unit, name=name, leaves=leaves, sparse=sparse)


def _without_tables(
    unit: UnitSpec, specs: Sequence[LeafSpec], numbers: Sequence[int]
) -> Iterator[tuple[str, tuple[str, ...], list[int]]]:
    """The unit without its tables, and each of these as a unit of its own, which no module enters.
    Yields a name, modules, and the leaves' numbers."""
    tables = [n for n in numbers if specs[n].cut.by_rows]
    rest = [n for n in numbers if not specs[n].cut.by_rows]
    # One without any leaves stays, since nothing was taken from it
    if rest or not tables:
        yield unit.name, unit.modules, rest
    for n in tables:
        _check_table(specs[n])
        yield specs[n].path, (), [n]


def _check_table(spec: LeafSpec) -> None:
    """Raise if a leaf can't be cut into rows that travel one by one."""
    if len(spec.shape) != 2 or not spec.shape[1]:
        raise StructureError(
            'level="table" is for leaves that are looked up row by row',
            path=spec.path,
            expected="the shape (rows, columns) of an embedding's weight",
            got=spec.shape,
            remedy='name the embedding alone, level={"": 3, "embed": "table"}, say',
        )
    if _block(spec) > 1:
        raise NotImplementedError(
            explain(
                "a table's rows travel one by one, and a codec rounds blocks of several",
                path=spec.path,
                got=spec.dtypes,
                remedy="precision={...} with a dtype, or none, for this embedding",
            )
        )


def _buckets_of(
    unit: str, specs: Sequence[LeafSpec], numbers: Sequence[int], *, aligned: bool
) -> list[Bucket]:
    """The buckets of a unit with these leaves."""
    groups = _by_bucket(specs, numbers)
    # Names need a level only where the unit has buckets of several
    levels = {specs[group[0]].cut.level for group in groups}
    has_levels = len(levels) > 1
    return [_bucket(unit, specs, own, has_levels=has_levels, aligned=aligned) for own in groups]


def _by_bucket(specs: Sequence[LeafSpec], numbers: Sequence[int]) -> list[list[int]]:
    """A unit's leaves bucket by bucket; those that are alone in theirs come last."""
    # Leaves in tree order, per kind in the order of its first leaf
    shared: dict[Any, list[int]] = {}
    alone: list[list[int]] = []
    for n in numbers:
        spec = specs[n]
        if _stands_alone(spec):
            alone.append([n])
        else:
            kind = spec.dtype, spec.dtypes, spec.trainable, spec.cut
            shared.setdefault(kind, []).append(n)
    return [*shared.values(), *alone]


def _stands_alone(spec: LeafSpec) -> bool:
    """Whether a leaf has a bucket of its own: its gradient, if reduced at once, then needs no copy
    to be a flat."""
    # Only levels 2 and 3 reduce a gradient at once. A frozen leaf has none, but is cut like its
    # trained twin: an average of it, say.
    if spec.cut.level <= 1 or spec.cut.num_pieces == 1 or spec.cut.by_rows:
        return False
    # A bucket's flat has its padding at the end, so a leaf without any is the flat
    is_large = spec.numel * spec.dtype.itemsize >= LARGE
    needs_padding = spec.numel % (_piece_alignment(spec) * spec.cut.num_pieces) != 0
    return is_large and not needs_padding


def _leaf_alignment(spec: LeafSpec) -> int:
    """In elements, the same in all dtypes of the bucket's flats."""
    dtypes = [spec.dtype]
    if spec.dtypes is not None:
        forms = spec.dtypes.gather, spec.dtypes.reduce
        dtypes += [spec.dtypes.compute, *(dtype_of(form, spec.dtype) for form in forms)]
    own = LEAF_ALIGNMENT // min(dtype.itemsize for dtype in dtypes)
    return lcm(own, _block(spec))


def _piece_alignment(spec: LeafSpec) -> int:
    """In elements."""
    return lcm(PIECE_ALIGNMENT // spec.dtype.itemsize, _block(spec))


def _block(spec: LeafSpec) -> int:
    """Elements that codecs round together: leaves and pieces begin at multiples of it, so that
    blocks have the same elements of a leaf however it is cut."""
    if spec.dtypes is None:
        return 1
    return lcm(block_of(spec.dtypes.gather), block_of(spec.dtypes.reduce))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _bucket(
    unit: str,
    specs: Sequence[LeafSpec],
    numbers: Sequence[int],
    *,
    has_levels: bool,
    aligned: bool,
) -> Bucket:
    """The bucket of leaves that may share one.

    Args:
        has_levels: whether the unit has buckets of several levels, so that names say which.
        aligned: as `make_layout` takes it.
    """
    first = specs[numbers[0]]  # all leaves of a bucket agree with it in kind
    alignment = _leaf_alignment(first) if aligned else _block(first)
    offsets, end = [], 0  # in elements
    for n in numbers:
        offsets.append(_round_up(end, alignment))
        end = offsets[-1] + specs[n].numel
    num_pieces = first.cut.num_pieces
    # Pieces are equal, in elements, padding included
    if first.cut.by_rows:
        num_rows, row = first.shape
        piece = _round_up(num_rows, num_pieces) // num_pieces * row
    elif aligned or _stands_alone(first):
        alignment = _piece_alignment(first)
        piece = _round_up(end, num_pieces * alignment) // num_pieces
    else:
        # An even share would end between leaves, where these are equal
        piece = _round_up(end // num_pieces + 1, _block(first))
    kind = _kind_in_words(first, has_levels=has_levels)
    name = f"{unit or 'root'}[{kind}]"  # "" is the root's own name
    shapes = tuple(specs[n].shape for n in numbers)
    return Bucket(
        name=name,
        dtype=first.dtype,
        trainable=first.trainable,
        leaves=tuple(numbers),
        shapes=shapes,
        offsets=tuple(offsets),
        piece=piece,
        cut=first.cut,
        dtypes=first.dtypes,
    )


def _kind_in_words(first: LeafSpec, *, has_levels: bool) -> str:
    """The leaves of a bucket, of which this is the first, for the bucket's name."""
    words = short(first.dtype)
    if first.dtypes is not None:
        words += f", used as {first.dtypes}"
    if _stands_alone(first):
        words += f", {first.path}"
    if not first.trainable:
        words += ", frozen"
    if has_levels:
        words += f", level {first.cut.level}"
    return words
