"""The baton: which of the ranks that are threads executes, and how they meet in a collective.

One rank at a time holds the baton and executes. It hands it on when it has to wait for the others,
or ends, to the next rank (in circular order) that can go on. So the ranks' shared data need no
lock, and two runs of the same function do the same things in the same order. A wait that nobody can
end is seen at once instead of hanging.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import torch

from .._torch_private import in_forward_ad
from ..errors import GroupError, PeerError
from .checks import ranks_text
from .signature import Signature

Combine = Callable[[list[Any]], Sequence[Any]]  # all ranks' deposits -> each rank's result


class Circle(NamedTuple):
    """Some ranks, in increasing order, that meet among themselves: all ranks, or those of one axis
    of a mesh."""

    ranks: tuple[int, ...]
    number: int = 0  # of those of these ranks; everyone's is the first
    purpose: Literal["collectives", "questions", "rejoin"] = (
        "collectives"  # `all_say` is a question
    )


class Meeting:
    """One collective, on its way to being called by every rank of a circle."""

    def __init__(self, circle: Circle, position: int) -> None:
        self.circle = circle
        self.position = position  # 1 for the first collective of its circle
        self.calls: dict[int, Signature] = {}  # rank -> the call it made
        self.deposits: dict[int, Any] = {}  # rank -> the tensors or bytes it brought
        self.results: Sequence[Any] | None = None  # None until every rank has called

    def agreed(self) -> bool:
        return len(set(self.calls.values())) == 1

    def missing(self) -> set[int]:
        """The ranks that have yet to call."""
        return set(self.circle.ranks) - self.calls.keys()

    def combine(self, combine: Combine) -> None:
        # A question that nobody could wait for has its answer, which some ranks may have
        if self.results is not None:
            return
        # Deposits may require grad, and a collective is no part of any graph
        with torch.no_grad():
            self.results = combine([self.deposits[rank] for rank in self.circle.ranks])
        self.deposits.clear()  # the ranks' tensors are theirs again

    def __str__(self) -> str:
        calls = [f"rank {rank}: {call}" for rank, call in sorted(self.calls.items())]
        return f"{'; '.join(calls)} (collective number {self.position} of each)"


class World:
    """The ranks' shared data. Only the rank with the baton touches it (and `run_ranks`, to stop
    everything)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.everyone = Circle(tuple(range(size)))
        self.all_ended = threading.Event()  # `run_ranks` waits for it in the caller's thread
        # Turns: a rank that waits for the baton waits for its queue's next item
        self.holder = 0  # the rank that executes, or is about to
        # A queue keeps a turn that comes before the rank waits for it: no wake-up is lost
        self._batons: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(size)]
        self._ended: set[int] = set()  # ranks that have returned or raised
        self._stopped = False  # by `run_ranks`: the batons are void
        # Meetings
        self._waiting: dict[int, Meeting] = {}  # by rank
        # By circle and position: those that some rank has yet to come to
        self._open: dict[tuple[Circle, int], Meeting] = {}
        # By rank, and by circle or ranks: meetings that it has come to, circles that it asked for
        self._num_meetings: Counter[tuple[int, Circle]] = Counter()
        self._num_circles: Counter[tuple[int, tuple[int, ...]]] = Counter()
        # Failures, and beginning anew after them
        # Why collectives fail: those that some rank won't call, or all of them
        self.broken: GroupError | None = None
        self._told: set[int] = set()  # of a broken world: who knows, and calls nothing any more
        self._is_given_up = False  # nothing that is under way will be finished
        self.times_rejoined = 0  # the era, as groups call it

    def circle(self, rank: int, ranks: tuple[int, ...]) -> Circle:
        """The next circle of these ranks that this rank hasn't asked for: each of them gets the
        same ones in turn."""
        self._num_circles[rank, ranks] += 1
        return Circle(ranks, self._num_circles[rank, ranks])

    def join(
        self, rank: int, call: Signature, deposit: Any, combine: Combine, circle: Circle
    ) -> Meeting:
        """Bring `deposit` to this rank's next collective; the last rank to come combines them
        all."""
        # The circle's next one that this rank hasn't come to
        self._num_meetings[rank, circle] += 1
        position = self._num_meetings[rank, circle]
        # The first rank to come makes it; the others find it under the same position
        meeting = self._open.setdefault((circle, position), Meeting(circle, position))
        self._raise_if_lost(rank, meeting)
        meeting.calls[rank] = call
        meeting.deposits[rank] = deposit
        # Compared at every arrival, so that the error comes at the first rank that differs
        if not meeting.agreed():
            self.break_with(GroupError(f"the ranks called different collectives: {meeting}"))
            self._raise_if_broken(rank)
        # The last to come combines, in its own thread
        if not meeting.missing():
            del self._open[circle, position]  # all have called: nobody will look for it
            self._combine(meeting, combine)
        return meeting

    def result_of(self, meeting: Meeting, rank: int) -> Any:
        """This rank's result. The other ranks run until it is there."""
        # A rank may be woken for another reason than its result, such as a broken world
        while meeting.results is None:
            self._raise_if_lost(rank, meeting)  # before it waits, so that nobody waits in vain
            self._waiting[rank] = meeting
            try:
                self._let_others_run(rank)
            finally:
                del self._waiting[rank]
        return meeting.results[meeting.circle.ranks.index(rank)]

    def all_say(self, rank: int, words: str, circle: Circle) -> bool:
        """Whether all ranks of the circle say the same words. The others run until they have said
        theirs, or until none can go on."""

        def all_same(said: list[str]) -> list[bool]:
            return [len(set(said)) == 1] * len(said)

        asking = circle._replace(purpose="questions")
        question = self.join(rank, Signature("all_say"), words, all_same, asking)
        return bool(self.result_of(question, rank))

    def fail(self, rank: int, text: str) -> None:
        """This rank has failed, and knows it."""
        self.break_with(PeerError(text))
        self._told.add(rank)

    def break_with(self, error: GroupError) -> None:
        """Make collectives raise this; the first reason stays.

        After a rank's failure they are those that a rank which knows of it won't call: others may
        be in an earlier step, which the ranks of their axis finish, as processes do.
        """
        self.broken = self.broken or error
        if not isinstance(error, PeerError):
            self._is_given_up = True

    def rejoin(self, rank: int) -> None:
        """After a failure that every rank has caught: begin anew, once all know it and come here.

        A rank that has not heard of it yet goes on, and hears of it in its next collective with one
        that has.
        """
        # Nothing failed, or this rank has yet to hear of it
        if self.broken is None or rank not in self._told:
            return
        # Ranks whose calls differ are out of step for good
        if not isinstance(self.broken, PeerError):
            raise self._error()
        coming = self.everyone._replace(purpose="rejoin")
        # It raises if a rank has ended, or ends instead of coming
        meeting = self.join(rank, Signature("rejoin"), None, self._begin_anew, coming)
        self.result_of(meeting, rank)

    def _begin_anew(self, deposits: list[None]) -> list[None]:
        """All ranks know of the failure, and have come."""
        self.broken, self._is_given_up = None, False
        self._open.clear()
        self._num_meetings.clear()
        self._told.clear()
        self.times_rejoined += 1
        return deposits

    def begin(self) -> None:
        self._pass_baton_to(0)

    def take_baton(self, rank: int) -> None:
        """Return when it is this rank's turn; raise when `run_ranks` has stopped everything."""
        self._batons[rank].get()
        if self._stopped:
            self._raise_if_broken(rank)

    def end(self, rank: int) -> None:
        """This rank has returned or raised: the baton goes on for good."""
        self._ended.add(rank)
        if len(self._ended) == self.size:
            self.all_ended.set()
            return
        successor = self._successor(rank)
        # Every rank left waits for one that has ended: broken, they go on and raise
        if successor is None:
            self._break_deadlock()
            successor = self._successor(rank)
        # In a broken world that a rank has left all go on
        assert successor is not None
        self._pass_baton_to(successor)

    def stop(self) -> None:
        """Let every waiting rank go, to raise at once: turns no longer matter."""
        self.break_with(GroupError("run_ranks was stopped before this rank had ended"))
        self._stopped = True
        for baton in self._batons:
            baton.put(None)

    def check_all_called(self) -> None:
        """Refuse ranks that all returned, some without collectives that others called and never
        waited for."""
        if self.broken is not None:
            return  # its own error is raised
        # The earliest first; a question that some rank never asks has its answer
        for meeting in self._open.values():
            if meeting.circle.purpose == "collectives":
                raise GroupError(
                    f"all ranks returned, but {ranks_text(meeting.missing())} never called what "
                    f"others called: {meeting}"
                )

    def where_ranks_are(self) -> str:
        """Per rank: ended, waiting in which collective for whom, running, or ready to."""
        told = [f"{ranks_text(self._ended)} returned"] if self._ended else []
        for rank in sorted(set(range(self.size)) - self._ended):
            meeting = self._waiting.get(rank)
            if meeting is not None and meeting.results is None:
                does = f"waits in {meeting.calls[rank]} for {ranks_text(meeting.missing())}"
            elif rank == self.holder:
                does = "runs"
            else:
                # It has not begun, or its wait is over and its turn has yet to come
                does = "is ready to go on"
            told.append(f"rank {rank} {does}")
        return "; ".join(told)

    def _let_others_run(self, rank: int) -> None:
        """Hand the baton on, and return when it has come back."""
        successor = self._successor(rank)
        # All others wait too, so this rank raises when it returns
        if successor is None:
            self._break_deadlock()
            return
        # A JVP level is one counter of the whole process: another rank would run inside it
        if in_forward_ad():
            raise NotImplementedError(
                "a rank waits inside forward-mode differentiation (torch.func.jvp), which all "
                "threads share, so thread ranks can't take turns here. Remedy: make params whole "
                "first, fz.unshard(params), or use real processes, fz.launch"
            )
        stream = torch.get_rng_state()  # all threads share the generator: each rank has its own
        self._pass_baton_to(successor)
        self.take_baton(rank)
        torch.set_rng_state(stream)

    def _pass_baton_to(self, rank: int) -> None:
        self.holder = rank
        self._batons[rank].put(None)

    def _successor(self, rank: int) -> int | None:
        """The next rank, in circular order, that can go on."""
        # Up to `size`, so that the rank itself comes last
        for step in range(1, self.size + 1):
            candidate = (rank + step) % self.size
            if candidate not in self._ended and self._can_go_on(candidate):
                return candidate
        return None

    def _can_go_on(self, rank: int) -> bool:
        meeting = self._waiting.get(rank)
        # It runs freely, its result is there, or it has an error to raise
        return meeting is None or meeting.results is not None or self._is_lost(meeting)

    def _combine(self, meeting: Meeting, combine: Combine) -> None:
        """Make all ranks' results. An error in it is every rank's, as an error of a backend is."""
        try:
            meeting.combine(combine)
        except Exception as error:
            kind = type(error) if isinstance(error, GroupError) else GroupError
            self.break_with(kind(f"{error} (in {meeting})"))
            raise self._error() from error

    def _break_deadlock(self) -> None:
        # Ranks that ask, while others wait for them elsewhere, have their answer
        meetings = self._open.values()
        asking = [meeting for meeting in meetings if meeting.circle.purpose == "questions"]
        for question in asking:
            question.results = question.results or [False] * len(question.circle.ranks)
        if any(question in self._waiting.values() for question in asking):
            return
        # In a broken world, too: ranks that are out of step wait for each other
        self.break_with(GroupError(f"no rank can go on: {self.where_ranks_are()}"))

    def _is_lost(self, meeting: Meeting) -> bool:
        """Whether some rank won't come to a collective, after a failure that it knows of."""
        if self.broken is None:
            return False
        # Who knows of it comes to begin anew, unless it has ended
        if meeting.circle.purpose == "rejoin":
            return bool(self._ended)
        gone = (self._told | self._ended) - meeting.calls.keys()
        return self._is_given_up or not gone.isdisjoint(meeting.circle.ranks)

    def _raise_if_lost(self, rank: int, meeting: Meeting) -> None:
        if self._is_lost(meeting):
            self._raise_if_broken(rank)

    def _raise_if_broken(self, rank: int) -> None:
        if self.broken is not None:
            self._told.add(rank)  # from here on it may `rejoin`
            raise self._error()

    def _error(self) -> GroupError:
        assert self.broken is not None
        return type(self.broken)(*self.broken.args)  # without the traceback of another rank
