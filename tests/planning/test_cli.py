"""`python -m functorch_zero plan`, and the pictures of plans."""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from functorch_zero import optim, plan
from functorch_zero.__main__ import main
from functorch_zero.planning import Plan
from functorch_zero.planning.decoder import Shape, read_config
from functorch_zero.planning.report import KINDS, bytes_text, figure_of_levels, figure_of_step
from tests.tiers import THOROUGH

LLAMA = [
    "plan",
    "--layers",
    "32",
    "--width",
    "4096",
    "--vocab",
    "32000",
    "--hidden",
    "11008",
    "--gated",
]


def test_the_smallest_level_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--ranks", "64", "--memory", "80", "--bandwidth", "50"]) == 0
    out = capsys.readouterr().out
    assert out.strip() in (Path(__file__).parents[2] / "docs" / "howto" / "plan.md").read_text()
    assert "6,738,415,616 params" in out  # Llama 2 7B
    assert "The smallest level that fits: 1" in out
    assert [
        line.split()[-1] for line in out.splitlines() if line[:1] in "0123" and line[1:2] == " "
    ] == [
        "no",
        "yes",
        "yes",
        "yes",
    ]


def test_none_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--ranks", "2", "--memory", "8"]) == 1
    assert "No level fits" in capsys.readouterr().out


def test_activations_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--ranks", "64", "--memory", "80", "--activations", "60"]) == 0
    assert "The smallest level that fits: 3" in capsys.readouterr().out


@THOROUGH
def test_a_hundred_thousand_ranks_and_muon(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plans.json"
    command = ["plan", "--layers", "2", "--width", "64", "--vocab", "100", "--optimizer", "muon"]
    assert main([*command, "--ranks", "100000", "--bandwidth", "2", "--json", str(out)]) == 0
    plans = json.loads(out.read_text())
    assert [p["level"] for p in plans] == [0, 1, 2, 3]
    assert [p["seconds"] for p in plans] == [p["sent_bytes"] / 2e9 for p in plans]
    assert "100000 ranks" in capsys.readouterr().out


def test_several_numbers_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LLAMA, "--ranks", "1", "8", "64", "--memory", "41"]) == 1
    out = capsys.readouterr().out
    assert (
        "No level fits: the least is" in out
        and "The smallest level that fits: 2" not in out.split("64 ranks")[0]
    )


def test_a_hugging_face_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "vocab_size": 128256,
        "intermediate_size": 14336,
    }
    fields |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    path.write_text(json.dumps({**fields, "hidden_act": "silu", "tie_word_embeddings": False}))
    made = plan(read_config(path).params(torch.bfloat16), optim.adamw(1e-3), level=3, ranks=8)
    assert made.num_params == 8_030_261_248  # Llama 3 8B


def test_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--ranks", "2"]) == 2
    assert "--layers, --width and --vocab" in capsys.readouterr().err
    assert main([*LLAMA, "--ranks", "2", "--optimizer", "chain"]) == 2
    assert "--optimizer must be one of adabelief, " in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["plan", "--ranks", "2", "--config", str(tmp_path / "config.json")]) == 2
    assert "num_hidden_layers" in capsys.readouterr().err
    assert main([*LLAMA, "--ranks", "2", "--config", str(tmp_path / "config.json")]) == 2
    assert "give no others beside it, got layers, width" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["plan", "--ranks", "2", "--config", str(tmp_path / "config.json")]) == 2
    assert "config.json is no JSON file: Expecting" in capsys.readouterr().err
    assert main([*LLAMA[:-3], "--ranks", "0"]) == 2
    with pytest.raises(ValueError, match="layers must be at least 1"):
        Shape(0, 1, 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([1, 2], "must hold a JSON object"),
        ({"num_local_experts": 8}, "no plain decoder: it has num_local_experts"),
        ({"is_encoder_decoder": True}, "no plain decoder"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be an integer, got 2.5"),
        ({"hidden_size": "4"}, "hidden_size must be an integer, got '4'"),
        ({"num_attention_heads": 3}, "heads must divide the width, 4; got 3"),
        ({"intermediate_size": -1}, "hidden must be at least 0"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_planned_is_refused(
    fields: object, text: str, tmp_path: Path
) -> None:
    path, least = (
        tmp_path / "config.json",
        {"num_hidden_layers": 2, "hidden_size": 4, "vocab_size": 3},
    )
    path.write_text(json.dumps({**least, **fields} if isinstance(fields, dict) else fields))
    with pytest.raises(ValueError, match=text):
        read_config(path)


def test_embeddings_are_tied_unless_a_config_says_otherwise(tmp_path: Path) -> None:
    """As transformers has it; GPT-2's file says nothing."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_inner": None}
        )
    )
    assert read_config(path).tied


@pytest.mark.parametrize(
    "given", [["--memory", "0"], ["--bandwidth", "-5"], ["--activations", "-1"]]
)
def test_numbers_that_mean_nothing_are_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*LLAMA, "--ranks", "2", *given])
    except SystemExit as stopped:  # argparse's
        code = stopped.code
    assert code == 2 and given[0] in capsys.readouterr().err


def test_tied_heads_are_one_leaf() -> None:
    tied, apart = (Shape(1, 8, 100, tied=flag).params(torch.float32) for flag in (True, False))
    assert sum(p.numel() for p in apart.values()) - sum(p.numel() for p in tied.values()) == 800


def test_bytes_for_people() -> None:
    assert [bytes_text(n) for n in (0, 999, 1500, 2_500_000, 31.4e9, 2e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "31.4 GB",
        "2.0 TB",
    ]


def a_plan() -> Plan:
    return plan(Shape(2, 16, 50).params(torch.float32), optim.adamw(1e-3), level=3, ranks=4)


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, everything = tmp_path / "step.png", tmp_path / "levels.png"
    a_plan().draw(str(path))
    command = [
        "plan",
        "--layers",
        "2",
        "--width",
        "64",
        "--vocab",
        "100",
        "--ranks",
        "1",
        "4",
        "--picture",
    ]
    assert main([*command, str(everything)]) == 0
    assert path.read_bytes()[:4] == everything.read_bytes()[:4] == b"\x89PNG"


def test_a_step_is_drawn_stacked_by_kind() -> None:
    """At each moment, a kind's area reaches from the sum of the kinds below it as far as it has
    bytes."""
    pytest.importorskip("matplotlib")
    samples = a_plan().samples
    figure = figure_of_step(samples, title="a title")
    (axes,) = figure.axes
    assert axes.get_title() == "a title" and [
        t.get_text() for t in figure.legends[0].get_texts()
    ] == [*KINDS.values()]
    areas = [area.get_paths()[0] for area in axes.collections]
    for i, sample in enumerate(samples):
        x, heights = (
            min(i + 0.1, len(samples) - 1.1),
            [getattr(sample, field) / 1e6 for field in KINDS],
        )
        for area, height, top in zip(areas, heights, accumulate(heights), strict=True):
            within = [area.contains_point((x, top - part * height)) for part in (0.01, 0.99)]
            assert within == [height > 0] * 2
            assert not any(
                area.contains_point((x, y))
                for y in (top * 1.01 + 1e-6, (top - height) * 0.99 - 1e-6)
            )
    moments = dict(
        zip(axes.get_xticks(), (t.get_text() for t in axes.get_xticklabels()), strict=True)
    )
    assert moments and all(samples[int(i)].moment == text for i, text in moments.items())


def test_levels_and_ranks_are_drawn_stacked_by_kind() -> None:
    pytest.importorskip("matplotlib")
    params = Shape(2, 16, 50).params(torch.float32)
    plans = {
        (i, n): plan(params, optim.adamw(1e-3), level=i, ranks=n) for n in (1, 4) for i in range(4)
    }
    peaks = {f"level {i}, {n} ranks": made.peak for (i, n), made in plans.items()}
    (axes,) = figure_of_levels(peaks, title="").axes
    assert [t.get_text() for t in axes.get_xticklabels()] == [*peaks]
    for bars, (field, kind) in zip(axes.containers, KINDS.items(), strict=True):
        assert bars.get_label() == kind
        assert [b.get_height() for b in bars] == pytest.approx(
            [getattr(peak, field) / 1e9 for peak in peaks.values()]
        )
    tops = [b.get_y() + b.get_height() for b in axes.containers[-1]]
    assert tops == pytest.approx([peak.total / 1e9 for peak in peaks.values()])


def test_without_matplotlib_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"functorch-zero\[plot\]"):
        a_plan().draw("nowhere.png")
