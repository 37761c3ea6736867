"""Train a byte-level GPT on the source files of Python's own standard library, on several local
ranks.

    $ python examples/train_lm.py                                        # 2 ranks, level 3
    $ python examples/train_lm.py --level 1 --ranks 3 --optimizer muon
    $ torchrun --nproc-per-node 2 examples/train_lm.py                   # ranks that torchrun
    started

The numbers are the same at every level and every number of ranks, up to rounding; memory and
traffic are not.
"""

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import functorch_zero as fz
from functorch_zero import optim

CONTEXT = 128  # bytes the model sees
PROMPT = "def main("


class Size(NamedTuple):
    """A size of the model and of the batch over all ranks."""

    dim: int
    depth: int
    batch: int


SIZES = {
    "tiny": Size(dim=64, depth=2, batch=8),
    "small": Size(dim=256, depth=4, batch=8),
    "medium": Size(dim=512, depth=8, batch=16),
}

OPTIMIZERS = {  # and their highest learning rates
    "sgd": (lambda rate: optim.sgd(rate, momentum=0.9), 0.1),
    "adamw": (optim.adamw, 2e-3),
    "lamb": (optim.lamb, 2e-2),
    "adafactor": (optim.adafactor, 2e-2),
    "muon": (optim.muon, 1e-2),
}


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turn pairs of features by angles that grow with time."""
    first, second = x.chunk(2, -1)
    rates = 10000 ** -torch.linspace(0, 1, first.shape[-1], device=x.device)
    angles = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Block(nn.Module):
    """A transformer block, with heads of 32 features."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, head, time, 32)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """From bytes (batch, time) to logits of the next byte (batch, time, 256)."""

    def __init__(self, size: Size):
        super().__init__()
        self.bytes = nn.Embedding(256, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.dim), nn.Linear(size.dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(limit: int = 8_000_000) -> tuple[Tensor, Tensor]:
    """The standard library's source: every 20th file held out, the others to train on. uint8."""
    train, held_out = bytearray(), bytearray()
    for i, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        (held_out if i % 20 == 0 else train).extend(path.read_bytes()[:200_000])
    return torch.frombuffer(train[:limit], dtype=torch.uint8), torch.frombuffer(
        held_out, dtype=torch.uint8
    )


def draw(text: Tensor, num: int, seed: int, group: fz.Group, device: str) -> dict[str, Tensor]:
    """This rank's share of a batch of `num` random windows, the same batch for any number of
    ranks."""
    starts = torch.randint(
        len(text) - CONTEXT, (num,), generator=torch.Generator().manual_seed(seed)
    )
    windows = torch.stack(
        [text[s : s + CONTEXT + 1] for s in starts[group.rank :: group.size].tolist()]
    )
    windows = windows.to(device, torch.int64)
    return {"x": windows[:, :-1], "y": windows[:, 1:]}


def make_optimizer(name: str, num_steps: int) -> optim.Transform:
    """Clip, then the optimizer of this name with a learning rate that rises, then falls to
    nothing."""
    make, rate = OPTIMIZERS[name]
    schedule = optim.warmup_cosine_decay_schedule(
        rate / 10, rate, min(20, num_steps // 4), num_steps
    )
    return optim.chain(optim.clip_by_global_norm(1.0), make(schedule))


def memory(step: Any, state: fz.State, params: fz.Params, group: fz.Group, level: int) -> list[str]:
    """What every rank holds of parameters, gradients (in pieces from level 2 on) and optimizer
    state, in MB."""
    here = fz.describe(step, state)
    gradients = sum(leaf.nbytes for leaf in params.values()) / (group.size if level >= 2 else 1)
    held = (here.params_nbytes, gradients, here.state_nbytes)
    mine = "+".join(f"{nbytes / 1e6:.1f}" for nbytes in held)
    return [line.decode() for line in group.exchange(mine.encode())]


def train(args: argparse.Namespace) -> None:
    """What one rank does."""
    torch.manual_seed(0)  # the ranks start from the same parameters
    group, size = fz.ProcessGroup(), SIZES[args.size]
    apply, params, buffers = fz.functionalize(GPT(size).to(args.device), units=Block)
    text, held_out = read_text()

    def loss_fn(params, buffers, batch):
        logits, _ = apply(params, buffers, batch["x"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
        return loss, fz.Aux(weight=batch["y"].numel())  # ranks' shares may differ in size

    def evaluate(params, buffers, batch):
        loss, aux = loss_fn(params, buffers, batch)
        return fz.Aux(metrics={"loss": loss}, weight=aux.weight)

    step = fz.train_step(loss_fn, make_optimizer(args.optimizer, args.steps))
    step = fz.shard(step, level=args.level, group=group)
    check = fz.shard(fz.eval_step(evaluate), level=args.level, group=group)

    state = step.init(params, buffers)
    exam = draw(held_out, 4 * size.batch, 0, group, args.device)
    before = check(state, exam)["loss"]
    held = memory(step, state, params, group, args.level)
    bar = tqdm(
        range(args.steps),
        disable=group.rank > 0,
        bar_format="{n}/{total} |{bar:12}| {remaining}{postfix}",
    )
    start = time.perf_counter()
    for i in bar:
        state, metrics = step(state, draw(text, size.batch, 1 + i, group, args.device))
        speed = (i + 1) * size.batch * CONTEXT / (time.perf_counter() - start)
        bar.set_postfix_str(
            f"loss {metrics['loss']:.3f}, {speed:,.0f} tokens/s, MB a rank {' '.join(held)}",
            refresh=False,
        )
    after = check(state, exam)["loss"]

    whole = step.unshard(state)
    if group.rank == 0:
        for rank, line in enumerate(held):
            print(f"rank {rank} holds {line} MB of parameters + gradients + optimizer state")
        print(f"held-out loss {before:.3f} -> {after:.3f}\n\n{generate(apply, whole, args.device)}")


@torch.no_grad()
def generate(apply, state: fz.State, device: str, num: int = 300) -> str:
    """Continue the prompt by `num` bytes drawn from the model."""
    predict, generator = apply.eval(), torch.Generator(device).manual_seed(0)
    text = torch.tensor([list(PROMPT.encode())], device=device)
    for _ in range(num):
        logits, _ = predict(state.params, state.buffers, text[:, -CONTEXT:])
        drawn = torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1, generator=generator)
        text = torch.cat([text, drawn], 1)
    written = bytes(text[0].tolist()).decode(errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in written
    )


def at_least_one(text: str) -> int:
    """A number for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", type=int, default=3, choices=range(4))
    parser.add_argument(
        "--ranks", type=at_least_one, default=2, help="processes to start, when torchrun did not"
    )
    parser.add_argument("--steps", type=at_least_one, default=300)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    fz.launch(train, args.ranks, args)


if __name__ == "__main__":
    main()
