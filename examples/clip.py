"""Train two small encoders by the CLIP loss over the whole batch, at any level, on any number of
ranks: the losses are the same.

    $ python examples/clip.py --ranks 3

Each pair has two views of one hidden vector, by unknown maps and with noise. The encoders are to
find the same vector in both. The batch is the step's, not the rank's. `--chunks` computes the
encoders in chunks of each rank's rows, with the activations of one at a time (GradCache).
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim, testing

NUM_PAIRS = 64  # of a step, over all ranks
HIDDEN, IMAGE, TEXT = 4, 24, 16  # dims


class Encoder(nn.Module):
    def __init__(self, num_inputs: int, width: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_inputs, width), nn.GELU(), nn.Linear(width, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(x), dim=1)


class CLIP(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.image, self.text = Encoder(IMAGE, width), Encoder(TEXT, width)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(images), self.text(texts)


def pairs(number: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: (NUM_PAIRS, IMAGE) and (NUM_PAIRS, TEXT)."""
    maps = torch.Generator().manual_seed(0)
    to_image, to_text = (torch.randn(HIDDEN, n, generator=maps) for n in (IMAGE, TEXT))
    own = torch.Generator().manual_seed(1 + number)
    hidden = torch.randn(NUM_PAIRS, HIDDEN, generator=own)
    noise = [0.3 * torch.randn(NUM_PAIRS, n, generator=own) for n in (IMAGE, TEXT)]
    images, texts = hidden @ to_image + noise[0], hidden @ to_text + noise[1]
    return images.double(), texts.double()


def train(group: fz.Group, num_steps: int, level: int, chunks: int) -> list[float]:
    """What one rank does: the losses of all steps."""
    torch.manual_seed(0)
    apply, params, buffers = fz.functionalize(CLIP().double(), units=Encoder)

    def loss_fn(params, buffers, batch):
        def encode(images, texts):
            return apply(params, buffers, images, texts)[0]

        images, texts = fz.batch.in_chunks(encode, chunks)(*batch)
        images, texts = fz.batch.all_rows(images), fz.batch.all_rows(texts)
        logits = fz.unshard(params["log_scale"]).exp() * images @ texts.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    step = fz.shard(fz.train_step(loss_fn, optim.adamw(1e-2)), level=level, group=group)
    state, losses = step.init(params, buffers), []
    for number in range(num_steps):
        state, metrics = step(state, fz.data.share(pairs(number), group))
        losses.append(metrics["loss"].item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="threads of this process")
    parser.add_argument("--level", type=int, default=3, choices=range(4))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--chunks", type=int, default=1)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {args.steps}")
    losses = testing.run_ranks(
        lambda group: train(group, args.steps, args.level, args.chunks), args.ranks
    )[0]
    print(f"loss {losses[0]:.10f} -> {losses[-1]:.10f}")


if __name__ == "__main__":
    main()
