"""Which levels fit a decoder language model on a device, before the model or a rank exists.

    $ python examples/plan_decoder.py --layers 32 --width 4096 --vocab 32000 --hidden 11008 \
        --gated --ranks 64 --memory 80 --bandwidth 50

The model is given by its counts or by a Hugging Face `config.json`. Of each level, the command
prints what a rank holds and sends in a step, and the smallest level that fits. Activations are not
in it: give them by `--activations`, or measure them by `fz.plan` with a batch.
"""

import argparse
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.planning import Plan, zero_bytes

GB = 1e9  # bytes, as devices' memory and links are sold
LEVELS = {0: "replicated", 1: "oss", 2: "sdp", 3: "fsdp"}

# Our counts, and their names in the files of different models
COUNTS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "vocab": ("vocab_size",),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
}
REQUIRED = ("layers", "width", "vocab")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
GATED = ("silu", "swiglu", "geglu", "gelu_pytorch_tanh")  # activations of gated feed-forwards


@dataclass(frozen=True)
class Shape:
    """Counts of a decoder language model: without biases, one norm before attention, one before the
    feed-forward."""

    layers: int
    width: int
    vocab: int
    hidden: int = 0  # of the feed-forward; 0: four times the width
    heads: int = 1
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: width / heads
    gated: bool = False  # a third matrix in the feed-forward
    tied: bool = False  # the head is the embedding

    def __post_init__(self):
        for name in COUNTS:
            least = 1 if name in (*REQUIRED, "heads") else 0
            count = getattr(self, name)
            if type(count) is not int or count < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {count!r}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide the heads, {self.heads}; got {self.kv_heads}")
        if not self.head_dim and self.width % self.heads:
            raise ValueError(f"heads must divide the width, {self.width}; got {self.heads}")


class Block(nn.Module):
    """The leaves of a block. Nothing is computed, so there is no forward."""

    def __init__(self, shape: Shape):
        super().__init__()
        width, hidden = shape.width, shape.hidden or 4 * shape.width
        head_dim = shape.head_dim or width // shape.heads
        inner, kv = shape.heads * head_dim, (shape.kv_heads or shape.heads) * head_dim
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, inner, False), nn.Linear(inner, width, False)
        self.k, self.v = nn.Linear(width, kv, False), nn.Linear(width, kv, False)
        self.up, self.down = nn.Linear(width, hidden, False), nn.Linear(hidden, width, False)
        if shape.gated:
            self.gate = nn.Linear(width, hidden, False)


class Decoder(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocab, False)
        if shape.tied:
            self.head.weight = self.embed.weight


def params_of(shape: Shape, dtype: torch.dtype, precision: fz.Precision | None) -> fz.Params:
    """The leaves, on the meta device: no number of them is in memory."""
    with torch.device("meta"):
        model = Decoder(shape).to(dtype)
    return fz.functionalize(model, precision=precision)[1]


def read_config(path: Path) -> Shape:
    """The counts in a Hugging Face model's config.json."""
    config = json.loads(path.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object")
    for key in (*EXPERTS, "is_encoder_decoder"):  # leaves that these counts don't describe
        if config.get(key):
            raise ValueError(f"{path} is no plain decoder: it has {key}. Remedy: fz.plan")
    counts = {}
    for name, keys in COUNTS.items():
        # None and 0 mean the same in these files: the default
        found = [config[key] for key in keys if config.get(key)]
        if found:
            counts[name] = found[0]
        elif name in REQUIRED:
            raise ValueError(f"{path} has none of {', '.join(keys)}")
    tied = config.get("tie_word_embeddings", True)  # where it is not said, as transformers
    gated = str(config.get("hidden_act", "")).lower() in GATED
    return Shape(**counts, gated=gated, tied=tied)


def shape_of(args: argparse.Namespace) -> Shape:
    """The model's counts, from a file or from the arguments."""
    counts = {f.name: getattr(args, f.name) for f in fields(Shape) if f.name in args}
    if "config" in args:
        if counts:
            raise ValueError(f"--config has the counts; give no others, got {', '.join(counts)}")
        return read_config(args.config)
    if not counts.keys() >= {*REQUIRED}:
        raise ValueError("pass --layers, --width and --vocab, or --config")
    return Shape(**counts)


def show(plans: list[Plan], memory: float | None, activations: float) -> bool:
    """Print the plans of all levels. Whether one of them fits, or nobody asked."""
    num_params, num_ranks = plans[0].num_params, plans[0].num_ranks
    head = ["level", "params", "gradients", "state", "gathered", "peak", "sent per step"]
    head += ["at least"] if plans[0].bandwidth else []
    head += [f"fits {memory:g} GB"] if memory else []
    rows, fitting = [head], []
    for level, plan in enumerate(plans):
        peak = plan.peak.total + activations * GB
        numbers = (plan.params, plan.gradients, plan.state, plan.gathered, peak, plan.sent_bytes)
        row = [f"{level} {LEVELS[level]}", *map(gigabytes, numbers)]
        row += [f"{plan.seconds():.3g} s"] if plan.bandwidth else []
        if memory:
            fits = peak <= memory * GB
            fitting += [level] if fits else []
            row.append("yes" if fits else "no")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"{num_params:,} params, {num_ranks} ranks; of rank 0:\n")
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    paper = [gigabytes(zero_bytes(num_params, num_ranks, level=level)) for level in LEVELS]
    print(f"\nThe ZeRO paper's mixed precision, 2 + 2 + 12 bytes a parameter: {', '.join(paper)}")
    if memory:
        print(f"\nThe smallest level that fits: {fitting[0]}" if fitting else "\nNo level fits")
    return bool(fitting) or not memory


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3g} GB"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # A count not given leaves no attribute, so that `Shape` supplies its own default
    model = parser.add_argument_group("the model", argument_default=argparse.SUPPRESS)
    for name in COUNTS:
        model.add_argument(f"--{name.replace('_', '-')}", type=int)
    model.add_argument("--gated", action="store_true", help="the feed-forward has three matrices")
    model.add_argument("--tied", action="store_true", help="the head is the embedding")
    model.add_argument("--config", type=Path, help="a Hugging Face config.json instead")
    run = parser.add_argument_group("the run")
    run.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd", "lamb", "muon"])
    run.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    run.add_argument("--compute", choices=["bfloat16", "float16"], help="of the params in use")
    run.add_argument("--ranks", type=int, nargs="+", required=True, help="one or several numbers")
    run.add_argument("--memory", type=float, help="a device's, in GB (10**9 bytes)")
    run.add_argument("--bandwidth", type=float, help="of a rank's link, GB per second, one way")
    run.add_argument("--activations", type=float, default=0.0, help="a rank's, in GB")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where no level fits `--memory` for one of the numbers of ranks."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    try:
        shape = shape_of(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    precision = fz.Precision(compute=getattr(torch, args.compute)) if args.compute else None
    params = params_of(shape, getattr(torch, args.dtype), precision)
    optimizer = getattr(optim, args.optimizer)(1e-3)
    bandwidth = args.bandwidth * GB if args.bandwidth else None
    all_fit = True
    for ranks in args.ranks:
        options = {"ranks": ranks, "bandwidth": bandwidth}
        plans = [fz.plan(params, optimizer, level=level, **options) for level in LEVELS]
        all_fit &= show(plans, args.memory, args.activations)
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
