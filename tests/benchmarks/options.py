"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Collection


def parser_of(doc: str | None, sizes: Collection[str], default: str) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring, with `--size`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default=default, choices=sizes)
    return parser


def add_some_of(
    parser: argparse.ArgumentParser,
    option: str,
    choices: Collection[str],
    default: Collection[str] | None = None,
) -> None:
    """Add an option that takes some of these names, with commas between. None: by default all."""
    known = ", ".join(choices)

    def some_of(text: str) -> list[str]:
        given = text.split(",")
        unknown = [name for name in given if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"takes some of {known}, got {', '.join(unknown)}")
        return given

    parser.add_argument(
        option,
        type=some_of,
        default=[*(default or choices)],
        help=f"some of {known}, with commas between",
    )
