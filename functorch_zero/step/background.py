"""What runs beside a step on every rank: an `async_save`. The next step raises its failure."""

from __future__ import annotations

from typing import Protocol

from ..errors import PeerError


class BackgroundTask(Protocol):
    """Something that runs beside training."""

    def failed(self) -> bool:
        """Whether it has failed, and nobody was told yet."""
        ...

    def wait(self) -> None:
        """Wait for its end, and raise its error, if it has failed."""
        ...


class Background:
    """A step's background. When its task has failed on any rank, every rank's next step raises
    before it touches the state."""

    task: BackgroundTask | None = None

    def failed(self) -> bool:
        """Whether the task has failed on this rank."""
        return self.task is not None and self.task.failed()

    def wait(self) -> None:
        """Wait for the task, and raise its error, if it has failed."""
        if self.task is not None:
            self.task.wait()

    def raise_if(self, failed: bool) -> None:
        """Raise on every rank if a task has `failed` on any: here its own error, or PeerError."""
        if failed:
            self.wait()
            raise PeerError(
                "a task beside training has failed on another rank, and not on this one"
            )
