"""Adapt a frozen model with LoRA: the base in pieces or whole on each rank, adapters at a level of
their own.

    $ python examples/lora.py

A classifier learns scikit-learn's handwritten digits; then the digits come turned by a quarter. Its
weights stay frozen, and low-rank adapters beside them (Hu et al., "LoRA: Low-Rank Adaptation of
Large Language Models", 2021) learn the turned ones. Frozen leaves have no gradient and no optimizer
state. The rows differ in where things lie, and end with the same accuracy.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim, testing

BATCH = 96  # images of a step, over all ranks


class Adapted(nn.Module):
    """A linear layer plus `up @ down`, which is zero at first."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.GELU(),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 10),
    ]
    return nn.Sequential(*layers)


def adapt(model: nn.Module, rank: int) -> nn.Module:
    """The model with an adapter beside every linear layer."""
    return nn.Sequential(*(Adapted(m, rank) if isinstance(m, nn.Linear) else m for m in model))


def is_adapter(path: str, leaf: Tensor) -> bool:
    return path.endswith((".down", ".up"))


def read_digits(turned: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """1797 images of 8 x 8: the first 1440 to train on, the rest to test with."""
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.images / 16, dtype=torch.float32),
        torch.tensor(digits.target),
    )
    if turned:
        images = images.rot90(1, (1, 2))
    return {"x": images[:1440], "y": labels[:1440]}, {"x": images[1440:], "y": labels[1440:]}


def train(
    model: nn.Module,
    group: fz.Group,
    num_steps: int,
    *,
    turned: bool = False,
    trainable=None,
    level=0,
) -> tuple[fz.Params, tuple[float, float], tuple[float, float]]:
    """What one rank does: the whole parameters; accuracy before and after; KB of parameters and
    state it held."""
    apply, params, buffers = fz.functionalize(model)

    def loss_fn(params, buffers, batch):
        logits, _ = apply(params, buffers, batch["x"])
        return F.cross_entropy(logits, batch["y"])

    def evaluate(params, buffers, batch):
        logits, _ = apply(params, buffers, batch["x"])
        return fz.Aux(
            metrics={"accuracy": (logits.argmax(1) == batch["y"]).float().mean()},
            weight=len(batch["y"]),
        )

    step = fz.shard(
        fz.train_step(loss_fn, optim.adamw(3e-3), trainable=trainable), level=level, group=group
    )
    check = fz.shard(fz.eval_step(evaluate), level=level, group=group)
    data, test = read_digits(turned)
    test = fz.data.share(test, group)
    state = step.init(params, buffers)
    before = check(state, test)["accuracy"].item()
    for i in range(num_steps):
        index = torch.randint(len(data["y"]), (BATCH,), generator=torch.Generator().manual_seed(i))
        batch = {name: values[index] for name, values in data.items()}
        state, _ = step(state, fz.data.share(batch, group))
    accuracy = before, check(state, test)["accuracy"].item()
    here = fz.describe(step, state)
    held = here.params_nbytes / 1e3, here.state_nbytes / 1e3
    return step.unshard(state).params, accuracy, held


def adapter_1_base_3(path: str, leaf: Tensor) -> int:
    return 1 if is_adapter(path, leaf) else 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="threads of this process")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {args.steps}")

    model = make_model()
    learnt, (_, upright), _ = testing.run_ranks(
        lambda group: train(model, group, args.steps), args.ranks
    )[0]
    model.load_state_dict(learnt)
    print(f"{upright:.1%} of upright digits")

    torch.manual_seed(1)
    adapted = adapt(model, args.rank)
    rows = {
        "all trained, level 0": (None, 0),
        "all trained, level 3": (None, 3),
        "base whole, adapters 1": (is_adapter, 1),
        "base 3, adapters 1": (is_adapter, adapter_1_base_3),
        "base 3, adapters 3": (is_adapter, 3),
    }
    print(
        f"{args.ranks} ranks, turned digits      accuracy       KB a rank: parameters   optimizer"
    )
    for name, (trainable, level) in rows.items():
        new, (before, after), held = testing.run_ranks(
            lambda group, t=trainable, lv=level: train(
                adapted, group, args.steps, turned=True, trainable=t, level=lv
            ),
            args.ranks,
        )[0]
        still = all(
            torch.equal(new[path], leaf)
            for path, leaf in adapted.named_parameters()
            if ".linear." in path
        )
        assert still == (trainable is not None), "the base is frozen"
        print(f"{name:25} {before:8.1%} -> {after:.1%} {held[0]:23.0f} {held[1]:11.0f}")


if __name__ == "__main__":
    main()
