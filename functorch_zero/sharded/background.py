"""What runs beside a step on every rank, an `async_save` say, and whose failure the next step
raises."""

from __future__ import annotations

from typing import Protocol

from ..errors import PeerError


class BackgroundTask(Protocol):
    """Something that runs beside training."""

    def failed(self) -> bool:
        """Whether it has failed, and nobody was told."""
        ...

    def wait(self) -> None:
        """Wait for its end, and raise what it raised."""
        ...


class BackgroundTasks:
    """A step's background tasks. When one has failed on any rank, every rank's next step raises
    before it touches the state."""

    def __init__(self) -> None:
        self._tasks: list[BackgroundTask] = []

    def add(self, task: BackgroundTask) -> None:
        """From now on, look at this one, too."""
        self._tasks.append(task)

    def failed(self) -> bool:
        """Whether any has, on this rank."""
        return any(task.failed() for task in self._tasks)

    def raise_if(self, failed: bool) -> None:
        """When one has `failed` on any rank: raise what it raised here."""
        if failed:
            for task in self._tasks:
                task.wait()
            raise PeerError(
                "what runs beside training has failed on another rank, and not on this one"
            )
