"""`python -m functorch_zero COMMAND …`: each command is in a module of its own, which adds its
parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .checkpoint import CheckpointError
from .checkpoint import cli as checkpoint
from .groups import doctor

COMMANDS = (checkpoint, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code: 2 for an error that is the user's or the
    disk's."""
    parser = argparse.ArgumentParser(prog="python -m functorch_zero")
    commands = parser.add_subparsers(required=True, metavar="command")
    # Each command says which function runs it, by `set_defaults(run=...)`
    for command in COMMANDS:
        command.add_parser(commands)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except (CheckpointError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
