"""Solve u'' = -pi^2 sin(pi x), u(-1) = u(1) = 0, with a physics-informed network at level 3.

    $ python examples/pinn.py

The loss differentiates the network twice by its input with torch.func, inside the sharded step, and
the step then differentiates the loss by the parameters, which no rank holds whole. The exact
solution is sin(pi x).
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

import functorch_zero as fz
from functorch_zero import optim, testing

NUM_POINTS = 64  # of a step, over all ranks


class Layer(nn.Module):
    def __init__(self, before: int, after: int):
        super().__init__()
        self.linear = nn.Linear(before, after)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def make_model(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Layer(1, width), Layer(width, width), Layer(width, width), nn.Linear(width, 1)
    ).double()


def train(group: fz.Group, num_steps: int, level: int) -> tuple[float, float]:
    """What one rank does: the loss and the largest error of the solution at the end."""
    apply, params, buffers = fz.functionalize(make_model(), units=Layer)

    def solution(params, x):
        """u at one point; the factor makes it 0 at both ends."""
        output, _ = apply(params, buffers, x.reshape(1, 1))
        return (1 - x**2) * output.squeeze()

    def loss_fn(params, buffers, batch):
        curvature = vmap(grad(grad(lambda x: solution(params, x))))(batch)
        return (curvature + math.pi**2 * torch.sin(math.pi * batch)).square().mean()

    step = fz.shard(
        fz.train_step(loss_fn, optim.adamw(3e-3, weight_decay=0.0)), level=level, group=group
    )
    state = step.init(params, buffers)
    for i in range(num_steps):
        points = (
            torch.rand(NUM_POINTS, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            * 2
            - 1
        )
        state, metrics = step(state, points[group.rank :: group.size])

    whole, x = step.unshard(state).params, torch.linspace(-1, 1, 101, dtype=torch.float64)
    with torch.no_grad():
        error = vmap(lambda x: solution(whole, x))(x) - torch.sin(math.pi * x)
    return metrics["loss"].item(), error.abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="threads of this process")
    parser.add_argument("--level", type=int, default=3, choices=range(4))
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {args.steps}")
    loss, error = testing.run_ranks(lambda group: train(group, args.steps, args.level), args.ranks)[
        0
    ]
    print(
        f"after {args.steps} steps at level {args.level} on {args.ranks} ranks: loss {loss:.2e}, "
        f"error {error:.2e}"
    )


if __name__ == "__main__":
    main()
