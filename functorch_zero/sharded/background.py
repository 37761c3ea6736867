"""Tasks that run beside steps on every rank, such as an `async_save`. The next step raises their
failures."""

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


class BackgroundTasks:
    """A step's background tasks. When one has failed on any rank, every rank's next step raises
    before it touches the state."""

    def __init__(self) -> None:
        self._tasks: list[BackgroundTask] = []

    def add(self, task: BackgroundTask) -> None:
        """From the next step on, look at this task, too."""
        self._tasks.append(task)

    def failed(self) -> bool:
        """Whether any task has failed on this rank."""
        return any(task.failed() for task in self._tasks)

    def raise_if(self, failed: bool) -> None:
        """Raise on every rank if a task has `failed` on any: here its own error, or PeerError."""
        if not failed:
            return
        # Raises here, if it is one of this rank's; a task that went well just returns
        for task in self._tasks:
            task.wait()
        raise PeerError("a task beside training has failed on another rank, and not on this one")
