"""Train on four workers of Ray Train, each on a machine of its own: one machine is lost, and three
workers go on from the checkpoint. The losses are those of a run to which nothing happened.

    $ pip install 'ray[train]'
    $ python examples/ray_train.py

The machines are four nodes that Ray simulates on this one.
"""

import argparse
import os
import signal
import tempfile

import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer

import functorch_zero as fz
from functorch_zero import checkpoint, optim

WORKERS = 4


def train(config: dict) -> None:
    """One worker, in each attempt: go on from the newest checkpoint, or begin."""
    torch.manual_seed(0)
    group = fz.ProcessGroup(timeout=20.0)  # of the workers, which Ray has introduced to each other
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    apply, params, buffers = fz.functionalize(model.double())

    def loss_fn(params, buffers, x):
        return (apply(params, buffers, x)[0] - x.sin().sum(1, keepdim=True)).square().mean()

    step = fz.shard(fz.train_step(loss_fn, optim.adamw(1e-2)), level=3, group=group)
    state, losses = step.init(params, buffers), []
    if checkpoint.latest(config["root"]) is not None:
        state, user = checkpoint.load(config["root"], step, like=state)
        losses = user["losses"]
    for number in range(len(losses), config["steps"]):
        if group.size == WORKERS and group.rank == 1 and number == config["lost_at"]:
            for process in (os.getppid(), os.getpid()):  # the machine's Ray, and this worker
                os.kill(process, signal.SIGKILL)
        torch.manual_seed(number)
        batch = torch.randn(12, 8, dtype=torch.float64)
        state, metrics = step(state, fz.data.share(batch, group))
        losses.append(float(metrics["loss"]))
        if len(losses) % 5 == 0:
            checkpoint.save(config["root"], step, state, user={"losses": losses})
    if group.rank == 0:
        torch.save({"losses": losses, "workers": group.size}, config["root"] + "/found")


def run(steps: int, lost_at: int | None) -> dict:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(WORKERS):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as root:
        failures = ray.train.FailureConfig(max_failures=3)
        trainer = TorchTrainer(
            train,
            train_loop_config={"root": f"{root}/saved", "steps": steps, "lost_at": lost_at},
            scaling_config=ray.train.ScalingConfig(num_workers=(WORKERS - 1, WORKERS)),
            run_config=ray.train.RunConfig(storage_path=root, failure_config=failures),
        )
        trainer.fit()
        found = torch.load(f"{root}/saved/found")
    ray.shutdown()
    cluster.shutdown()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lost-at", type=int, default=17, help="the step in which a machine is")
    whole, lost = run(30, None), run(30, parser.parse_args().lost_at)
    print(f"{whole['workers']} workers, then {lost['workers']}: loss {lost['losses'][-1]:.6f}")
    assert (whole["workers"], lost["workers"]) == (WORKERS, WORKERS - 1)
    torch.testing.assert_close(whole["losses"], lost["losses"], rtol=1e-12, atol=0)
