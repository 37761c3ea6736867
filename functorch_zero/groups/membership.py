"""A rank among those of a `ProcessGroup`: it is connected, leaves after a failure and says why, and
comes back.

Note [eras]: a group that was left after a failure is made usable again by `rejoin`, over another
torch group. An *era* lasts from one to the next. Its number is how often this rank has come back,
which is the same on all ranks that come back together. A collective of an earlier era raises that
era's error, however late it is waited for. The number is part of the group's names in torch's
store, so that no rank finds the addresses or the failure of an earlier era.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import GroupError, LostPeerError, PeerError
from . import torch_distributed
from .board import Board, end_of_a_rank
from .checks import failure_text
from .connections import Connections
from .device_watch import DeviceSide
from .members import Member, culprits, without_store
from .protocol import Collectives, Work
from .store import Store, StoreError
from .work import TorchWork

# For the ranks that live to say so, after one was lost, and for the one at fault to say why. Over
# gloo they all see it in one moment; over NCCL their threads hear of it.
_SECONDS_FOR_ROLL_CALL, _SECONDS_OVER_NCCL = 1.0, 2.0


class Membership(Collectives):
    """This rank's part in a `ProcessGroup`.

    Args:
        parent: the torch group whose ranks the group has.
        timeout: of a collective.
        store: torch's, for words to other ranks.

    Attributes:
        rank: this rank's number, from 0 to size - 1.
        size: the number of ranks.
        ranks: their numbers in the default process group.
        era: how often all ranks have come back after a failure.
    """

    # A machine with one GPU tests the backend by collectives of one rank, and says False
    _copies_alone = True

    def __init__(self, parent: dist.ProcessGroup, timeout: timedelta, store: Store) -> None:
        self.rank = dist.get_rank(parent)
        self.ranks = dist.get_process_group_ranks(parent)
        self.size = len(self.ranks)
        self._alone = self.size == 1 and self._copies_alone  # collectives are copies
        self._connections = Connections(parent, timeout)
        self._device = DeviceSide()
        self._store = store  # a subgroup and a sibling share its connection
        # By their places in the group; their hosts come when they meet
        self._members = [Member(rank, "", beside_store=False) for rank in self.ranks]
        # The token names the group in torch's store
        self._token, self.era = "", 0
        self._num_asked = 0  # questions of this rank (`all_say`) in this era
        self._num_started = 0  # its collectives in this era
        self._errors: dict[int, GroupError] = {}  # by era, why this rank left
        self._closed = False  # by `close`: there is no way back
        self._leaving = threading.RLock()  # the watch's thread may leave, too
        # A child that a step forks has the group's memory, and no part in it
        self._pid = os.getpid()

    @property
    def _board(self) -> Board:
        """Of this era. Keys:

        - "failed": the first failure; nobody looks for that of an older era there.
        - "alarm": by the first rank that loses another one.
        - "here": the ranks that live, after one was lost, with their numbers of collectives.
        - "finished": those whose devices have done the calls before the failed one.
        - "spoilt": why a rank can't come back with good values.
        - "asked/1" and so on: questions of `all_say`.
        """
        return self._board_of(self.era)

    def _board_of(self, era: int) -> Board:
        name = f"functorch_zero/failed/{self._token}/{era}"
        return Board(self._store, name, self.rank, self.size)

    # Coming

    def _connect(self, by: Callable[[], None]) -> None:
        """Connect to all ranks, which all call this, by a method of the connections."""
        try:
            by()
        except RuntimeError as error:
            raise LostPeerError(
                f"rank {self.rank} could not connect to all ranks: {error}"
            ) from None

    def _introduce_itself(self) -> None:
        """Agree upon the group's name, and learn where the other ranks are."""
        # Without it this rank hears of no reason; training goes on
        with suppress(StoreError):
            self._store.connect(self._connections.limit)
        own = Member(self.ranks[self.rank], socket.gethostname(), self._store.is_here)
        # Random, by rank 0: a count of groups could meet a key that an earlier run has left
        met = self.exchange(os.urandom(16) + json.dumps(own).encode())
        self._token = met[0][:16].hex()
        self._members = [Member(*json.loads(data[16:])) for data in met]
        self._watch_device()

    def _watch_device(self) -> None:
        """From now on, hear of failures while the device hangs."""
        if self._connections.of_device:
            self._device.watch(self, self.era, self._connections.limit)

    # Being there

    def _launch(self, kind: str, method: str, tensor: Tensor, *others: Any) -> Work:
        """Start a collective by torch's own method of a group, asynchronous unless told otherwise.
        `kind` names it in errors."""
        on_device = self._device_type(tensor) in self._connections.of_device
        group = self._connections.group_for(method, on_device=on_device)
        # The rank has left: it raises at once, and not when the others run into their time limit
        if group is None:
            raise self._why_left()
        self._num_started += 1
        if on_device:
            self._device.launched(tensor.device)
        try:
            handle = getattr(group, method)(tensor, *others)
        except RuntimeError as error:
            # Its frames hold the torch group, whose connections must close, and so does this one
            cause = error.with_traceback(None)
            del group
            raise self._lost(f"{kind} could not be started on rank {self.rank}: {cause}") from cause
        # The work holds the tensors, as the backend reads and writes them until it has ended
        work = TorchWork(self, kind, handle, (tensor, *others))
        self._connections.add(work)
        # The watch's thread has left meanwhile, and doesn't know of this work
        if self._connections.host is None:
            work.abandon(self.era)
        return work

    def _device_type(self, tensor: Tensor) -> str:
        """Of the device whose backend moves the tensor."""
        return tensor.device.type

    def all_say(self, words: str, seconds: float) -> bool:
        """Whether all ranks say the same words within that time. It is no collective: other ranks
        may be in one.

        Ranks ask by the store, and count their questions. Raises `PeerError` when another rank has
        failed meanwhile.
        """
        if self._alone:
            return True
        if self._connections.host is None:
            raise self._why_left()
        self._num_asked += 1
        digest = hashlib.sha256(words.encode()).digest()
        # The deadlines are long: a slow store must not look lost while training goes on
        patience = self._connections.limit
        try:
            said, failed = self._board.roll_call(
                f"asked/{self._num_asked}",
                seconds,
                word=int.from_bytes(digest[:8], "big"),
                patience=patience,
            )
            same = len(said) == self.size and len(set(said.values())) == 1
            if not same:
                # Once more, since a roll call ends without a word where its store does
                failed = self._board.failure(patience)
        except StoreError as error:
            raise self._lost(f"rank {self.rank} could not ask the others: {error}") from None
        if failed is not None:
            raise self._lost("another rank has failed")
        return same

    def _await_device(self) -> None:
        """Return when the device has done all that is queued now, or this rank has left."""
        mark = self._device.mark()
        # The watch's thread leaves when a rank is gone, or the time limit is over
        while self._connections.host is not None and mark is not None and not mark.query():
            time.sleep(0.005)  # seconds, between two looks

    def _news(self, waits: bool) -> str | None:
        """The failure of another rank, in words, as far as this rank can know. While its device
        `waits`, a rank that has gone without a word counts, too."""
        host = self._connections.host
        if host is None:
            return None
        # The store may have died with its host: then gloo alone tells
        with suppress(StoreError):
            if text := self._board.failure() or self._board.read("alarm"):
                return text
        # Each rank looks at one other, and gives the alarm to all
        neighbour = (self.rank + 1) % self.size
        if waits and neighbour != self.rank and torch_distributed.is_gone(host, neighbour):
            number = self.ranks[neighbour]
            return f"rank {number} has ended or can't be reached from rank {self.rank}"
        return None

    # Leaving

    def fail(self, error: BaseException) -> None:
        """Publish `error` to the other ranks and leave: their collectives raise `PeerError`, in
        about 0.1 s on gloo.

        Does nothing when this rank has failed or lost the group before, and in a process that a
        rank has forked.
        """
        if os.getpid() != self._pid:
            return
        with self._leaving:
            if self._connections.host is None:
                return
            text = failure_text(self.ranks[self.rank], error)
            # Published before the connections close: the other ranks look for it when theirs break
            self._board.publish(text)
            remedy = "Remedy: call rejoin() on all ranks"
            self._leave(GroupError(f"{text}, and so left this group. {remedy}"))

    def _lost(self, text: str, era: int | None = None) -> GroupError:
        """Leave the group after a collective failed on this rank, so that nobody waits for it, and
        return the error.

        Its text is the one that the rank at fault has published, if it had the time, else `text`.

        `era`: that of the failure; None: this one. A later one goes on, see Note [eras].
        """
        with self._leaving:
            era = self.era if era is None else era
            # The first failure counts
            if era not in self._errors:
                if self._device.is_watched:  # for ranks whose hosts wait for their device
                    self._board.publish(text, "alarm")
                # Before all else, so that the other ranks see it at once
                self._connections.close_host(self.era)
                self._leave(self._cause(text))
            return self._why_left(era)

    def _cause(self, text: str) -> GroupError:
        """The error for a failure that this rank has seen as `text`."""
        if not self._token:  # the ranks have not met yet
            ended = end_of_a_rank(self._store)
            return LostPeerError(text) if ended is None else PeerError(ended)
        try:
            started, published = self._board.roll_call(
                "here",
                _SECONDS_OVER_NCCL if self._device.is_watched else _SECONDS_FOR_ROLL_CALL,
                word=self._num_started,
            )
        except StoreError as problem:
            who = without_store(self._members, self.rank, str(problem))
        else:
            if published is not None:
                return PeerError(published)
            who = culprits(self._members, started)
        return LostPeerError(f"{text}. {who}")

    def _why_left(self, era: int | None = None) -> GroupError:
        """The error for calls of the group after it was left, or for collectives that were under
        way in that era."""
        with self._leaving:  # the watch's thread may be about to say
            reason = self._errors.get(self.era if era is None else era)
        if reason is None:
            return GroupError(f"rank {self.rank} has left this group")
        return type(reason)(*reason.args)  # a new one each time, without the traceback of the last

    def close(self) -> None:
        """Give the connections back; other ranks that still wait for this one get an error.

        It does nothing in a process that a rank has forked.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        with self._leaving:
            text = f"rank {self.rank} has closed this group"
            if self._connections.host is None:
                # After a failure: ranks that come back would wait for this one
                self._board_of(self.era + 1).publish(text)
                return
            self._device.begin_call()  # what is queued is still wanted
            self._leave(GroupError(text))
            self._store = torch_distributed.torchs_store()  # without its own connection

    def _leave(self, error: GroupError) -> None:
        """Give the torch groups back, and with them the connections, on which other ranks may
        wait. The error says why."""
        self._errors[self.era] = error
        self._connections.close_host(self.era)
        # Who is lost won't come back, and for a closed group nobody has to
        in_vain = self._closed or isinstance(error, LostPeerError)
        self._device.let_go(
            self._connections.take_devices(),
            self._board,
            None if in_vain else self._connections.limit,
        )

    # Coming back

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
            reason = self._errors.get(self.era)
            # Nothing has failed, as far as this rank knows
            if self._connections.host is not None or reason is None:
                self._device.begin_call()
                return
        # A lost rank won't come back, and to wait for it would take the whole time limit
        if self._closed or isinstance(reason, LostPeerError):
            raise self._why_left()
        # A rank whose function raised under `launch` won't come either
        if ended := end_of_a_rank(self._store):
            raise PeerError(ended)
        ending = self._board
        if not self._device.becomes_idle():
            text = f"the device of rank {self.rank} still waits for collectives cut off"
            ending.publish(text, "spoilt")
        # See Note [eras]
        self.era += 1
        self._num_asked = self._num_started = 0
        limit, lost = self._connections.limit, None
        try:
            # A rank that has waited in vain is not there to connect to
            if gave_up := self._board.read("failed", limit):
                raise RuntimeError(gave_up)
            self._connections.connect(f"functorch_zero/{self._token}/{self.era}")
            # Each rank has said so before it connected, and so all of them raise
            if self._connections.of_device:
                lost = ending.read("spoilt", limit)
        except RuntimeError as error:
            text = f"rank {self.rank} waited for all ranks to come back, after this: {reason}. Not "
            text += f"all did: {error}"
            self._board.publish(text)
            self._leave(LostPeerError(text))
            raise self._why_left() from error.with_traceback(None)
        if lost is not None:
            self._leave(LostPeerError(f"{lost}. Remedy: start again from the last checkpoint"))
            raise self._why_left() from reason
        self._watch_device()
