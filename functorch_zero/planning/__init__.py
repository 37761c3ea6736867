"""The memory and traffic of a sharded step, known before it runs: `functorch_zero.plan`."""

from .report import Balance, Collective, Comparison, Owned, Plan, Sample, zero_bytes

__all__ = ["Balance", "Collective", "Comparison", "Owned", "Plan", "Sample", "zero_bytes"]
