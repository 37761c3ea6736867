"""Every example runs at a small size, with warnings as errors: in a fork, and as a user would start
it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import functorch_zero as fz
from tests.scripts import run_command, run_in_fork, run_script
from tests.tiers import FULL, THOROUGH, tiers

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SMALL_LM = ["--size", "tiny", "--steps", "6"]


RunExample = Callable[..., str]


@pytest.fixture(params=tiers([run_in_fork], full=[run_script]), ids=["fork", "script"])
def run_example(request: pytest.FixtureRequest, tmp_path: Path) -> RunExample:
    """The output of an example, by its file's name and options."""
    return lambda name, *options: request.param(EXAMPLES / name, *options, folder=tmp_path).check()


def held_out_losses(out: str) -> tuple[float, float]:
    """What train_lm.py prints as `held-out loss 5.55 -> 3.10`."""
    (line,) = [line for line in out.splitlines() if line.startswith("held-out loss")]
    before, after = line.removeprefix("held-out loss").split("->")
    return float(before), float(after)


def test_train_lm_knows_its_optimizers() -> None:
    example = runpy.run_path(str(EXAMPLES / "train_lm.py"))
    assert {"sgd", "adamw", "lamb", "adafactor", "muon"} <= {*example["OPTIMIZERS"]}
    for name in example["OPTIMIZERS"]:
        step = fz.train_step(
            lambda params, buffers, batch: params["w"].square().sum(),
            example["make_optimizer"](name, 4),
        )
        state, _ = step(step.init({"w": torch.ones(4, 4, requires_grad=True)}), None)
        assert torch.count_nonzero(state.params["w"] - 1)


@pytest.mark.parametrize(
    "name", tiers(["clip", "pinn", "recommender", "train_lm"], ["finetune", "lora"])
)
def test_no_steps_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the result is that of steps."""
    monkeypatch.setattr(sys, "argv", [name, "--steps", "0"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert "argument --steps: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("level", "optimizer"), tiers(thorough=[("3", "muon"), ("1", "lamb")], rows=True)
)
def test_train_lm(run_example: RunExample, level: str, optimizer: str) -> None:
    out = run_example("train_lm.py", "--level", level, "--optimizer", optimizer, *SMALL_LM)
    before, after = held_out_losses(out)
    assert after < before - 0.1
    assert "rank 1 holds" in out


@THOROUGH
def test_train_lm_prints_the_same_losses_on_1_and_3_ranks(run_example: RunExample) -> None:
    """The batch is the step's, not the rank's: the number of ranks changes nothing but rounding."""
    one, three = (
        held_out_losses(run_example("train_lm.py", "--ranks", n, *SMALL_LM)) for n in ("1", "3")
    )
    assert one == pytest.approx(three, abs=2e-3)


@THOROUGH
def test_train_lm_under_torchrun() -> None:
    script = str(EXAMPLES / "train_lm.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    before, after = held_out_losses(run_command(*torchrun, script, *SMALL_LM).check())
    assert after < before - 0.1


@THOROUGH
def test_digits(run_example: RunExample) -> None:
    rows = [
        line.split()
        for line in run_example("digits.py", "--steps", "30").splitlines()
        if line.startswith("level")
    ]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"]
    assert all(float(row[2].removesuffix("%")) > 85 for row in rows)
    assert all(float(row[-1]) < 1e-3 for row in rows)  # the parameters' distance from level 0's
    held = [sum(map(float, row[3:6])) for row in rows]
    assert held == sorted(held, reverse=True) and held[3] < 0.6 * held[0]


@THOROUGH
def test_custom_transform(run_example: RunExample) -> None:
    assert "equal" in run_example("custom_transform.py")


def test_property_test(run_example: RunExample) -> None:
    assert "equal" in run_example("property_test.py", "--examples", "3")


@THOROUGH
def test_clip_prints_the_same_losses_on_any_number_of_ranks(run_example: RunExample) -> None:
    one, three = (
        run_example("clip.py", "--steps", "6", "--ranks", n, "--chunks", n) for n in ("1", "3")
    )
    assert one == three and one.startswith("loss ")


@THOROUGH
def test_recommender_prints_the_same_losses_on_any_number_of_ranks(run_example: RunExample) -> None:
    """At level 0 the embeddings are whole on each rank, and at level 3 they are tables."""
    one, three = (
        run_example("recommender.py", "--size", "tiny", *options).splitlines()
        for options in (("--ranks", "1", "--level", "0"), ("--ranks", "3", "--level", "3"))
    )
    assert one[:2] == three[:2] and one[1].startswith("recall@10 ")
    before, after = map(float, one[0].removeprefix("loss").split("->"))
    assert after < before - 0.1
    assert "rank 2 holds 0.33 of the tables" in three


def test_pinn(run_example: RunExample) -> None:
    run_example("pinn.py", "--steps", "20")


@THOROUGH
def test_lora(run_example: RunExample) -> None:
    lines = run_example("lora.py", "--steps", "60").splitlines()
    rows = {
        line[:25].strip(): [word.rstrip("%") for word in line[25:].split()]
        for line in lines
        if "->" in line
    }
    assert [*rows][:2] == ["all trained, level 0", "all trained, level 3"] and len(rows) == 5
    adapted = [
        [float(row[k]) for k in (0, 2, 3, 4)] for name, row in rows.items() if "adapters" in name
    ]
    assert all(after > before + 10 for before, after, _, _ in adapted)
    assert (
        len({after for _, after, _, _ in adapted}) == 1
        and len({state for _, _, _, state in adapted}) == 1
    )
    assert adapted[0][2] > adapted[1][2] > adapted[2][2], "less and less of the base on each rank"
    assert adapted[0][3] < 0.1 * float(rows["all trained, level 0"][4])


@THOROUGH
def test_finetune_prints_the_same_losses_on_1_and_2_ranks(
    run_example: RunExample, tmp_path: Path
) -> None:
    """Though shares of a batch have unequal numbers of labels."""
    pytest.importorskip("transformers.models.llama.modeling_llama")  # once, not in every fork
    losses = {}
    for ranks, level in (("1", "0"), ("2", "3")):
        root = tmp_path / ranks
        options = ["--ranks", ranks, "--level", level, "--steps", "3", "--root", str(root)]
        out = run_example("finetune.py", *options)
        losses[ranks] = [float(number) for number in re.findall(r"\d\.\d{6}", out)]
        assert (root / "tuned" / "config.json").exists() and "def is_empty" in out
    before, pretrained, again, tuned = losses["1"]
    assert before > pretrained + 0.1 and pretrained == again > tuned + 0.1
    assert losses["1"] == pytest.approx(losses["2"], abs=1e-5)


@THOROUGH
def test_plan_decoder(run_example: RunExample) -> None:
    """What it prints is in planning/test_plan_decoder.py."""
    counts = ["--layers", "2", "--width", "8", "--vocab", "100"]
    assert "level fits" not in run_example("plan_decoder.py", *counts, "--ranks", "4")


@THOROUGH
def test_resume(run_example: RunExample, tmp_path: Path) -> None:
    """What happens to it is in test_restarts.py."""
    first = run_example("resume.py", "--steps", "4", "--every", "2", "--root", str(tmp_path))
    again = run_example("resume.py", "--steps", "4", "--every", "2", "--root", str(tmp_path))
    assert (
        "from step 0" in first and "from step 4" in again and first.split()[-1] == again.split()[-1]
    )


def gan_losses(out: str) -> list[float]:
    """The numbers that gan.py prints: the last step's losses, and the distance at the end."""
    *_, losses, distance = out.splitlines()
    found = re.findall(r"\d+\.\d+", losses)
    return [float(x) for x in (*found, distance.split()[-1])]


@THOROUGH
def test_gan_prints_the_same_losses_on_1_and_3_ranks(run_example: RunExample) -> None:
    one, three = (gan_losses(run_example("gan.py", "--ranks", n, "--steps", "2")) for n in "13")
    assert len(one) == 3 and one == pytest.approx(three, abs=2e-9)


@THOROUGH
def test_gan_goes_on_with_other_ranks_and_levels(run_example: RunExample, tmp_path: Path) -> None:
    root = ["--root", str(tmp_path / "saved")]
    whole = gan_losses(run_example("gan.py", "--ranks", "1", "--steps", "4"))
    run_example("gan.py", "--ranks", "3", "--steps", "2", *root)
    resumed = gan_losses(run_example("gan.py", "--level", "1", "--steps", "4", *root))
    assert whole == pytest.approx(resumed, abs=2e-9)


@FULL
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("ray") is None, reason="not one of the project's packages")
def test_three_of_four_workers_of_ray_go_on(tmp_path: Path) -> None:
    # Ray warns by itself, and starts five nodes twice
    command = [sys.executable, str(EXAMPLES / "ray_train.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0 and "4 workers, then 3" in ended.stdout, ended.stderr


def test_every_example_is_run() -> None:
    source = Path(__file__).read_text()
    missing = [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in source]
    assert not missing
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert text.startswith('"""') and "argparse" in text and '__name__ == "__main__"' in text, (
            path.name
        )
