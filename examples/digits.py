"""Classify scikit-learn's handwritten digits with a small ConvNet, at all four levels side by side.

    $ python examples/digits.py

The rows hold less and less memory a rank, and end with the same parameters up to rounding (in
float32, which training amplifies). BatchNorm takes its statistics over each rank's own share of the
batch, at every level alike.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim, testing

BATCH = 96  # images of a step, over all ranks


def conv(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        conv(1, 32), conv(32, 64), nn.MaxPool2d(2), conv(64, 64), nn.Flatten(), nn.Linear(1024, 10)
    )


def read_digits() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """1797 images of 8 x 8: the first 1440 to train on, the rest to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    return {"x": images[:1440], "y": labels[:1440]}, {"x": images[1440:], "y": labels[1440:]}


def take(data: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {name: values[index] for name, values in data.items()}


def train(
    group: fz.Group, level: int, num_steps: int
) -> tuple[fz.Params, float, tuple[float, float, float]]:
    """What one rank does: the trained parameters, the test accuracy, and KB of parameters,
    gradients, state held."""
    apply, params, buffers = fz.functionalize(make_model())
    predict = apply.eval()

    def loss_fn(params, buffers, batch):
        logits, buffers = apply(params, buffers, batch["x"])
        return F.cross_entropy(logits, batch["y"]), fz.Aux(buffers=buffers)

    def evaluate(params, buffers, batch):
        logits, _ = predict(params, buffers, batch["x"])
        return fz.Aux(
            metrics={"accuracy": (logits.argmax(1) == batch["y"]).float().mean()},
            weight=len(batch["y"]),
        )

    step = fz.shard(fz.train_step(loss_fn, optim.adamw(3e-3)), level=level, group=group)
    check = fz.shard(fz.eval_step(evaluate), level=level, group=group)
    data, test = read_digits()
    state = step.init(params, buffers)
    for i in range(num_steps):
        index = torch.randint(len(data["y"]), (BATCH,), generator=torch.Generator().manual_seed(i))
        state, _ = step(state, take(data, fz.data.share(index, group)))
    accuracy = check(state, fz.data.share(test, group))["accuracy"].item()
    here = fz.describe(step, state)
    whole = sum(leaf.nbytes for leaf in params.values())
    gradients = whole / (group.size if level >= 2 else 1)
    held = here.params_nbytes / 1e3, gradients / 1e3, here.state_nbytes / 1e3
    return step.unshard(state).params, accuracy, held


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="threads of this process")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    print(
        f"{args.ranks} ranks    accuracy   KB a rank: parameters  gradients  optimizer   from "
        "level 0"
    )
    first = None
    for level in range(4):
        results = testing.run_ranks(
            lambda group, level=level: train(group, level, args.steps), args.ranks
        )
        params, accuracy, held = results[0]
        first = first or params
        gap = max((params[path] - first[path]).abs().max().item() for path in params)
        print(
            f"level {level}    {accuracy:8.1%}   {held[0]:20.0f}  {held[1]:9.0f}  {held[2]:9.0f}  "
            f" {gap:12.1e}"
        )


if __name__ == "__main__":
    main()
