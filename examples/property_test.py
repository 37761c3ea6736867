"""Prove your own step: Hypothesis draws models and batches, and the sharded step must equal the
unsharded one.

    $ python examples/property_test.py
    $ pytest examples/property_test.py

Ranks are threads of this process, so a case takes milliseconds. The step here has a penalty on the
parameters, a weight per example and a global clip: each is a place where a sharded training loop is
easily wrong.
"""

import argparse
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import functorch_zero as fz
from functorch_zero import optim, testing

widths = st.lists(st.integers(1, 9), min_size=2, max_size=4)


def make_step(sizes: list[int], seed: int):
    """The step under test, with the parameters it starts from."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    apply, params, buffers = fz.functionalize(nn.Sequential(*layers).double(), units=nn.Linear)

    def loss_fn(params, buffers, batch):
        output, _ = apply(params, buffers, batch["x"])
        errors = (output - batch["y"]).square().mean(1)
        penalty = sum(leaf.square().sum() for leaf in fz.unshard(params).values())
        loss = (errors * batch["weight"]).sum() / batch["weight"].sum() + 1e-3 * penalty
        return loss, fz.Aux(weight=batch["weight"].sum())

    optimizer = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    return fz.train_step(loss_fn, optimizer), params, buffers


def make_batch(sizes: list[int], num: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num, sizes[0], generator=g, dtype=torch.float64)
    y = torch.randn(num, sizes[-1], generator=g, dtype=torch.float64)
    return {"x": x, "y": y, "weight": torch.rand(num, generator=g, dtype=torch.float64) + 0.1}


def check_case(sizes: list[int], ranks: int, level: int, seed: int) -> None:
    step, params, buffers = make_step(sizes, seed)
    batches = [make_batch(sizes, 2 * ranks, seed + i) for i in range(2)]
    testing.assert_sharded_equals_unsharded(
        step, params, buffers, batches, levels=(level,), ranks=(ranks,)
    )


cases = given(widths, st.integers(1, 5), st.sampled_from([0, 1, 2, 3]), st.integers(0, 2**16))
test_step_on_any_ranks_equals_step_on_one = settings(max_examples=20, deadline=None)(
    cases(check_case)
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=20, help="cases to draw")
    args = parser.parse_args()
    settings(max_examples=args.examples, deadline=None, derandomize=True)(cases(check_case))()
    print(f"{args.examples} cases drawn, sharded and unsharded steps equal in all of them")


if __name__ == "__main__":
    main()
