"""What a sharded step will hold and send, before it runs. `functorch_zero.plan` makes a `Plan`."""

from .report import Balance, Collective, Owned, Plan, Sample, zero_bytes

__all__ = ["Balance", "Collective", "Owned", "Plan", "Sample", "zero_bytes"]
