"""examples/plan_decoder.py: the smallest level that fits, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch

from tests.scripts import ROOT
from tests.tiers import THOROUGH

# Not through `import`: mypy leaves examples alone
EXAMPLE = run_path(str(ROOT / "examples" / "plan_decoder.py"))
LLAMA = "--layers 32 --width 4096 --vocab 32000 --hidden 11008 --gated"
# As many params in few leaves, which takes a tenth of the time
WIDE = "--layers 3 --width 12288 --vocab 32000 --hidden 33792 --gated"
LEAST = {"num_hidden_layers": 2, "hidden_size": 4, "vocab_size": 3}


def main(line: str) -> int:
    status: int = EXAMPLE["main"](line.split())
    return status


@THOROUGH
def test_the_smallest_level_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{LLAMA} --ranks 64 --memory 80 --bandwidth 50") == 0
    out = capsys.readouterr().out
    assert out.strip() in (ROOT / "docs" / "howto" / "plan.md").read_text()
    assert "6,738,415,616 params" in out  # Llama 2 7B
    rows = [line for line in out.splitlines() if line[:1].isdigit() and line[1] == " "]
    assert [row.split()[-1] for row in rows] == ["no", "yes", "yes", "yes"]


@THOROUGH
def test_activations_count_and_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{WIDE} --memory 80 --activations 60 --ranks 2 64") == 1
    of_2, _, of_64 = capsys.readouterr().out.partition(" 64 ranks;")
    assert "No level fits" in of_2 and "The smallest level that fits: 3" in of_64


@THOROUGH
def test_a_hundred_thousand_ranks_and_muon(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--layers 2 --width 64 --vocab 100 --optimizer muon --ranks 100000") == 0
    assert "100000 ranks" in capsys.readouterr().out


def shape_in(tmp_path: Path, config: Any) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return EXAMPLE["read_config"](path)


def test_a_hugging_face_config(tmp_path: Path) -> None:
    llama = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    params = EXAMPLE["params_of"](shape_in(tmp_path, llama), torch.bfloat16, None)
    assert sum(leaf.numel() for leaf in params.values()) == 8_030_261_248  # Llama 3 8B


def test_embeddings_are_tied_unless_a_config_says_otherwise(tmp_path: Path) -> None:
    """As transformers has it; GPT-2's file says nothing."""
    config = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 100, "n_inner": None}
    sizes = []
    for more in ({}, {"tie_word_embeddings": False}):
        params = EXAMPLE["params_of"](shape_in(tmp_path, config | more), torch.float32, None)
        sizes.append(sum(leaf.numel() for leaf in params.values()))
    assert sizes[1] - sizes[0] == 8 * 100


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ([1, 2], "must hold a JSON object"),
        ({}, "has none of num_hidden_layers"),
        ({**LEAST, "num_local_experts": 8}, "no plain decoder: it has num_local_experts"),
        ({**LEAST, "is_encoder_decoder": True}, "no plain decoder"),
        ({**LEAST, "num_hidden_layers": 2.5}, "layers must be an integer of at least 1, got 2.5"),
        ({**LEAST, "hidden_size": "4"}, "width must be an integer of at least 1, got '4'"),
        ({**LEAST, "num_attention_heads": 3}, "heads must divide the width, 4; got 3"),
        ({**LEAST, "intermediate_size": -1}, "hidden must be an integer of at least 0, got -1"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_planned_is_refused(
    config: object, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=text):
        shape_in(tmp_path, config)
    with pytest.raises(SystemExit, match="2"):
        main(f"--ranks 2 --config {tmp_path / 'config.json'}")
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "--layers, --width and --vocab"),
        (f"{LLAMA} --config nowhere", "--config has the counts; give no others, got layers"),
        ("--config nowhere", "No such file"),
    ],
)
def test_counts_that_are_missing_or_there_twice(
    given: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(f"{given} --ranks 2")
    assert text in capsys.readouterr().err
