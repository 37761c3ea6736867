"""`shard`: the same step for N ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Required, Unpack, overload

from ..groups import as_group
from ..groups.mesh import axes_of
from ..layout.levels import LevelRule, Levels
from ..places import PlaceRule
from ..runtime.reduce import Reduction
from ..step.evaluate import EvalStep
from ..step.program_step import ProgramStep
from .buffers import SyncBuffers
from .evaluate import ShardedEvalStep
from .options import (
    Options,
    OverlapChoice,
    ReduceGradients,
    ShardOptions,
    StateAxes,
    check_state_axes,
)
from .program.step import ShardedStep


class _Options(ShardOptions, total=False):
    """The arguments of `shard`."""

    level: Required[LevelRule]
    group: Any


@overload
def shard(step: EvalStep, **options: Unpack[_Options]) -> ShardedEvalStep: ...


@overload
def shard(step: ProgramStep, **options: Unpack[_Options]) -> ShardedStep: ...


def shard(
    step: EvalStep | ProgramStep,
    *,
    level: LevelRule,
    group: Any = None,
    donate: bool | None = None,
    sync_buffers: SyncBuffers = "mean",
    reshard_after_forward: bool = True,
    reduce_gradients: ReduceGradients | None = None,
    state_axes: StateAxes = "shard",
    overlap: OverlapChoice | None = None,
    reduction: Reduction | None = None,
    place: Mapping[str, PlaceRule] | None = None,
    reduce_bucket: int | None = None,
) -> ShardedEvalStep | ShardedStep:
    """A step for the ranks of a group: its results are those of the unsharded step, or it raises an
    error that says why not.

    Args:
        step: made by `train_step`, `eval_step` or `program_step`.
        level: 0 or "replicated"; 1 or "oss", optimizer state in pieces; 2 or "sdp", gradients too;
            3 or "fsdp", params too. Or levels by leaf: a mapping from patterns of paths, `{"": 3,
            "**.adapter": 1}`, of which the innermost that names a leaf or a tree around it counts;
            or a function `(path, leaf) -> level`. "table", of an embedding's weight: pieces of
            whole rows, which travel as a loss looks them up. The weights of `nn.Embedding` and
            `nn.EmbeddingBag` with `sparse=True` are tables at levels 1 to 3, unless a pattern names
            the leaf itself, or a function is given.
        group: a `Group`, a torch process group, a DeviceMesh, or None for torch's default group. A
            `HybridGroup`, or a mesh of two dims (replicate, shard), keeps pieces inside the shard
            axis and copies along the other.
        donate: whether the step may reuse the storage of the state it is given. That state can't
            be used again then. None: a training step may, and a program may not, which may keep
            its trees.
        sync_buffers: the rule for buffers that ranks have changed differently. "mean": their mean
            (of integers, the values of the first rank that counts); "rank0": rank 0's; "local":
            each rank keeps its own, which a program can't. Where a batch weighs 0 they stay as
            they are, and don't count in the mean.
        reshard_after_forward: at level 3, free a unit's params after forward and gather them again
            in backward (least memory), or keep them until backward has left the unit in the last
            micro-batch (least traffic).
        reduce_gradients: with `accumulate=k`, of `train_step` or a program's `value_and_grad`, the
            form in which gradients add up over the micro-batches. "every_microbatch": in pieces,
            each reduced at once (least memory: S/N); "once": whole, reduced once per step or call
            (least traffic). None: the level's own, pieces at levels 2 and 3, whole at 0 and 1,
            which have no pieces to offer.
        state_axes: with a group of two axes. "shard": each replica has all of the optimizer's
            state; "both": the state is cut over the replicas, too, which then also share the
            optimizer's work.
        overlap: of communication and backward. "memory": a unit's gradients are reduced, and the
            next unit is gathered, while the rest of the unit after them runs. "time": each has a
            whole unit's backward to hide behind, as GPUs want it, and up to two units' gradients
            are being reduced at a time. Or a `runtime.prefetch.Overlap` of your own. None:
            "memory" for leaves on a CPU, "time" on other devices. Results are the same to the bit.
        reduction: how a bucket's gradients are summed over ranks, an object with the methods of
            `runtime.reduce.Reduction`. The tensors that it keeps between steps are in
            `State.parts`; of a program, those of each trained tree of its value. None: gradients
            are summed as they are, or as `Precision.reduce` says.
        place: by kind of what a rank holds, its `places.Place`, or places by unit: a mapping from
            patterns of the units' paths, `{"": None, "blocks.*": place}`, as for `level`; units
            that none names stay in memory. "state": the optimizer's between steps, those of a
            program's optimizers between their updates. "params": as they are held between steps.
            "gradients": sums, up to the update, and whole ones that add up. "saved": tensors that
            autograd saves for backward, other than params. None, and kinds that aren't given:
            memory beside the params.
        reduce_bucket: the bytes of gradients, at levels 0 to 2, that are summed over ranks as one:
            a small unit's wait for those of the next ones, until there are as many. Those of a unit
            of as many bytes go by themselves, and none waits for the step's end. Results are
            `reordered`, and the same to the bit on two ranks. None: each unit's by themselves.

    Volume per rank and step, in units of the params' bytes times (N-1)/N: levels 0, 1 and 2: 2;
    level 3: at most 3, 2 when not resharding. With k micro-batches: level 2 k + 1, level 3 at most
    3 k, k + 1 when not resharding. Of a table the rows that are looked up travel, twice, and their
    ids. Short buckets are padded to a multiple of the ranks.

    The result is the unsharded step's where the loss is a mean over its batch, or returns its
    weight (`fz.Aux`). BatchNorm and dropout see each rank's own part.

    After Rajbhandari et al., "ZeRO" (2020).

    >>> import functorch_zero as fz
    >>> from torch import nn
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.base, self.adapter = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    ...
    ...     def forward(self, x):
    ...         return self.base(x) + self.adapter(x)
    >>> apply, params, buffers = fz.functionalize(nn.Sequential(Block(), Block()), units=Block)
    >>> def loss_fn(params, buffers, x):
    ...     return apply(params, buffers, x)[0].square().mean()
    >>> step = fz.train_step(loss_fn, fz.optim.sgd(0.1))
    >>> step = fz.shard(step, level={"": 3, "**.adapter": 1}, group=fz.groups.SingleRank())
    >>> for path, leaf in step.init(params, buffers).params.items():  # whole below level 3
    ...     print(path, tuple(leaf.local.shape))
    0.base.weight (16,)
    0.adapter.weight (4, 4)
    1.base.weight (16,)
    1.adapter.weight (4, 4)
    """
    if not isinstance(step, EvalStep | ProgramStep):
        raise TypeError(
            "shard takes what train_step, eval_step or program_step made, got "
            f"{type(step).__name__}. Remedy: shard(fz.train_step(loss_fn, optimizer), ...)"
        )
    levels = Levels(level)
    # Checked before `axes_of`, which makes groups and may exchange ranks' numbers
    cuts_over_both = check_state_axes(state_axes) == "both"
    axes = axes_of(as_group(group), both=cuts_over_both)
    options = Options.checked(
        step,
        levels,
        axes,
        donate=donate,
        sync_buffers=sync_buffers,
        reshard_after_forward=reshard_after_forward,
        reduce_gradients=reduce_gradients,
        overlap=overlap,
        reduction=reduction,
        place=place,
        reduce_bucket=reduce_bucket,
    )
    if isinstance(step, ProgramStep):
        return ShardedStep(step, options)
    return ShardedEvalStep(step, options)
