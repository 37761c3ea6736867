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

import torch
import torch.distributed as dist

from ..errors import GroupError, LostPeerError, PeerError
from . import torch_distributed
from .board import Board, end_of_a_rank
from .checks import failure_text
from .connections import Connections
from .device_watch import DeviceSide
from .members import Member, culprits, without_store
from .protocol import Work
from .store import Store, StoreError
from .work import TorchWork

# For the ranks that live to say so, after one was lost, and for the one at fault to say why. Over
# gloo they all see it in one moment; over NCCL their threads hear of it.
_SECONDS_FOR_ROLL_CALL, _SECONDS_OVER_NCCL = 1.0, 2.0


class Membership:
    """This rank's part in a group.

    Args:
        parent: the torch group whose ranks the group has.
        timeout: of a collective.
        store: torch's, for words to other ranks.

    Attributes:
        rank: this rank's number among the group's.
        ranks: the group's, by their numbers in the default process group.
        connections: its torch groups.
        device: what its collectives do on a device.
        era: how often all have come back after a failure.
        known_as: this rank's number in messages to others.
    """

    def __init__(self, parent: dist.ProcessGroup, timeout: timedelta, store: Store) -> None:
        self.rank = dist.get_rank(parent)
        self.ranks = dist.get_process_group_ranks(parent)
        self.known_as = self.rank  # a subgroup keeps its parent's
        self.connections = Connections(parent, timeout)
        self.device = DeviceSide()
        self.store = store  # a subgroup and a sibling share its connection
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
        return Board(self.store, name, self.rank, len(self.ranks))

    # Coming

    def connect(self, by: Callable[[], None]) -> None:
        """Connect to all ranks, which all call this, by a method of the connections."""
        try:
            by()
        except RuntimeError as error:
            raise LostPeerError(
                f"rank {self.rank} could not connect to all ranks: {error}"
            ) from None

    def meet(self, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Agree upon the group's name, and learn where the other ranks are."""
        # Without it this rank hears of no reason; training goes on
        with suppress(StoreError):
            self.store.connect(self.connections.limit)
        own = Member(self.ranks[self.rank], socket.gethostname(), self.store.is_here)
        # Random, by rank 0: a count of groups could meet a key that an earlier run has left
        met = exchange(os.urandom(16) + json.dumps(own).encode())
        self._token = met[0][:16].hex()
        self._members = [Member(*json.loads(data[16:])) for data in met]
        self._watch_device()

    def _watch_device(self) -> None:
        """From now on, hear of failures while the device hangs."""
        if self.connections.of_device:
            self.device.watch(self, self.era, self.connections.limit)

    # Being there

    def start(self, kind: str, method: str, on: torch.device | None, *arguments: Any) -> Work:
        """Start a collective by torch's own method of a group, asynchronous unless told otherwise.

        Args:
            kind: its name in errors.
            on: the device whose own backend runs it; None: the hosts.
        """
        group = self.connections.group_for(method, on_device=on is not None)
        # The rank has left: it raises at once, and not when the others run into their time limit
        if group is None:
            raise self.why_left()
        self._num_started += 1
        if on is not None:
            self.device.launched(on)
        try:
            handle = getattr(group, method)(*arguments)
        except RuntimeError as error:
            # Its frames hold the torch group, whose connections must close, and so does this one
            cause = error.with_traceback(None)
            del group
            raise self.lost(f"{kind} could not be started on rank {self.rank}: {cause}") from cause
        # The work holds the tensors, as the backend reads and writes them until it has ended
        work = TorchWork(self, kind, handle, arguments)
        self.connections.add(work)
        # The watch's thread has left meanwhile, and doesn't know of this work
        if self.connections.host is None:
            work.abandon(self.era)
        return work

    def all_say(self, words: str, seconds: float) -> bool:
        """As the group's."""
        if self.connections.host is None:
            raise self.why_left()
        self._num_asked += 1
        digest = hashlib.sha256(words.encode()).digest()
        # The deadlines are long: a slow store must not look lost while training goes on
        patience = self.connections.limit
        try:
            said, failed = self._board.roll_call(
                f"asked/{self._num_asked}",
                seconds,
                word=int.from_bytes(digest[:8], "big"),
                patience=patience,
            )
            same = len(said) == len(self.ranks) and len(set(said.values())) == 1
            if not same:
                # Once more, since a roll call ends without a word where its store does
                failed = self._board.failure(patience)
        except StoreError as error:
            raise self.lost(f"rank {self.rank} could not ask the others: {error}") from None
        if failed is not None:
            raise self.lost("another rank has failed")
        return same

    def await_device(self) -> None:
        """Return when the device has done all that is queued now, or this rank has left."""
        mark = self.device.mark()
        # The watch's thread leaves when a rank is gone, or the time limit is over
        while self.connections.host is not None and mark is not None and not mark.query():
            time.sleep(0.005)  # seconds, between two looks

    def news(self, waits: bool) -> str | None:
        """The failure of another rank, in words, as far as this rank can know. While its device
        `waits`, a rank that has gone without a word counts, too."""
        host = self.connections.host
        if host is None:
            return None
        # The store may have died with its host: then gloo alone tells
        with suppress(StoreError):
            if text := self._board.failure() or self._board.read("alarm"):
                return text
        # Each rank looks at one other, and gives the alarm to all
        neighbour = (self.rank + 1) % len(self.ranks)
        if waits and neighbour != self.rank and torch_distributed.is_gone(host, neighbour):
            number = self.ranks[neighbour]
            return f"rank {number} has ended or can't be reached from rank {self.rank}"
        return None

    # Leaving

    def fail(self, error: BaseException) -> None:
        """As the group's."""
        if os.getpid() != self._pid:
            return
        with self._leaving:
            if self.connections.host is None:
                return
            text = failure_text(self.known_as, error)
            # Published before the connections close: the other ranks look for it when theirs break
            self._board.publish(text)
            remedy = "Remedy: call rejoin() on all ranks"
            self._leave(GroupError(f"{text}, and so left this group. {remedy}"))

    def lost(self, text: str, era: int | None = None) -> GroupError:
        """Leave the group after a collective failed on this rank, so that nobody waits for it, and
        return the error.

        Its text is the one that the rank at fault has published, if it had the time, else `text`.

        `era`: that of the failure; None: this one. A later one goes on, see Note [eras].
        """
        with self._leaving:
            era = self.era if era is None else era
            # The first failure counts
            if era not in self._errors:
                if self.device.is_watched:  # for ranks whose hosts wait for their device
                    self._board.publish(text, "alarm")
                # Before all else, so that the other ranks see it at once
                self.connections.close_host(self.era)
                self._leave(self._cause(text))
            return self.why_left(era)

    def _cause(self, text: str) -> GroupError:
        """The error for a failure that this rank has seen as `text`."""
        if not self._token:  # the ranks have not met yet
            ended = end_of_a_rank(self.store)
            return LostPeerError(text) if ended is None else PeerError(ended)
        try:
            started, published = self._board.roll_call(
                "here",
                _SECONDS_OVER_NCCL if self.device.is_watched else _SECONDS_FOR_ROLL_CALL,
                word=self._num_started,
            )
        except StoreError as problem:
            who = without_store(self._members, self.rank, str(problem))
        else:
            if published is not None:
                return PeerError(published)
            who = culprits(self._members, started)
        return LostPeerError(f"{text}. {who}")

    def why_left(self, era: int | None = None) -> GroupError:
        """The error for calls of the group after it was left, or for collectives that were under
        way in that era."""
        with self._leaving:  # the watch's thread may be about to say
            reason = self._errors.get(self.era if era is None else era)
        if reason is None:
            return GroupError(f"rank {self.rank} has left this group")
        return type(reason)(*reason.args)  # a new one each time, without the traceback of the last

    def close(self) -> None:
        """As the group's."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        with self._leaving:
            text = f"rank {self.rank} has closed this group"
            if self.connections.host is None:
                # After a failure: ranks that come back would wait for this one
                self._board_of(self.era + 1).publish(text)
                return
            self.device.begin_call()  # what is queued is still wanted
            self._leave(GroupError(text))
            self.store = torch_distributed.torchs_store()  # without its own connection

    def _leave(self, error: GroupError) -> None:
        """Give the torch groups back, and with them the connections, on which other ranks may
        wait. The error says why."""
        self._errors[self.era] = error
        self.connections.close_host(self.era)
        # Who is lost won't come back, and for a closed group nobody has to
        in_vain = self._closed or isinstance(error, LostPeerError)
        self.device.let_go(
            self.connections.take_devices(),
            self._board,
            None if in_vain else self.connections.limit,
        )

    # Coming back

    def rejoin(self) -> None:
        """As the group's."""
        with self._leaving:  # the watch's thread may be about to leave
            reason = self._errors.get(self.era)
            # Nothing has failed, as far as this rank knows
            if self.connections.host is not None or reason is None:
                self.device.begin_call()
                return
        # A lost rank won't come back, and to wait for it would take the whole time limit
        if self._closed or isinstance(reason, LostPeerError):
            raise self.why_left()
        # A rank whose function raised under `launch` won't come either
        if ended := end_of_a_rank(self.store):
            raise PeerError(ended)
        ending = self._board
        if not self.device.becomes_idle():
            text = f"the device of rank {self.rank} still waits for collectives cut off"
            ending.publish(text, "spoilt")
        # See Note [eras]
        self.era += 1
        self._num_asked = self._num_started = 0
        limit, lost = self.connections.limit, None
        try:
            # A rank that has waited in vain is not there to connect to
            if gave_up := self._board.read("failed", limit):
                raise RuntimeError(gave_up)
            self.connections.connect(f"functorch_zero/{self._token}/{self.era}")
            # Each rank has said so before it connected, and so all of them raise
            if self.connections.of_device:
                lost = ending.read("spoilt", limit)
        except RuntimeError as error:
            text = f"rank {self.rank} waited for all ranks to come back, after this: {reason}. Not "
            text += f"all did: {error}"
            self._board.publish(text)
            self._leave(LostPeerError(text))
            raise self.why_left() from error.with_traceback(None)
        if lost is not None:
            self._leave(LostPeerError(f"{lost}. Remedy: start again from the last checkpoint"))
            raise self.why_left() from reason
        self._watch_device()
