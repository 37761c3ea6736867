"""The checks that need a GPU, in one command: `python tests/gpu/session.py --part A`, then B, C.

A: is it right? B: how fast is it? C: saves, failures, two ranks. Each part takes under 10 minutes.
Stages run one after the other, each in a process of its own with a limit; one that fails or is late
stops nothing. The folder that $OUT names (by default gpu-session) gets files by part: session-A.md,
the table that is printed; session-A.json, every line of every stage; and session-A.log.

    --only NAME ...   these stages, of the parts
    --seconds N       the limit of each, instead of its own; a late one keeps its lines so far
    --tiny            tiny models, for a dry run, also on a machine without a GPU

Exit status: 0 where all stages pass, 1 where one fails or is late, 2 where none fails but some need
CUDA or another thing that the machine lacks.

Nothing here needs pytest, so the project's settings of it don't matter: stages run with torch 2.11
and later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
FAILED = ("FAIL", "late", "crashed")


@dataclass(frozen=True)
class Stage:
    """A stage, in its own process.

    Attributes:
        part: "A", "B" or "C".
        name: of the stage in `stage.py`.
        seconds: its limit.
        env: of its process, besides this one's.
    """

    part: str
    name: str
    seconds: int
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, file: Path, *, tiny: bool) -> list[str]:
        module = [sys.executable, "-m", "tests.gpu.stage", self.name, str(file)]
        return [*module, "--tiny"] if tiny else module


# cuBLAS repeats its sums only with a workspace of its own
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# Two ranks of one GPU, which NCCL allows from 2.30 on
SHARE_A_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
}

STAGES = [
    Stage("A", "env", 40),
    Stage("A", "smoke", 120, REPEATABLE),
    Stage("A", "threads", 60),
    Stage("A", "syncs", 60),
    Stage("A", "collectives", 90),
    Stage("A", "races", 60),
    Stage("A", "suite", 150, REPEATABLE),
    Stage("B", "overlap", 240),
    Stage("B", "bench", 230),
    Stage("B", "optimizers", 110),
    Stage("C", "saves", 90),
    Stage("C", "faults", 90),
    Stage("C", "two-ranks", 180, SHARE_A_GPU),
    Stage("C", "tables", 90, SHARE_A_GPU),
    Stage("C", "places", 60, REPEATABLE),
]


@dataclass(frozen=True)
class Ended:
    """The end of a stage.

    Attributes:
        verdict: its report's, or "late", or "crashed".
        lines: of its report, as far as it came.
    """

    name: str
    verdict: str
    seconds: float
    lines: Sequence[Mapping[str, Any]]

    @property
    def remark(self) -> str:
        """The lines that need attention, in short."""
        counts = [line["verdict"] for line in self.lines]
        text = f"{counts.count('pass')} pass, {counts.count('measured')} measured"
        other = [line for line in self.lines if line["verdict"] not in ("pass", "measured")]
        return "; ".join([text, *(f"{line['verdict']}: {line['name']}" for line in other)])


def run_stage(name: str, command: Sequence[str], seconds: float, log: TextIO, **env: str) -> Ended:
    """Run a stage's command, whose report is in the file that the command names by "FILE"."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        words = [str(file) if word == "FILE" else word for word in command]
        print(f"\n==== {name}: {' '.join(words)}", file=log, flush=True)
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | env,
            start_new_session=True,  # so that its ranks can be ended with it
        )
        try:
            crashed = process.wait(seconds) not in (0, 1)
            how = "crashed" if crashed else ""
        except subprocess.TimeoutExpired:
            how = "late"
        finally:
            end_all_of(process)
        report = json.loads(file.read_text()) if file.exists() else {}
    # 1 is also the status of an exception: then the lines so far say nothing about the rest
    if not how and process.returncode == 1 and report.get("verdict") != "FAIL":
        how = "crashed"
    verdict = how or report.get("verdict", "crashed")
    return Ended(name, verdict, time.monotonic() - began, report.get("lines", []))


def end_all_of(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a stage: itself, and the ranks that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(ended: Sequence[Ended]) -> str:
    rows = ["| stage | verdict | s | lines |", "|---|---|---:|---|"]
    for stage in ended:
        rows.append(f"| {stage.name} | {stage.verdict} | {stage.seconds:.0f} | {stage.remark} |")
    return "\n".join(rows) + "\n"


def write(out: Path, name: str, ended: Sequence[Ended]) -> None:
    """After each stage, since the session itself may be ended."""
    (out / f"{name}.md").write_text(table(ended))
    found = {
        stage.name: {"verdict": stage.verdict, "seconds": stage.seconds, "lines": stage.lines}
        for stage in ended
    }
    (out / f"{name}.json").write_text(json.dumps(found, indent=1))


def status_of(ended: Sequence[Ended]) -> int:
    if any(stage.verdict in FAILED for stage in ended):
        return 1
    return 2 if any(stage.verdict == "needs CUDA" for stage in ended) else 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="ABC")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(words)
    if not re.fullmatch("[ABC]+", args.part):
        parser.error(f"--part is of the letters A, B and C, got {args.part!r}")
    chosen = [stage for stage in STAGES if stage.part in args.part]
    if args.only:
        chosen = [stage for stage in chosen if stage.name in args.only]
    if not chosen:
        parser.error(f"part {args.part} has no stage of {', '.join(args.only)}")
    out = Path(os.environ.get("OUT", "gpu-session"))
    out.mkdir(parents=True, exist_ok=True)
    name = f"session-{args.part}"  # so that a part keeps the files of the others
    ended: list[Ended] = []
    with (out / f"{name}.log").open("w") as log:
        for stage in chosen:
            command = stage.command(Path("FILE"), tiny=args.tiny)
            limit = args.seconds or stage.seconds
            ended.append(run_stage(stage.name, command, limit, log, **stage.env))
            print(table(ended[-1:]).splitlines()[-1], flush=True)
            write(out, name, ended)
    print("\n" + table(ended))
    return status_of(ended)


if __name__ == "__main__":
    sys.exit(main())
