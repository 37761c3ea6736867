"""Train a GAN on eight Gaussians in a ring: two networks, two optimizers, two critic updates.

    $ python examples/gan.py                               # 2 ranks, the generator at level 3
    $ python examples/gan.py --ranks 3 --root runs/gan     # saves there, and goes on from there
    $ torchrun --nproc-per-node 2 examples/gan.py          # ranks that torchrun started

The numbers are the same at every level and every number of ranks, up to rounding, also when a run
goes on from a checkpoint of other ranks.
"""

import argparse
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import checkpoint, optim

ROWS = 60  # of a batch, over all ranks: in even parts on up to 6
NOISE = 4  # features of the generator's input
ANGLES = torch.arange(8, dtype=torch.float64) * math.pi / 4
MODES = torch.stack([ANGLES.cos(), ANGLES.sin()], 1)  # (8, 2), the Gaussians


def make_net(first: int, last: int) -> nn.Module:
    layers = [nn.Linear(first, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(64, last)).double()


torch.manual_seed(0)  # the ranks start from the same params
generate, first_gen, _ = fz.functionalize(make_net(NOISE, 2))
judge, first_disc, _ = fz.functionalize(make_net(2, 1))
gen_optimizer = optim.adam(5e-3, b1=0.5)
disc_optimizer = optim.chain(optim.clip_by_global_norm(5.0), optim.adam(5e-3, b1=0.5))


class Gan(NamedTuple):
    gen: fz.Params
    disc: fz.Params
    gen_opt: Any
    disc_opt: Any


def init(gen, disc):
    return Gan(gen, disc, gen_optimizer.init(gen), disc_optimizer.init(disc))


def disc_loss(disc, gen, noise, real):
    fake, real = generate(gen, {}, noise)[0], real.detach().requires_grad_()
    of_fake, of_real = judge(disc, {}, fake)[0], judge(disc, {}, real)[0]
    # Mescheder et al., "Which Training Methods for GANs do actually Converge?" (2018)
    (slope,) = torch.autograd.grad(of_real.sum(), real, create_graph=True)
    penalty = 0.05 * slope.square().sum(1).mean()
    return F.softplus(of_fake).mean() + F.softplus(-of_real).mean() + penalty


def gen_loss(gen, disc, noise):
    fake, _ = generate(gen, {}, noise)
    return F.softplus(-judge(disc, {}, fake)[0]).mean()


def program(value, batch):
    """A training step, for whole trees: two updates of the critic, one of the generator."""
    gen, disc, gen_opt, disc_opt = value
    for i in range(2):
        noise, real = batch["noise"][:, i], batch["real"][:, i]
        # By the first argument; the generator is only read
        d_loss, grads = fz.value_and_grad(disc_loss)(disc, gen, noise, real)
        disc, disc_opt = disc_optimizer.apply(grads, disc_opt, disc)
    g_loss, grads = fz.value_and_grad(gen_loss)(gen, disc, noise)
    gen, gen_opt = gen_optimizer.apply(grads, gen_opt, gen)
    return Gan(gen, disc, gen_opt, disc_opt), {"d_loss": d_loss, "g_loss": g_loss}


def evaluate(value, batch):
    fake, _ = generate(value.gen, {}, batch["noise"][:, 0])
    return {"distance": torch.cdist(fake, MODES).min(1).values.mean()}


def draw(number: int, rows: int, group: fz.Group) -> dict[str, Tensor]:
    """This rank's part of a batch, which is a function of its number: (rows, critic updates, _)."""
    made = torch.Generator().manual_seed(number)
    noise = torch.randn(rows, 2, NOISE, generator=made, dtype=torch.float64)
    real = MODES[torch.randint(8, (rows, 2), generator=made)]
    real += 0.05 * torch.randn(rows, 2, 2, generator=made, dtype=torch.float64)
    return {"noise": noise[group.rank :: group.size], "real": real[group.rank :: group.size]}


def train(args: argparse.Namespace) -> None:
    """The work of one rank."""
    group = fz.ProcessGroup()
    options = {"level": {"gen": args.level, "disc": 1}, "group": group}
    step = fz.shard(fz.program_step(program, init=init), **options)
    check = fz.shard(fz.eval_step(evaluate), **options)
    state = step.init(first_gen, first_disc)
    if args.root and checkpoint.latest(args.root) is not None:
        state, _ = checkpoint.load(args.root, step, like=state)
    exam = draw(-1, 10 * ROWS, group)
    before = check(state, exam)
    for number in range(int(state.step), args.steps):
        state, metrics = step(state, draw(number, ROWS, group))
        if (number + 1) % 50 == 0 or number + 1 == args.steps:
            if args.root:
                checkpoint.save(args.root, step, state)
            if group.rank == 0:
                losses = [f"{name} {value:.9f}" for name, value in metrics.items()]
                print(f"step {number + 1}:", *losses)
    after = check(state, exam)
    if group.rank == 0:
        print(f"distance from the ring: {before['distance']:.4f} -> {after['distance']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", type=int, default=3, choices=range(4), help="the generator's")
    parser.add_argument("--ranks", type=int, default=2, help="processes, when torchrun did not")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--root", help="a folder of checkpoints; by default none is saved")
    args = parser.parse_args()
    fz.launch(train, args.ranks, args)


if __name__ == "__main__":
    main()
