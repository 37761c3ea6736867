"""The session for a GPU, on a CPU: each stage runs with tiny models, and says what needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import session, speed
from tests.gpu.report import Report
from tests.gpu.session import Ended, Stage, run_stage, status_of, table
from tests.gpu.stage import STAGES
from tests.scripts import ROOT, run_in_fork
from tests.tiers import THOROUGH, tiers

SCRIPT = ROOT / "tests" / "gpu" / "stage.py"
CHEAP = ["env", "threads"]


def report_of(name: str, folder: Path) -> dict[str, Any]:
    """The report of a stage, which must have ended well."""
    file = folder / "report.json"
    run_in_fork(SCRIPT, name, str(file), "--tiny", folder=folder).check()
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.parametrize("name", tiers(CHEAP, [name for name in STAGES if name not in CHEAP]))
def test_a_stage_runs_on_a_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = report_of(name, tmp_path)
    verdicts = {line["verdict"] for line in report["lines"]}
    assert verdicts <= {"pass", "measured", "needs CUDA"}, report
    # Each has something that a CPU can't tell, or that it can
    assert report["verdict"] == ("pass" if name == "smoke" else "needs CUDA")


def test_a_report_has_the_verdict_of_its_worst_line(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = Report(file, tiny=True)
    report.measured("a number", 1)
    assert report.verdict == "measured"
    report.check("right", 1, True, "1")
    assert report.verdict == "pass"
    report.needs("a GPU's")
    assert report.verdict == "needs CUDA"
    with report.failing("raises"):
        raise ValueError("bad")
    report.check("right again", 1, True, "1")
    assert report.verdict == json.loads(file.read_text())["verdict"] == "FAIL"
    assert report.lines[-2]["found"] == "ValueError: bad"


def test_only_a_gpu_passes_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(tmp_path / "report.json", tiny=True)
    for has_cuda in (False, True):
        monkeypatch.setattr("tests.gpu.report.CUDA", has_cuda)
        for ok in (False, True):
            report.check_on_cuda("a time", 1, ok, "1")
            report.check_result("a result", 1, ok, "1")
    verdicts = [line["verdict"] for line in report.lines]
    assert verdicts[0::2] == ["needs CUDA", "needs CUDA", "FAIL", "pass"]
    assert verdicts[1::2] == ["FAIL", "needs CUDA", "FAIL", "pass"]


def test_a_run_that_failed_is_no_baseline(tmp_path: Path) -> None:
    """The wire's time is beside the run without a wire, or it is an error that names what lacks."""
    report = Report(tmp_path / "report.json", tiny=True)
    found = {speed.BEST: {"step ms": 3.0}, "fully_shard": {"step ms": 5.0}}
    message = "no numbers of fully_shard, .* there are those of level 3, time$"
    with pytest.raises(LookupError, match=message):
        speed.added_by_wire(report, "1 GB/s", found, {speed.BEST: {"step ms": 2.0}})
    with pytest.raises(LookupError, match="there are those of none"):
        speed.added_by_wire(report, "1 GB/s", found, {})
    assert not report.lines
    speed.added_by_wire(report, "1 GB/s", found, {kind: {"step ms": 2.0} for kind in found})
    assert report.lines[0]["found"] == 1.0 and "3.00" in report.lines[0]["wanted"]


def test_the_session_has_every_stage() -> None:
    assert [stage.name for stage in session.STAGES] == [*STAGES]
    for part in "ABC":  # a machine may be lent for 10 minutes at a time
        assert sum(stage.seconds for stage in session.STAGES if stage.part == part) <= 590


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with (tmp_path / "log").open("w+") as file:
        yield file


def writing(verdict: str, then: str = "") -> list[str]:
    """A stage's command, which reports a verdict."""
    report = {"verdict": verdict, "lines": [{"name": "a line", "verdict": verdict}]}
    code = f"import sys; open(sys.argv[1], 'w').write({json.dumps(json.dumps(report))}); {then}"
    return [sys.executable, "-S", "-c", code, "FILE"]


@pytest.mark.parametrize(
    ("verdict", "then", "expected"),
    [
        ("pass", "", "pass"),
        ("needs CUDA", "", "needs CUDA"),
        ("FAIL", "sys.exit(1)", "FAIL"),
        ("pass", "1 / 0", "crashed"),
        ("pass", "import os; os.abort()", "crashed"),
        ("pass", "import time; time.sleep(60)", "late"),
    ],
)
def test_how_a_stage_ends(verdict: str, then: str, expected: str, log: Any) -> None:
    ended = run_stage("x", writing(verdict, then), 3.0 if expected == "late" else 30.0, log)
    assert ended.verdict == expected and ended.seconds < 30
    assert ended.lines  # as far as it came


def test_a_stage_without_a_report_has_crashed(log: Any) -> None:
    assert run_stage("x", [sys.executable, "-S", "-c", ""], 30.0, log).verdict == "crashed"


def test_what_a_late_stage_started_is_ended_with_it(log: Any, tmp_path: Path) -> None:
    """Its ranks would hold the GPU."""
    file = tmp_path / "pid"
    child = f"import subprocess, time; p = subprocess.Popen(['sleep', '60']); \
open({str(file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    assert run_stage("x", [sys.executable, "-S", "-c", child], 3.0, log).verdict == "late"
    assert has_ended(int(file.read_text()), within=30)


def has_ended(pid: int, within: float) -> bool:
    """Whether a process goes within so many seconds: a signal takes its time on a busy machine."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state.rpartition(")")[2].split()[0] == "Z":  # nobody has waited for it yet
            return True
        time.sleep(0.01)
    return False


def test_a_stage_has_its_environment(log: Any) -> None:
    command = writing("pass", "import os; sys.exit(os.environ.get('X') != '1')")
    assert run_stage("x", command, 30.0, log).verdict == "crashed"
    assert run_stage("x", command, 30.0, log, X="1").verdict == "pass"


def test_the_table_says_what_needs_attention() -> None:
    lines = [{"name": "one", "verdict": "pass"}, {"name": "two", "verdict": "FAIL"}]
    text = table([Ended("smoke", "FAIL", 1.6, lines)])
    assert "| smoke | FAIL | 2 | 1 pass, 0 measured; FAIL: two |" in text


def test_the_exit_status() -> None:
    def status(*verdicts: str) -> int:
        return status_of([Ended("x", verdict, 0.0, []) for verdict in verdicts])

    assert status("pass", "measured") == 0
    assert status("pass", "needs CUDA") == 2
    assert status("needs CUDA", "late") == status("FAIL") == status("crashed") == 1


def test_the_command() -> None:
    stage = Stage("A", "env", 1)
    assert stage.command(Path("f"), tiny=True)[1:] == [
        "-m",
        "tests.gpu.stage",
        "env",
        "f",
        "--tiny",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--part a", "letters A, B and C, got 'a'"),
        ("--part AD", "letters A, B and C, got 'AD'"),
        ("--part A --only bench", "part A has no stage of bench"),
        ("--only", "expected at least one argument"),
    ],
)
def test_a_session_without_stages_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        session.main(words.split())
    assert message in capsys.readouterr().err


@THOROUGH
def test_the_session(tmp_path: Path) -> None:
    """As it is started on a GPU, by its path."""
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "session.py")]
    environment = {"OUT": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    made = subprocess.run(
        [*command, "--part", "A", "--only", "env", "--tiny"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert made.returncode == 2, made.stdout + made.stderr
    assert "| env | needs CUDA |" in made.stdout
    assert json.loads((tmp_path / "session-A.json").read_text())["env"]["lines"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "session-A.md", "session-A.json", "session-A.log",
    }  # fmt: skip
    assert "measured   torch" in (tmp_path / "session-A.log").read_text()
