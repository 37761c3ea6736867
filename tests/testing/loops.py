"""A training loop by hand, on any group of ranks, and what goes wrong in such loops: each fault
overrides one method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from functorch_zero.testing import Recorder
from tests.modules import Net

DTYPE = torch.float64


def batches(steps: int, rows: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(steps, rows, 5, generator=generator, dtype=torch.float64)
    return [{"x": x.to(dtype), "y": x.sin().sum(1, keepdim=True).to(dtype)} for x in xs]


def two_layers(dropout: float = 0.0) -> Net:
    """Two layers, of which one is used twice, and a buffer that follows the activations."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.dropout(net.up(x).tanh())
        net.last = x.detach()  # (rows, 6), for the buffer
        return net.head(net.again(net.middle(x).tanh()).tanh())

    net = Net(
        forward,
        up=nn.Linear(5, 6),
        middle=nn.Linear(6, 6),
        again=nn.Linear(6, 6),
        head=nn.Linear(6, 1),
        dropout=nn.Dropout(dropout),
        mean=torch.zeros(6),
    )
    net.again.weight = net.middle.weight
    return net


class Loop:
    """Data parallel: gradients are averaged, clipped by their norm, and given to torch's
    optimizer, whose learning rate follows a schedule."""

    steps, rows = 4, 12
    micro_batches = 1
    max_norm = 0.05
    dropout = 0.0
    dtype = DTYPE

    def __call__(self, record: Recorder) -> None:
        self.group, self.last_gradients = record.group, {}
        torch.manual_seed(0)
        self.net = self.model()
        self.optimizer = self.make_optimizer()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        if record.load_from:
            self.load(torch.load(record.load_from / "run"))
        record.start(self.net)
        for batch in record.batches(batches(self.steps, self.rows, self.dtype)):
            loss = self.backward(batch)
            self.reduce()
            record.gradients(self.net)
            norm = self.clip()
            self.step()
            record.step(self.net, self.optimizer, loss=self.logged(loss), norm=norm)
            self.schedule.step()
            self.zero()
        if record.save_to and self.group.rank == 0:
            torch.save(self.saved(), record.save_to / "run")

    def model(self) -> Net:
        return two_layers(self.dropout).to(self.dtype)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, weight_decay=0.1)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The params and their gradients, some of which are lost."""
        for name, param in self.net.named_parameters():
            if param.grad is not None:
                yield name, param.grad

    def backward(self, batch: dict[str, Tensor]) -> Tensor:
        weight = self.weight(len(batch["x"]))
        micro = zip(*(x.chunk(self.micro_batches) for x in batch.values()), strict=True)
        total, mean = torch.zeros((), dtype=self.dtype), torch.zeros(6, dtype=self.dtype)
        for x, y in micro:
            counts = weight * self.share_of(len(x), len(batch["x"]))
            loss = counts * self.loss(x, y)
            loss.backward()
            total += loss.detach()
            mean += weight * len(x) / len(batch["x"]) * self.net.last.mean(0)
        self.follow(mean)
        return total

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().mean()

    def weight(self, rows: int) -> float:
        """How much this rank's rows count beside the others'."""
        if self.group.size == 1:
            return 1.0
        return rows * self.group.size / self.rows

    def share_of(self, rows: int, all_rows: int) -> float:
        """How much a micro-batch's loss counts."""
        return rows / all_rows

    def follow(self, mean: Tensor) -> None:
        self.net.mean.lerp_(self.mean_of_ranks(mean), 0.1)

    def mean_of_ranks(self, x: Tensor) -> Tensor:
        flat = x.detach().clone().view(-1)
        self.group.all_reduce(flat).wait()
        return flat.view_as(x) / self.group.size

    def reduce(self) -> None:
        for _, grad in self.named():
            grad.copy_(self.mean_of_ranks(grad))

    def norm(self) -> Tensor:
        return torch.stack([grad.norm() for _, grad in self.named()]).norm()

    def clip(self) -> Tensor:
        norm = self.norm()
        for _, grad in self.named():
            grad *= min(1.0, self.max_norm / (float(norm) + 1e-12))
        return norm

    def step(self) -> None:
        self.optimizer.step()

    def logged(self, loss: Tensor) -> Tensor:
        return self.mean_of_ranks(loss)

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def saved(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])


class Momentum(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.5, momentum=0.9)


class Float32(Loop):
    dtype = torch.float32


class Autocast(Float32):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return super().loss(x, y)


class BFloat16(Loop):
    dtype = torch.bfloat16
    steps = 2

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=32.0)  # beyond the params' last places


class Odd(Loop):
    """A frozen param, an empty one, and a count."""

    steps = 5

    def model(self) -> Net:
        net = super().model()
        net.frozen = nn.Parameter(torch.ones(3, dtype=self.dtype), requires_grad=False)
        net.empty = nn.Parameter(torch.zeros(0, 4, dtype=self.dtype))
        net.register_buffer("count", torch.tensor(7))
        return net


# Faults of gradients


class Summed(Loop):
    def reduce(self) -> None:
        super().reduce()
        for _, grad in self.named():
            grad *= self.group.size


class Divided(Loop):
    def reduce(self) -> None:
        super().reduce()
        for _, grad in self.named():
            grad /= self.group.size


class DividedTwice(Loop):
    def reduce(self) -> None:
        super().reduce()
        for _, grad in self.named():
            grad /= self.group.size**2


class FirstRankOnly(Loop):
    def reduce(self) -> None:
        for _, grad in self.named():
            self.group.broadcast(grad.view(-1), 0).wait()


class Unreduced(Loop):
    """One leaf that the all-reduce leaves out."""

    def reduce(self) -> None:
        for name, grad in self.named():
            if name != "up.weight":
                grad.copy_(self.mean_of_ranks(grad))


class MissingOnARank(Loop):
    def reduce(self) -> None:
        super().reduce()
        if self.group.rank == 1:
            self.net.head.weight.grad = None


class NotDivided(Loop):
    """Micro-batches whose gradients are summed."""

    micro_batches = 4

    def share_of(self, rows: int, all_rows: int) -> float:
        return 1.0 if self.group.size > 1 else super().share_of(rows, all_rows)

    def logged(self, loss: Tensor) -> Tensor:
        return super().logged(loss) / (self.micro_batches if self.group.size > 1 else 1)


class Unweighted(Loop):
    """Unequal numbers of rows that count the same."""

    rows = 13

    def weight(self, rows: int) -> float:
        return 1.0

    def logged(self, loss: Tensor) -> Tensor:
        return torch.ones(())


class Stale(Loop):
    def reduce(self) -> None:
        super().reduce()
        new = {name: grad.clone() for name, grad in self.named()}
        if self.group.size > 1:
            for name, grad in self.named():
                grad.copy_(self.last_gradients.get(name, torch.zeros_like(grad)))
        self.last_gradients = new


class NotZeroed(Loop):
    max_norm = 1e9  # an accumulated gradient is told as it is

    def zero(self) -> None:
        if self.group.size == 1:
            super().zero()

    def reduce(self) -> None:
        before = self.last_gradients
        if self.group.size > 1:
            for name, grad in self.named():
                grad.sub_(before.get(name, torch.zeros_like(grad)))
        super().reduce()
        if self.group.size > 1:
            for name, grad in self.named():
                grad.add_(before.get(name, torch.zeros_like(grad)))
        self.last_gradients = {name: grad.clone() for name, grad in self.named()}


class TiedTwice(Loop):
    def reduce(self) -> None:
        super().reduce()
        if self.group.size > 1:
            self.net.middle.weight.grad *= 2


class Experts(Loop):
    """A leaf that is reduced over the wrong ranks, 8 of them."""

    def reduce(self) -> None:
        super().reduce()
        if self.group.size > 1:
            self.net.up.weight.grad *= 8


class PiecesSwapped(Loop):
    def reduce(self) -> None:
        super().reduce()
        if self.group.size > 1:
            grad = self.net.up.weight.grad
            grad.copy_(torch.cat([*reversed(grad.chunk(self.group.size))]))


# Faults of the loss and the norm


class OwnLoss(Loop):
    """Rank 0 logs the loss of its own rows."""

    def logged(self, loss: Tensor) -> Tensor:
        loss = loss.clone()
        self.group.broadcast(loss.view(1), 0).wait()
        return loss


class SquaresSummed(Loop):
    def norm(self) -> Tensor:
        return (self.group.size * self.mean_of_ranks(super().norm().square())).sqrt()


class PieceNorm(Loop):
    def norm(self) -> Tensor:
        flat = torch.cat([grad.flatten() for _, grad in self.named()])
        return flat.tensor_split(self.group.size)[self.group.rank].norm()


class NormWithoutHead(Loop):
    def norm(self) -> Tensor:
        every = [g.norm() for n, g in self.named() if self.group.size == 1 or n != "head.weight"]
        return torch.stack(every).norm()


class NormOfOwn(Loop):
    """The norm of a rank's own gradients, before they are reduced."""

    def reduce(self) -> None:
        self.own = super().norm()
        super().reduce()

    def norm(self) -> Tensor:
        return self.mean_of_ranks(self.own)


# Faults of updates, state and buffers


class AdamAhead(Loop):
    def step(self) -> None:
        if self.group.size > 1 and not self.optimizer.state:
            # One step with gradients of zero, and params that rest
            params = {name: p.detach().clone() for name, p in self.net.named_parameters()}
            gradients = {name: grad.clone() for name, grad in self.named()}
            for _, grad in self.named():
                grad.zero_()
            super().step()
            for name, param in self.net.named_parameters():
                param.data.copy_(params[name])
                param.grad = gradients[name]
        super().step()


class WeightDecay(Loop):
    def make_optimizer(self) -> torch.optim.Optimizer:
        decay = 0.2 if self.group.size > 1 else 0.1
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, weight_decay=decay)


class DecayedTwice(Loop):
    """Decay that is no setting of the optimizer."""

    def step(self) -> None:
        if self.group.size > 1:
            for param in self.net.parameters():
                param.data *= 1 - 1e-3
        super().step()


class LearningRate(Momentum):
    def make_optimizer(self) -> torch.optim.Optimizer:
        lr = 0.1 * self.group.size
        return torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9)


class LeftOut(Loop):
    """A leaf that is in no param group on ranks."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        params = [p for p in self.net.parameters() if self.group.size == 1 or p.dim() == 2]
        return torch.optim.AdamW(params, lr=1e-2)


class FrozenMoves(Odd):
    def step(self) -> None:
        super().step()
        if self.group.size > 1:
            self.net.frozen.data += 1e-9


class OnePiece(Momentum):
    """Each rank updates its rows of a leaf, and only rank 0's are gathered."""

    def step(self) -> None:
        old = self.net.middle.weight.detach().clone()
        super().step()
        if self.group.size > 1:
            rows = -(-len(old) // self.group.size)
            self.net.middle.weight.data[rows:] = old[rows:]


class ReducedAfterwards(Loop):
    """Each rank's optimizer takes its own gradients, and the params are averaged."""

    def reduce(self) -> None:
        pass

    def clip(self) -> Tensor:
        return torch.ones(())

    def step(self) -> None:
        super().step()
        for param in self.net.parameters():
            param.data.copy_(self.mean_of_ranks(param.data))


class Replicas(Loop):
    """Ranks that draw their own first params."""

    def model(self) -> Net:
        torch.manual_seed(self.group.rank)
        return super().model()


class Drifting(Loop):
    """Replicas that are apart by a rounding."""

    def step(self) -> None:
        super().step()
        if self.group.rank == 1:
            self.net.up.weight.data *= 1 + 2**-52


class OwnBuffers(Loop):
    def follow(self, mean: Tensor) -> None:
        self.net.mean.lerp_(mean, 0.1)


class Dropout(Loop):
    dropout = 0.5


# Faults of a resumed run


class LosesMomentum(Momentum):
    def load(self, saved: dict[str, Any]) -> None:
        self.net.load_state_dict(saved["net"])
        self.schedule.load_state_dict(saved["schedule"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.get_last_lr()[0]


class LosesAdam(Loop):
    load = LosesMomentum.load


class LosesTheStep(Loop):
    def load(self, saved: dict[str, Any]) -> None:
        for state in saved["optimizer"]["state"].values():
            state["step"] = torch.zeros(())
        super().load(saved)


class LosesTheSchedule(Loop):
    def load(self, saved: dict[str, Any]) -> None:
        del saved["schedule"]
        for group in saved["optimizer"]["param_groups"]:
            group["lr"] = 1e-2
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])


class LosesParams(Loop):
    def load(self, saved: dict[str, Any]) -> None:
        saved["net"] = self.net.state_dict()
        super().load(saved)


class LosesBuffers(Loop):
    def load(self, saved: dict[str, Any]) -> None:
        saved["net"]["mean"] = torch.zeros(6, dtype=self.dtype)
        super().load(saved)


class NearlyScaled(Loop):
    """One leaf, late, and by little."""

    def reduce(self) -> None:
        super().reduce()
        if self.group.size > 1 and self.schedule.last_epoch == 3:
            self.net.up.weight.grad *= 1.0001


class NearlyRight(Loop):
    """Off by what no mistake gives, and more than roundings."""

    def reduce(self) -> None:
        super().reduce()
        if self.group.size > 1:
            grad: Any = self.net.up.weight.grad
            grad *= 1 + 1e-9 * torch.arange(grad.numel()).to(grad).view_as(grad).cos()


class Explodes(Loop):
    """A right loop, whose params are infinite at last."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) * (torch.inf if self.schedule.last_epoch == 2 else 1.0)
