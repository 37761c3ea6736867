"""What a sharded step will hold and send, before it runs. `functorch_zero.plan` makes a `Plan`."""

from .paper import zero_bytes
from .records import Balance, Collective, Owned, Sample
from .report import Plan

__all__ = ["Balance", "Collective", "Owned", "Plan", "Sample", "zero_bytes"]
