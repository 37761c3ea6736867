"""Write an optimizer transform, check what it says of itself, and train with it on shards.

$ python examples/custom_transform.py
"""

import argparse

import torch
import torch.nn.functional as F
from optree import tree_map
from torch import nn

import functorch_zero as fz
from functorch_zero import optim, testing


def scale_by_trust_ratio(eps: float = 1e-6) -> optim.Transform:
    """Scale each leaf's update by |param| / |update|, as LARS and LAMB do."""

    def update(updates, state, params, across):
        # 0-d per leaf, of the whole leaf, wherever it lies
        param_norms, update_norms = across.norm(params, updates)
        return tree_map(
            lambda u, p, n: u * (p + eps) / (n + eps), updates, param_norms, update_norms
        ), state

    return optim.with_statistics(lambda params: (), update)


def scale_by_own_norm() -> optim.Transform:
    """The same idea written wrongly: on a rank's piece of a leaf, `u.norm()` is not the leaf's
    norm."""

    def update(updates, state, params):
        return tree_map(lambda u: u / u.norm(), updates), state

    return optim.pointwise(lambda params: (), update)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    args = parser.parse_args()

    testing.check_transform(scale_by_trust_ratio())
    print("scale_by_trust_ratio: does what it says")
    try:
        testing.check_transform(scale_by_own_norm())
    except ValueError as error:
        print(f"scale_by_own_norm: {error}")

    torch.manual_seed(0)
    apply, params, buffers = fz.functionalize(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    )

    def loss_fn(params, buffers, batch):
        predicted, _ = apply(params, buffers, batch["x"])
        return F.mse_loss(predicted, batch["y"])

    optimizer = optim.chain(
        optim.scale_by_adam(), scale_by_trust_ratio(), optim.scale_by_learning_rate(1e-2)
    )
    step = fz.train_step(loss_fn, optimizer)
    x = torch.randn(3, 12, 5, dtype=torch.float64)
    batches = [{"x": x[i], "y": x[i].sum(1, keepdim=True)} for i in range(3)]
    testing.assert_sharded_equals_unsharded(
        step, params, buffers, batches, levels=(0, 1, 2, 3), ranks=args.ranks
    )
    print(f"sharded and unsharded steps are equal at every level on {args.ranks} ranks")


if __name__ == "__main__":
    main()
