"""What a sharded step will hold and send, before it runs: `plan`, without ranks and without a value."""

from .api import plan
from .paper import zero_bytes
from .records import Balance, Collective, Sample
from .report import Plan

__all__ = ["Balance", "Collective", "Plan", "Sample", "plan", "zero_bytes"]
