"""`fz.host`: a step's metrics for the host, without a wait for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..devices import number_on
from .loss import check_metrics


class _Number(NamedTuple):
    """A number on its way from a device."""

    together: Tensor  # (n,) float64, on the CPU, of all from there; right once the event has come
    place: int  # among them
    came: Any | None  # a `torch.Event`; None: they are there already


class HostMetrics(Mapping[str, float]):
    """Metrics as Python numbers, by name: a mapping that waits when it is read, for its own numbers
    alone. Made by `host`."""

    def __init__(self, numbers: Mapping[str, _Number]):
        self._numbers = numbers

    @property
    def is_here(self) -> bool:
        """Whether all numbers have come, so that to read them takes no wait."""
        return all(x.came is None or x.came.query() for x in self._numbers.values())

    def __getitem__(self, name: str) -> float:
        together, place, came = self._numbers[name]
        if came is not None:
            came.synchronize()
        return float(together[place])

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return f"HostMetrics({dict(self)})" if self.is_here else f"HostMetrics({[*self]} to come)"


def host(metrics: Mapping[str, Tensor | float]) -> HostMetrics:
    """Begin to copy a step's metrics to the host, and return them by name.

    A step's metrics are 0-d tensors on the params' device, and to read one there waits for all that
    the device has been given. This copies them behind the step that made them. Read a step later,
    they have come, and the host has queued the next step meanwhile. One copy per device; no
    collective.

    Args:
        metrics: 0-d tensors or numbers, by name. Numbers come as float64.

    Raises:
        StructureError: a metric is no real number.

    >>> metrics = host({"loss": torch.tensor(0.5), "learning_rate": 0.1})
    >>> metrics["loss"], dict(metrics)
    (0.5, {'loss': 0.5, 'learning_rate': 0.1})
    """
    check_metrics(metrics)
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, metric in metrics.items():
        device = metric.device if isinstance(metric, Tensor) else torch.device("cpu")
        by_device.setdefault(device, {})[name] = number_on(device, metric)
    found: dict[str, _Number] = {}
    for device, numbers in by_device.items():
        together = torch.stack([*numbers.values()])  # (n,): one copy for all
        # To pinned memory, and behind the kernels that make the numbers
        arriving = together.to("cpu", non_blocking=True)
        came = None if device.type == "cpu" else torch.Event(device)
        if came is not None:
            came.record()
        found |= {name: _Number(arriving, n, came) for n, name in enumerate(numbers)}
    return HostMetrics(found)
