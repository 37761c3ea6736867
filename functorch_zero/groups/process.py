"""Ranks as processes, over torch.distributed: NCCL on GPUs, gloo on CPUs.

A collective that only moves data moves bytes, so every dtype works on every backend. Sums that gloo
would make slowly, or not at all, are an exchange followed by a local sum in rank order;
`ProcessGroup` says which.

Note [eras]: a group that was left after a failure is made usable again by `rejoin`, over another
torch group. An *era* lasts from one to the next. Its number is how often this rank has come back,
which is the same on all ranks that come back together. A collective of an earlier era raises that
era's error, however late it is waited for. The number is part of the group's names in torch's
store, so that no rank finds the addresses or the failure of an earlier era.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import GroupError, LostPeerError, PeerError
from . import torch_distributed
from .checks import (
    check_all_gather,
    check_all_to_all,
    check_flat,
    check_reduce_scatter,
    check_source,
    check_subgroup,
    failure_text,
)
from .device_watch import (
    SECONDS_TO_FINISH,
    DeviceWatch,
    LettingGo,
    Mark,
    alarm_key,
    current_stream,
    is_reached,
    mark_on,
    spoilt_key,
)
from .exchanges import Exchanges, Pair, all_to_all
from .functorch_guard import refuse_collectives_in_transforms
from .members import Member, culprits, without_store
from .protocol import Done, ReduceOp, Work, check_reducible
from .rendezvous import join_launched_world
from .store import Store, StoreError
from .work import Then, TorchWork, as_bytes, copy_alone, nan_apart, through_host

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_KNOWN_TO_BACKENDS = (*_FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)

# Up to so many bytes gathered in all, gloo's all-gather and a local sum take no longer than its
# all-reduce
_SMALL = 2**16

# For the ranks that live to say so, after one was lost, and for the one at fault to say why. Over
# gloo they all see it in one moment; over NCCL their threads hear of it.
_SECONDS_FOR_ROLL_CALL, _SECONDS_OVER_NCCL = 1.0, 2.0
_SECONDS_IN_VAIN = 1.0  # for this device and others, before an abort after which nobody comes back


class ProcessGroup:
    """The ranks of a torch process group, of a 1-D `DeviceMesh`, or (None) of the default process
    group.

    All these ranks must make it, in the same order among the groups that they make; it costs one
    barrier and one small all-gather. It communicates over a torch group of its own, so that `fail`
    can destroy it without touching the caller's. Over NCCL there are two, of which gloo's carries
    the words and failures of hosts, also where the caller's has no backend for the CPU, as of
    `init_process_group("nccl")`. A collective that takes longer than `timeout` (seconds, or a
    timedelta) fails.

    Attributes:
        rank: this rank's number, from 0 to size - 1.
        size: the number of ranks.
        ranks: their numbers in the default process group.

    The way of each collective (N ranks, S bytes in the whole tensor, sent by each rank):

    - all_gather, all_to_all, broadcast: the backend's own, on bytes; an all-gather of two ranks
      over gloo is a swap, which does not copy this rank's own half.
    - reduce_scatter: NCCL's own, beside other collectives after `reduce_apart`. gloo: an all-to-all
      (S * (N-1) / N), and a sum in rank order in `wait`. gloo's own moves as much as an all-reduce
      and takes twice as long.
    - all_reduce: the backend's own, but for small tensors on CPUs and dtypes no backend adds, which
      are gathered (two ranks over gloo: swapped) and summed in rank order. A maximum keeps NaN, by
      reducing a mask of NaN along with the values.
    - gloo with tensors on another device than the CPU: through copies on the CPU, made at the call
      and in `wait`, since gloo does not have all collectives for them.
    - one rank: copies, no communication.

    A call, or `Work.wait`, raises `PeerError` with the other rank's error when one has called
    `fail`. It raises `LostPeerError` when a rank was lost without a word or the time is over; it
    names the ranks that don't answer, and their hosts.
    Afterwards the group can't be used until all ranks have called `rejoin`, as a sharded step does
    by itself when it is tried again. Over NCCL `wait` puts streams in order and raises nothing.
    There a thread of the group hears of failures while this rank's host waits for its device; see
    `device_watch`.
    """

    # A machine with one GPU tests the backend by collectives of one rank, and says False
    _copies_alone = True

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        timeout: float | timedelta = 300.0,
        _store: Store | None = None,
    ) -> None:
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        # Collectives that `_leave` cuts off; weak, as they live with the code that waits for them
        self._works: set[weakref.ref[TorchWork]] = set()
        # By era, why this rank left; see Note [eras]
        self._errors: dict[int, GroupError] = {}
        # A child that a step forks has the group's memory, and no part in it
        self._pid = os.getpid()
        self._closed = False  # by `close`: there is no way back
        refuse_collectives_in_transforms()
        if group is None:
            join_launched_world()
        self._parent = parent = torch_distributed.parent_group(group)
        self._limit = self._timeout.total_seconds()
        # Device type -> backend, {"cpu": "gloo"}; the CPU has one always
        self._backends = torch_distributed.own_backends(parent)
        # Devices' backends are apart from the host's, which carries failures while a device hangs
        self._of_device = torch_distributed.of_device(self._backends)
        self._of_host = {d: b for d, b in self._backends.items() if d not in self._of_device}
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        self.ranks = dist.get_process_group_ranks(parent)
        self._alone = self.size == 1 and self._copies_alone  # collectives are copies
        self._torch_group: dist.ProcessGroup | None = None  # None: alone, or this rank has left
        self._device_group: dist.ProcessGroup | None = None  # None: no backend for a device
        # For reduce-scatters alone, where `reduce_apart` was called
        self._reduces_apart = False
        self._reducing_group: dist.ProcessGroup | None = None
        # While connected, with a device group; see `device_watch`
        self._watch: DeviceWatch | None = None
        self._device: torch.device | None = None  # of the last collective on a device
        self._earlier: Mark | None = None  # behind the calls before the present one
        self._letting_go: LettingGo | None = None  # after this rank has left
        self._leaving = threading.RLock()  # the watch's thread may leave, too
        # Words for other ranks; a subgroup and a sibling share its connection
        self._store = torch_distributed.own_store() if _store is None else _store
        # By their places in the group; their hosts come when they meet
        self._members = [Member(rank, "", beside_store=False) for rank in self.ranks]
        # The token names the group in torch's store; the count is the era's number
        self._token, self._times_rejoined = "", 0
        self._num_asked = 0  # questions of this rank (`all_say`) in this era
        self._num_started = 0  # its collectives in this era
        self._known_as = self.rank  # in messages to other ranks: a subgroup keeps its parent's
        if not self._alone:
            self._torch_group = self._connected(self._of_host)
            if self._of_device:
                self._device_group = self._connected(self._of_device)
            self._meet()
            self._watch_device()

    def _meet(self) -> None:
        """Agree upon the group's name, and learn where the other ranks are."""
        # Without it this rank hears of no reason; training goes on
        with suppress(StoreError):
            self._store.connect(self._limit)
        own = Member(self.ranks[self.rank], socket.gethostname(), self._store.is_here)
        # Random, by rank 0: a count of groups could meet a key that an earlier run has left
        met = self.exchange(os.urandom(16) + own.packed())
        self._token = met[0][:16].hex()
        self._members = [Member.unpacked(data[16:]) for data in met]

    def all_gather(self, out: Tensor, piece: Tensor) -> Work:
        """`out` (N * k,) becomes the ranks' `piece`s (k,) in rank order. `piece` may be its own
        place in `out`."""
        check_all_gather(self.size, out, piece)
        # Not for autograd: writing in place into a leaf that requires grad would raise
        if out.requires_grad or piece.requires_grad:
            out, piece = out.detach(), piece.detach()
        # Without a message: k is equal on all ranks, so all of them come to this line
        if self._alone or not out.numel():
            return copy_alone(out, piece)
        if self._must_stage(out):
            return through_host(self.all_gather, out, piece)
        return self._exchanges(out).all_gather("all_gather", out, piece)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> Work:
        """`out` (k,) becomes the sum over ranks of this rank's slice of `whole` (N * k,)."""
        check_reduce_scatter(self.size, out, whole)
        check_reducible("sum", whole)
        if out.requires_grad or whole.requires_grad:
            out, whole = out.detach(), whole.detach()
        if self._alone or not whole.numel():
            return copy_alone(out, whole)
        if self._must_stage(whole):
            return through_host(self.reduce_scatter, out, whole)
        if self._backend(whole) != "gloo" and whole.dtype in _KNOWN_TO_BACKENDS:
            return self._launch("reduce_scatter", torch_distributed.REDUCE_SCATTER, out, whole)
        return self._exchanges(whole).reduce_scatter(out, whole)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """`tensor` (k,) becomes the sum or the maximum over ranks, in place; bitwise the same on
        every rank."""
        check_flat("tensor", tensor)
        check_reducible(op, tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self._alone or not tensor.numel():
            return Done()
        if self._must_stage(tensor):
            return through_host(lambda host, _: self.all_reduce(host, op), tensor, tensor)
        small = tensor.is_cpu and self.size * tensor.nbytes <= _SMALL
        if small or tensor.dtype not in _KNOWN_TO_BACKENDS:
            return self._exchanges(tensor).all_reduce(tensor, op)
        if op == "sum":
            return self._launch("all_reduce", "allreduce", [tensor])
        # A maximum: NaN travels as a mask, behind the values
        values, finish = nan_apart(tensor)
        return Then(self._launch("all_reduce", "allreduce", [values], dist.ReduceOp.MAX), finish)

    def all_to_all(
        self, out: Tensor, out_sizes: Sequence[int], source: Tensor, in_sizes: Sequence[int]
    ) -> Work:
        """Rank j gets the j-th run of `source` (in_sizes[j] elements), and `out` takes the runs
        from all ranks j (out_sizes[j] elements)."""
        check_all_to_all(self.size, out, out_sizes, source, in_sizes)
        out, source = out.detach(), source.detach()
        if self._alone:
            return copy_alone(out, source)
        # The sizes are bound here, as `through_host` passes two tensors only
        if self._must_stage(out):

            def collective(host_out: Tensor, host_source: Tensor) -> Work:
                return self.all_to_all(host_out, out_sizes, host_source, in_sizes)

            return through_host(collective, out, source)
        # torch counts runs in elements of the tensors that it is given, and those are bytes
        width = source.element_size()
        out_runs = [num * width for num in out_sizes]
        in_runs = [num * width for num in in_sizes]
        return all_to_all(self._launch, "all_to_all", out, out_runs, source, in_runs)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        """`tensor` (k,) becomes rank `source`'s, in place."""
        check_flat("tensor", tensor)
        check_source(self.size, source)
        tensor = tensor.detach()
        if self._alone or not tensor.numel():
            return Done()
        if self._must_stage(tensor):
            return through_host(lambda host, _: self.broadcast(host, source), tensor, tensor)
        options = dist.BroadcastOptions()
        options.rootRank = source  # a number in the group, not in the world
        return self._launch("broadcast", "broadcast", [as_bytes(tensor)], options)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload` in rank order; sizes may differ. Two all-gathers: the sizes, then
        padded bytes."""
        own_size = torch.tensor([len(payload)], device="cpu")  # (1,) int64
        sizes = self._gather_host("exchange", own_size).tolist()
        longest = max(sizes)
        if not longest:  # all payloads are empty, and every rank sees it
            return [b""] * self.size
        # A bytearray, since torch warns of a buffer that can't be written to
        padded = bytearray(payload.ljust(longest, b"\0"))
        # (N * longest,) uint8
        gathered = self._gather_host("exchange", torch.frombuffer(padded, dtype=torch.uint8))
        payloads = []
        for row, size in zip(gathered.view(self.size, longest), sizes, strict=True):
            # A copy of the row's memory, without numpy
            payloads.append(ctypes.string_at(row.data_ptr(), size))
        return payloads

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._gather_host("barrier", torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def all_say(self, words: str, seconds: float) -> bool:
        """Whether all ranks say the same words within that time. It is no collective: other ranks
        may be in one.

        Ranks ask by the store, and count their questions. Raises `PeerError` when another rank has
        failed meanwhile.
        """
        if self._alone:
            return True
        if self._torch_group is None:
            raise self.why_left()
        self._num_asked += 1
        key = f"functorch_zero/asked/{self._token}/{self._times_rejoined}/{self._num_asked}"
        try:
            # The deadlines are long: a slow store must not look lost while training goes on
            same = torch_distributed.all_say(
                self._store, key, words, self.size, seconds, self._failure_key, self._limit
            )
            failed = not same and torch_distributed.failure_in_store(
                self._store, self._failure_key, self._limit
            )
        except StoreError as error:
            raise self.lost(f"rank {self.rank} could not ask the others: {error}") from None
        if failed:
            raise self.lost("another rank has failed")
        return same

    def fail(self, error: BaseException) -> None:
        """Publish `error` to the other ranks and leave: their collectives raise `PeerError`, in
        about 0.1 s on gloo.

        Does nothing when this rank has failed or lost the group before, and in a process that a
        rank has forked.
        """
        if os.getpid() != self._pid:
            return
        with self._leaving:
            if self._torch_group is None:
                return
            text = failure_text(self._known_as, error)
            self._error = GroupError(
                f"{text}, and so left this group. Remedy: call rejoin() on all ranks"
            )
            # Published before the connections close: the other ranks look for it when theirs break
            self._publish(self._failure_key, text)
            self._leave()

    def rejoin(self) -> None:
        """After a failure that every rank has caught: connect again. Every rank calls this. It does
        nothing where nothing failed.

        Sharded steps call it when they begin, so that a retry is the same call once more.

        Raises:
            PeerError: a rank's process has ended with its error.
            LostPeerError: a rank did not come within the group's time limit, or is gone.
            GroupError: this rank has closed the group.
        """
        with self._leaving:  # the watch's thread may be about to leave
            # Nothing has failed, as far as this rank knows
            if self._torch_group is not None or self._error is None:
                if self._device_group is not None:
                    self._earlier = self._mark()
                return
        # A lost rank won't come back, and to wait for it would take the whole time limit
        if self._closed or isinstance(self._error, LostPeerError):
            raise self.why_left()
        # A rank whose function raised under `launch` won't come either
        if ended := torch_distributed.world_failure(self._store):
            raise PeerError(ended)
        reason = self._error
        spoilt = spoilt_key(self._failure_key)  # of the era that ends here
        self._await_device(spoilt)
        # See Note [eras]
        self._times_rejoined += 1
        self._num_asked = self._num_started = 0
        name = f"functorch_zero/{self._token}/{self._times_rejoined}"
        try:
            # A rank that has waited in vain is not there to connect to
            if gave_up := self._store.read(self._failure_key, seconds=self._limit):
                raise RuntimeError(gave_up)
            self._torch_group = self._named(name, self._of_host)
            if self._of_device:
                self._device_group = self._named(f"{name}/device", self._of_device)
            if self._reduces_apart:
                backends = torch_distributed.accelerated(self._backends)
                self._reducing_group = self._named(f"{name}/reduce", backends)
            # Each rank has said so before it connected, and so all of them raise
            lost = self._store.read(spoilt, seconds=self._limit) if self._of_device else None
        except RuntimeError as error:
            self._error = LostPeerError(
                f"rank {self.rank} waited for all ranks to come back, after this: {reason}. Not "
                f"all did: {error}"
            )
            self._publish(self._failure_key, str(self._error))
            self._leave()
            raise self.why_left() from error.with_traceback(None)
        if lost is not None:
            self._error = LostPeerError(f"{lost}. Remedy: start again from the last checkpoint")
            self._leave()
            raise self.why_left() from reason
        self._watch_device()

    def _await_device(self, spoilt: str) -> None:
        """After a failure: wait until the device is idle, or say under that key that it isn't."""
        if self._letting_go is None:
            return
        let_go, mark = self._letting_go.wait(3 * SECONDS_TO_FINISH), self._mark()
        if not let_go or (mark is not None and not is_reached(mark, SECONDS_TO_FINISH)):
            self._publish(
                spoilt, f"the device of rank {self.rank} still waits for collectives cut off"
            )

    def _publish(self, key: str, text: str) -> None:
        """Leave a text for the other ranks, unless one has been quicker, or the store is lost."""
        torch_distributed.publish_failure(self._store, key, text)

    def settle(self) -> None:
        """Return when the results of all collectives so far are there on this rank, and right; else
        raise. Every rank calls this. Over gloo alone it does nothing, as `wait` has raised.

        Over NCCL the host waits for its device. Nothing else would say that a collective was cut
        off, and what it left behind is garbage.
        """
        if self._alone or not self._of_device:
            return
        self.barrier()  # all ranks have started theirs; else it raises, long before the watch does
        mark = self._mark()
        # The watch's thread leaves when a rank is gone, or the time limit is over
        while self._torch_group is not None and mark is not None and not mark.query():
            time.sleep(0.005)  # seconds, between two looks
        # torch may cut off what a dead rank doesn't end, before the watch hears of it. So all ranks
        # say that they are still there.
        self.barrier()

    def _mark(self) -> Mark | None:
        """A mark behind all that is queued now on the device of this group's collectives; None
        where there was no such collective."""
        return None if self._device is None else mark_on(current_stream(self._device))

    def _watch_device(self) -> None:
        """From now on, hear of failures while the device hangs."""
        if self._device_group is not None:
            self._watch = DeviceWatch(self, self._times_rejoined, self._limit)

    def reduce_apart(self) -> None:
        """Let reduce-scatters run beside other collectives. Every rank calls this; a second call
        does nothing.

        A torch group over NCCL runs its collectives one after the other, and a gather would wait
        for the reduction started before it. So reduce-scatters get a torch group of their own.
        Over gloo alone they stay where they are.
        """
        backends = torch_distributed.accelerated(self._backends)
        if self._alone or self._reduces_apart or not backends:
            return
        # After a failure it is `rejoin` that connects
        if self._torch_group is not None:
            self._reducing_group = self._connected(backends)
        self._reduces_apart = True

    @property
    def era(self) -> int:
        """How often all ranks have come back after a failure; see Note [eras]."""
        return self._times_rejoined

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroup:
        """The group of these of its ranks, in increasing order, this one among them. Each of them
        calls it."""
        check_subgroup(self.rank, self.size, ranks)
        # `part_of` takes numbers of the world
        numbers = [self.ranks[rank] for rank in ranks]
        part = torch_distributed.part_of(self._parent, numbers, self._timeout)
        made = type(self)(part, timeout=self._timeout, _store=self._store)
        made._known_as = self._known_as  # errors name the rank as users know it
        return made

    def sibling(self) -> ProcessGroup:
        """Another group of the same ranks, with connections and a time limit of its own. Every rank
        calls this."""
        return type(self)(self._parent, timeout=self._timeout, _store=self._store)

    def close(self) -> None:
        """Give the connections back; other ranks that still wait for this one get an error.

        It does nothing in a process that a rank has forked.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        with self._leaving:
            if self._torch_group is None:
                # After a failure: ranks that come back would wait for this one
                next_era = f"{self._token}/{self._times_rejoined + 1}"
                text = f"rank {self.rank} has closed this group"
                self._publish(torch_distributed.failure_key(next_era), text)
                return
            if self._device_group is not None:
                self._earlier = self._mark()  # what is queued is still wanted
            self._error = GroupError(f"rank {self.rank} has closed this group")
            self._leave()
            self._store = torch_distributed.torchs_store()  # without its own connection

    def lost(self, text: str, era: int | None = None) -> GroupError:
        """Leave the group after a collective failed on this rank, so that nobody waits for it, and
        return the error.

        Its text is the one that the rank at fault has published, if it had the time, else `text`.

        `era`: that of the failure; None: this one. A later one goes on, see Note [eras].
        """
        with self._leaving:
            era = self._times_rejoined if era is None else era
            # The first failure counts
            if era not in self._errors:
                if self._watch is not None:  # for ranks whose hosts wait for their device
                    self._publish(alarm_key(self._failure_key), text)
                # Before all else, so that the other ranks see it at once
                self._leave_host()
                self._error = self._cause(text)
                self._leave()
            return self.why_left(era)

    def _cause(self, text: str) -> GroupError:
        """The error for a failure that this rank has seen as `text`."""
        seconds = _SECONDS_FOR_ROLL_CALL if self._watch is None else _SECONDS_OVER_NCCL
        failure = self._failure_key
        if not self._token:  # the ranks have not met yet
            ended = torch_distributed.world_failure(self._store)
            return LostPeerError(text) if ended is None else PeerError(ended)
        try:
            started, published = torch_distributed.roll_call(
                self._store,
                f"{failure}/here",
                (self.rank, self.size),
                seconds,
                word=self._num_started,
                failure=failure,
            )
        except StoreError as problem:
            who = without_store(self._members, self.rank, str(problem))
        else:
            if published is not None:
                return PeerError(published)
            who = culprits(self._members, started)
        return LostPeerError(f"{text}. {who}")

    def news(self, waits: bool) -> str | None:
        """The failure of another rank, in words, as far as this rank can know. While its device
        `waits`, a rank that has gone without a word counts, too."""
        host = self._torch_group
        if host is None:
            return None
        # The store may have died with its host: then gloo alone tells
        with suppress(StoreError):
            text = torch_distributed.failure_in_store(self._store, self._failure_key)
            text = text or self._store.read(alarm_key(self._failure_key))
            if text is not None:
                return text
        # Each rank looks at one other, and gives the alarm to all
        neighbour = (self.rank + 1) % self.size
        if waits and self.size > 1 and torch_distributed.is_gone(host, neighbour):
            number = self.ranks[neighbour]
            return f"rank {number} has ended or can't be reached from rank {self.rank}"
        return None

    @property
    def _error(self) -> GroupError | None:
        return self._errors.get(self._times_rejoined)

    @_error.setter
    def _error(self, error: GroupError) -> None:
        self._errors[self._times_rejoined] = error

    def why_left(self, era: int | None = None) -> GroupError:
        """The error for calls of this group after it was left, or for collectives that were under
        way in that era."""
        with self._leaving:  # the watch's thread may be about to say
            reason = self._errors.get(self._times_rejoined if era is None else era)
        if reason is None:
            return GroupError(f"rank {self.rank} has left this group")
        return type(reason)(*reason.args)  # a new one each time, without the traceback of the last

    @property
    def _failure_key(self) -> str:
        """The key in torch's store for this group's next failure; nobody looks for an older one
        there."""
        return torch_distributed.failure_key(f"{self._token}/{self._times_rejoined}")

    def _leave(self) -> None:
        """Give the torch groups back, and with them the connections, on which other ranks may
        wait. The error says already why."""
        self._leave_host()
        groups = [self._device_group, self._reducing_group]
        holder = [group for group in groups if group is not None]
        self._device_group = self._reducing_group = None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if holder:
            # Who is lost won't come back, and for a closed group nobody has to
            in_vain = self._closed or isinstance(self._error, LostPeerError)
            self._letting_go = LettingGo(
                holder,
                self._earlier,
                self._failure_key,
                (self.rank, self.size),
                _SECONDS_IN_VAIN if in_vain else min(SECONDS_TO_FINISH, self._limit),
                self._store,
            )
            self._earlier = None

    def _leave_host(self) -> None:
        """Close the connections between hosts, and let go of all works."""
        if self._torch_group is None:
            return
        # The works' errors wait for `_leaving`
        for ref in list(self._works):  # a copy: a work may be collected meanwhile
            work = ref()
            if work is not None:
                # A torch Work, even a finished one, keeps the connections open
                work.abandon(self._times_rejoined)
        holder = [self._torch_group]  # `destroy` needs the last reference
        if self._reducing_group is not None and not self._of_device:
            holder.append(self._reducing_group)
            self._reducing_group = None
        self._torch_group = None
        torch_distributed.destroy(holder)

    def _named(self, name: str, backends: dict[str, str]) -> dist.ProcessGroup:
        """A torch group of that name, as all ranks make it when they come back."""
        timeout = self._timeout_of(backends)
        return torch_distributed.named_group(self._parent, name, timeout, backends)

    def _timeout_of(self, backends: dict[str, str]) -> timedelta:
        """torch's time limit. On a device torch can only end the process, so the watch's thread is
        to come first."""
        if backends.keys() & self._of_device.keys():
            return 2 * self._timeout + timedelta(minutes=1)
        return self._timeout

    def _connected(self, backends: dict[str, str]) -> dist.ProcessGroup:
        """A torch group of our own, as all ranks make it."""
        try:
            timeout = self._timeout_of(backends)
            return torch_distributed.own_group(self._parent, timeout, backends)
        except RuntimeError as error:
            raise LostPeerError(
                f"rank {self.rank} could not connect to all ranks: {error}"
            ) from None

    def _launch(self, kind: str, method: str, *arguments: Any) -> Work:
        """Start a collective by torch's own method of the group, asynchronous unless told
        otherwise."""
        first = arguments[0]  # a tensor, or a list of one
        tensor = first if isinstance(first, Tensor) else first[0]
        group = self._group_for(method, tensor)
        # The rank has left: it raises at once, and not when the others run into their time limit
        if group is None:
            raise self.why_left()
        self._num_started += 1
        if self._device_type(tensor) in self._of_device:
            self._device = tensor.device
            watch = self._watch  # its thread may leave at any time
            if watch is not None:
                watch.launched(tensor.device)
        try:
            handle = getattr(group, method)(*arguments)
        except RuntimeError as error:
            # Its frames hold the torch group, whose connections must close, and so does this one
            cause = error.with_traceback(None)
            del group
            raise self.lost(f"{kind} could not be started on rank {self.rank}: {cause}") from cause
        # The work holds the tensors, as the backend reads and writes them until it has ended
        work = TorchWork(self, kind, handle, arguments)
        self._works.add(weakref.ref(work, self._works.discard))
        # The watch's thread has left meanwhile, and doesn't know of this work
        if self._torch_group is None:
            work.abandon(self._times_rejoined)
        return work

    def _group_for(self, method: str, tensor: Tensor) -> dist.ProcessGroup | None:
        """The torch group that runs this collective of a tensor; None where this rank has left."""
        group = self._torch_group
        if group is None:
            return None
        if method == torch_distributed.REDUCE_SCATTER and self._reducing_group is not None:
            return self._reducing_group
        return self._device_group if self._device_type(tensor) in self._of_device else group

    def _exchanges(self, tensor: Tensor) -> Exchanges:
        """The ways of a collective that is an exchange of such tensors."""
        are_pair = self.size == 2 and self._backend(tensor) == "gloo"
        # Made anew, since kept it would be in a cycle with this group, and keep its connections
        return (Pair if are_pair else Exchanges)(self.rank, self.size, self._launch)

    def _gather_host(self, kind: str, part: Tensor) -> Tensor:
        """All ranks' `part`s (k,), in rank order, (N * k,), on the CPU like `part`. `kind` names
        the collective in errors."""
        if self._alone:
            return part
        out = torch.empty(self.size * part.numel(), dtype=part.dtype, device="cpu")
        self._exchanges(out).all_gather(kind, out, part).wait()
        return out

    def _device_type(self, tensor: Tensor) -> str:
        """Of the device whose backend moves the tensor."""
        return tensor.device.type

    def _backend(self, tensor: Tensor) -> str:
        """The backend for the tensor's device: "gloo" or "nccl", say."""
        name = self._backends.get(self._device_type(tensor))
        if name is None:
            raise ValueError(
                f"this group can't move tensors on {tensor.device}: its backends are "
                f"{self._backends}. Remedy: initialise torch.distributed with a backend for that "
                "device"
            )
        return name

    def _must_stage(self, tensor: Tensor) -> bool:
        """Whether the tensor has to go through the CPU."""
        return self._backend(tensor) == "gloo" and tensor.device.type != "cpu"
