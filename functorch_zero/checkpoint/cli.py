"""`python -m functorch_zero checkpoint ls|verify|export ROOT`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .catalogue import check_sizes, verify
from .convert import TREES, export_weights
from .errors import CheckpointError
from .files import counts_in


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `checkpoint` with its own commands."""
    parser = commands.add_parser("checkpoint", help="list, verify or export checkpoints")
    kinds = parser.add_subparsers(required=True, metavar="ls|verify|export")
    ls = kinds.add_parser("ls", help="the checkpoints of a folder, oldest first")
    ls.set_defaults(run=_ls)
    check = kinds.add_parser(
        "verify", help="read everything; exit code 1 when something is damaged"
    )
    check.set_defaults(run=_verify)
    out = kinds.add_parser("export", help="write whole weights as Hugging Face's loaders read them")
    out.set_defaults(run=_export)
    for kind in (ls, check, out):
        kind.add_argument("root", type=Path, help="the folder of checkpoints")
    out.add_argument("out", type=Path, help="a new folder")
    for kind in (check, out):
        kind.add_argument(
            "--count", type=int, help="the step; by default all (verify), or the newest (export)"
        )
    out.add_argument("--trees", nargs="+", default=list(TREES), help="paths in the state")
    out.add_argument(
        "--frozen", action=argparse.BooleanOptionalAction, default=True, help="frozen params, too"
    )
    out.add_argument("--max-file-bytes", type=int, default=5 * 10**9, help="of tensors in one file")


def _ls(args: argparse.Namespace) -> int:
    counts = counts_in(args.root)
    for count in counts:
        print(_line(args.root, count))
    if not counts:
        print(f"no checkpoint in {args.root}")
    return 0


def _line(root: Path, count: int) -> str:
    """One checkpoint in a list."""
    try:
        manifest = check_sizes(root, count)
    except (CheckpointError, OSError) as error:
        return f"step {count}  damaged: {error}"
    num_bytes = sum(leaf.nbytes for leaf in manifest.leaves)
    size = f"{num_bytes / 1e6:.1f} MB  {len(manifest.leaves)} leaves"
    if manifest.left_out:
        size += f" ({len(manifest.left_out)} frozen ones left out)"
    ranks = f"{manifest.ranks} rank{'s' if manifest.ranks > 1 else ''}"
    level = "unsharded" if manifest.ranks == 1 else "a level by leaf"
    if manifest.level is not None:
        level = f"level {manifest.level}"
    optimizer = manifest.optimizer or ""
    return f"step {count}  {size}  {ranks}  {level}  {optimizer}".rstrip()


def _verify(args: argparse.Namespace) -> int:
    found = verify(args.root, count=args.count)
    for count, problems in found.items():
        print(f"step {count}  {'intact' if not problems else 'damaged'}")
        for problem in problems:
            print(f"  {problem}")
    if not found:
        print(f"no checkpoint in {args.root}")
    return int(any(found.values()) or not found)


def _export(args: argparse.Namespace) -> int:
    folder = export_weights(
        args.root,
        args.out,
        count=args.count,
        trees=args.trees,
        frozen=args.frozen,
        max_file_bytes=args.max_file_bytes,
    )
    names = sorted(path.name for path in folder.iterdir())
    print(f"wrote {', '.join(names)} to {folder}")
    return 0
