"""Failures of groups whose collectives run on a device, as NCCL's do.

Waiting for such a collective puts the device's streams in order: it returns at once and raises
nothing. When another rank never starts that collective, the device waits for good, and with it a
host that reads a number from the device. So each such group has a thread that looks whether its
device goes on. When it doesn't, and another rank has failed or the time limit is over, the thread
leaves the group.

Note [letting go]: to abort a communicator is to lose all that the device has yet to run on it, and
other ranks' devices wait for this rank's part. A host runs ahead of its device, so that part of it
may belong to earlier calls, whose results must not be lost. So a rank that leaves waits until its
device has finished the calls before the failed one. Then it waits for the other ranks to say the
same, and all abort together. NCCL wants that, too: a rank that frees its memory alone may crash
those of its machine that still read from it. A device that doesn't finish the earlier calls has
lost their results, and then no rank can come back.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import torch_distributed
from .board import Board
from .deadline import await_ends, started
from .store import StoreError

if TYPE_CHECKING:
    from .membership import Membership

_SECONDS_BETWEEN_LOOKS = 0.1  # at the device
# Between questions for news of the other ranks: by torch's store, which all ranks ask
_SECONDS_WHILE_IT_GOES_ON = 1.0
_SECONDS_WHILE_IT_WAITS = 0.5
_SECONDS_AT_EXIT = 5.0  # for threads to come to an end
# At most so long for a device to finish earlier calls, or to become idle
_SECONDS_TO_FINISH = 60.0
_SECONDS_IN_VAIN = 1.0  # for this device and others, before an abort after which nobody comes back


def current_stream(device: torch.device) -> Any:
    """The stream of this device on which this thread's calls run now."""
    # A rank's tensors may lie on another device than its current one
    return torch.accelerator.current_stream(device)


def mark_on(stream: Any) -> torch.Event:
    """A mark at the end of the stream's queue, put there from any thread."""
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def is_reached(mark: torch.Event, seconds: float) -> bool:
    """Whether the device comes to the mark within that time. One that is broken never does."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            if mark.query():
                return True
        except RuntimeError as error:
            if not _is_of_a_capture(error):
                return False
        time.sleep(0.005)
    return False


def _is_of_a_capture(error: RuntimeError) -> bool:
    """Whether CUDA refuses to be asked about a mark for no other reason than that a thread is
    capturing a graph."""
    return "captur" in str(error)  # of "capturing", or "during capture": torch has no type for it


class DeviceWatch:
    """Watches the device of a group, in a thread, until it is stopped or the group is left.

    Args:
        group: the thread doesn't keep it alive.
        era: of the group, to whose end the thread watches.
        limit: seconds that the device may take to come to a mark.
    """

    def __init__(self, group: Membership, era: int, limit: float) -> None:
        self._group = weakref.ref(group)
        self._era, self._limit = era, limit
        self._stream: Any = None  # of the last collective
        self._stopped = threading.Event()
        _STARTED.add(self)
        self.thread = started("watch device", self._watch)

    def launched(self, device: torch.device) -> None:
        """This thread has started a collective on its current stream of this device."""
        self._stream = current_stream(device)

    def stop(self) -> None:
        """Let the thread end at its next look."""
        self._stopped.set()

    def _watch(self) -> None:
        # One at a time, behind all that was queued when it was put there
        mark: torch.Event | None = None
        put = asked = time.monotonic()
        while not self._stopped.wait(_SECONDS_BETWEEN_LOOKS):
            now = time.monotonic()
            try:
                if self._stream is not None and (mark is None or mark.query()):
                    mark, put = mark_on(self._stream), now
            except RuntimeError as error:
                # Of a device that is broken its host will hear, too
                if not _is_of_a_capture(error):
                    return
                mark = None
            waited = now - put if mark is not None else 0.0
            waits = waited > _SECONDS_WHILE_IT_WAITS
            if now - asked < (_SECONDS_WHILE_IT_WAITS if waits else _SECONDS_WHILE_IT_GOES_ON):
                continue
            asked = now
            group = self._group()
            if group is None:
                return
            text = group._news(waits)
            if text is None and waited > self._limit:
                text = (
                    f"the device has waited for longer than the group's time limit of "
                    f"{self._limit:g} s: another rank is stuck, slow or lost"
                )
            if text is not None:
                # The ranks may have left, and come back, since this thread has asked
                group._lost(text, self._era)
                return
            del group  # so that it can go between two looks


_STARTED: weakref.WeakSet[DeviceWatch] = weakref.WeakSet()  # a thread that runs keeps its own


@atexit.register
def _stop_all() -> None:
    """Python ends daemon threads by force. One inside of torch's store would take the process with
    it, by `std::terminate`."""
    watches = list(_STARTED)
    for watch in watches:
        watch.stop()
    await_ends([watch.thread for watch in watches], _SECONDS_AT_EXIT)


class DeviceSide:
    """A group's side on a device: what its collectives have queued there, the thread that watches
    it, and its end. Of a group over gloo alone nothing happens here."""

    def __init__(self) -> None:
        self._device: torch.device | None = None  # of the last collective
        self._earlier: torch.Event | None = None  # behind the calls before the present one
        self._watch: DeviceWatch | None = None  # while connected
        self._letting_go: threading.Thread | None = None  # after this rank has left

    @property
    def is_watched(self) -> bool:
        """Whether a thread hears of failures while this rank's host waits for its device."""
        return self._watch is not None

    def watch(self, group: Membership, era: int, limit: float) -> None:
        """Start the thread; see `DeviceWatch`."""
        self._watch = DeviceWatch(group, era, limit)

    def launched(self, device: torch.device) -> None:
        """This thread has started a collective on its current stream of this device."""
        self._device = device
        watch = self._watch  # its thread may leave at any time
        if watch is not None:
            watch.launched(device)

    def begin_call(self) -> None:
        """Mark all that is queued now as of earlier calls, whose results must not be lost."""
        self._earlier = self.mark()

    def mark(self) -> torch.Event | None:
        """A mark behind all that is queued now; None where there was no collective."""
        return None if self._device is None else mark_on(current_stream(self._device))

    def let_go(
        self,
        groups: list[dist.ProcessGroup],
        board: Board,
        limit: float | None,
    ) -> None:
        """Stop the thread, and let another one end the groups; see Note [letting go].

        Args:
            groups: the last references to the torch groups, which are aborted.
            board: of the era that ends.
            limit: the group's, in seconds; None: nobody comes back.
        """
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if not groups:
            return
        # For this device, and then for the other ranks
        seconds = _SECONDS_IN_VAIN if limit is None else min(_SECONDS_TO_FINISH, limit)
        earlier, self._earlier = self._earlier, None

        def end() -> None:
            if earlier is not None and not is_reached(earlier, seconds):
                board.publish(
                    f"the device of rank {board.rank} could not finish the call before the one "
                    "that failed, whose results are lost",
                    "spoilt",
                )
            # The store may have died with its host
            with suppress(StoreError):
                board.roll_call("finished", seconds, heeds_failure=False)
            torch_distributed.abort(groups)

        self._letting_go = started("let go of device", end)

    def becomes_idle(self) -> bool:
        """After `let_go`: whether the device has nothing of the group left to do, in the end."""
        if self._letting_go is None:
            return True
        self._letting_go.join(3 * _SECONDS_TO_FINISH)
        has_ended, mark = not self._letting_go.is_alive(), self.mark()
        return has_ended and (mark is None or is_reached(mark, _SECONDS_TO_FINISH))
