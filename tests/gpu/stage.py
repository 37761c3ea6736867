"""One stage: `python -m tests.gpu.stage NAME FILE [--tiny]`, from the repository's root."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

# The module and the function of each stage
STAGES = {
    "env": ("right", "env"),
    "smoke": ("right", "smoke"),
    "threads": ("right", "threads"),
    "syncs": ("right", "syncs"),
    "collectives": ("collectives", "collectives"),
    "races": ("right", "races"),
    "suite": ("suite", "suite"),
    "overlap": ("speed", "overlap"),
    "bench": ("speed", "bench"),
    "optimizers": ("speed", "optimizers"),
    "saves": ("saves", "saves"),
    "faults": ("ranks", "faults"),
    "two-ranks": ("ranks", "two_ranks"),
    "tables": ("tables", "tables"),
    "places": ("offload", "places"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=STAGES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    from tests.gpu.report import CUDA, FAIL, Report

    report = Report(args.file, tiny=args.tiny)
    if not CUDA and not args.tiny:
        report.needs("all of it", "CUDA, or --tiny for a dry run on the CPU")
        return
    module, function = STAGES[args.name]
    getattr(importlib.import_module(f"tests.gpu.{module}"), function)(report)
    if report.verdict == FAIL:
        sys.exit(1)


if __name__ == "__main__":
    main()
