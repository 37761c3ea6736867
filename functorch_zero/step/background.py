"""What runs beside a step on every rank: an `async_save`. The next step raises its failure."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import PeerError


class BackgroundTask(Protocol):
    """Something that runs beside training."""

    def has_failed_untold(self) -> bool:
        """Whether it has failed, and nobody was told yet."""
        ...

    def wait(self) -> None:
        """Wait for its end, and raise its error, if nobody was told."""
        ...


class Background:
    """A step's background. When its task has failed on any rank, every rank's next step raises
    before it touches the state."""

    task: BackgroundTask | None = None
    group: Any = None  # of ranks, for its collectives

    def __reduce__(self) -> Any:
        # A copy of the step has another background
        return Background, ()

    def failed(self) -> bool:
        """Whether the task has failed on this rank, and nobody was told."""
        return self.task is not None and self.task.has_failed_untold()

    def wait(self) -> None:
        """Wait for the task, and raise its error, if nobody was told."""
        task, self.task = self.task, None
        if task is not None:
            task.wait()

    def raise_if(self, failed: bool) -> None:
        """Raise on every rank if a task has `failed` on any: here its own error, or PeerError."""
        if failed:
            self.wait()
            raise PeerError(
                "a task beside training has failed on another rank, or this one was told before"
            )
