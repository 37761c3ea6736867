"""Programs of several gradients and updates, each beside a loop in plain torch that shares no code
with the library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from optree import tree_map
from torch import Tensor, nn
from torch.func import functional_call

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.step.program_step import ProgramStep
from tests.programs.case import Batch, Case, Plain, applied, descend, net
from tests.programs.teachers import byol, dino, dino_weighted

# A GAN: two critic updates per step, with a penalty on the critic's gradient (R1)


class Gan(NamedTuple):
    gen: Any
    disc: Any
    gen_opt: Any
    disc_opt: Any


def critic_loss_of(judge: Any, fake: Tensor, real: Tensor) -> Tensor:
    """Mescheder et al., "Which Training Methods for GANs do actually Converge?" (2018)."""
    real = real.detach().requires_grad_()
    on_real = judge(real)
    (slope,) = torch.autograd.grad(on_real.sum(), real, create_graph=True)
    penalty = slope.square().sum(1).mean()
    return F.softplus(judge(fake)).mean() + F.softplus(-on_real).mean() + 0.5 * penalty


def gan() -> Case:
    modules = {"gen": net(1, 3, 5, 4), "disc": net(2, 4, 7, 1)}
    generate, judge = applied(modules["gen"]), applied(modules["disc"])
    gen_optimizer = optim.adam(0.02)
    disc_optimizer = optim.chain(optim.clip_by_global_norm(0.2), optim.adamw(0.01))

    def init(gen: Any, disc: Any) -> Gan:
        return Gan(gen, disc, gen_optimizer.init(gen), disc_optimizer.init(disc))

    def disc_loss(disc: Any, gen: Any, noise: Tensor, real: Tensor) -> Tensor:
        return critic_loss_of(lambda x: judge(disc, x), generate(gen, noise), real)

    def gen_loss(gen: Any, disc: Any, noise: Tensor) -> Tensor:
        return F.softplus(-judge(disc, generate(gen, noise))).mean()

    def program(value: Gan, batch: Batch) -> Any:
        disc, disc_opt = value.disc, value.disc_opt
        for i in range(2):
            noise, real = batch[f"noise{i}"], batch[f"real{i}"]
            d_loss, grads = fz.value_and_grad(disc_loss)(disc, value.gen, noise, real)
            disc, disc_opt = disc_optimizer.apply(grads, disc_opt, disc)
        g_loss, grads = fz.value_and_grad(gen_loss)(value.gen, disc, batch["noise0"])
        gen, gen_opt = gen_optimizer.apply(grads, value.gen_opt, value.gen)
        return Gan(gen, disc, gen_opt, disc_opt), {"d_loss": d_loss, "g_loss": g_loss}

    def plain(batches: list[Batch], gen: nn.Module, disc: nn.Module) -> Plain:
        gen_opt = torch.optim.Adam(gen.parameters(), 0.02)
        disc_opt = torch.optim.AdamW(disc.parameters(), 0.01)
        metrics = []
        for batch in batches:
            for i in range(2):
                disc_opt.zero_grad()
                d_loss = critic_loss_of(disc, gen(batch[f"noise{i}"]), batch[f"real{i}"])
                d_loss.backward()
                # By hand, since torch's function adds 1e-6 to the norm
                slopes = [p.grad for p in disc.parameters() if p.grad is not None]
                norm = torch.cat([slope.flatten() for slope in slopes]).norm()
                for slope in slopes:
                    slope *= min(1.0, 0.2 / float(norm))
                disc_opt.step()
            g_loss = F.softplus(-disc(gen(batch["noise0"]))).mean()
            descend(gen_opt, g_loss)
            metrics.append({"d_loss": d_loss.detach(), "g_loss": g_loss.detach()})
        return Plain({"gen": gen, "disc": disc}, metrics)

    widths = {"noise0": 3, "noise1": 3, "real0": 4, "real1": 4}
    return Case(fz.program_step(program, init=init), modules, widths, plain)


# A GAN whose critic has BatchNorm, which sees one rank's rows at a time


class NormGan(NamedTuple):
    gen: Any
    disc: Any
    gen_opt: Any
    disc_opt: Any
    buffers: Any  # by tree, whole on every rank


def backward_by_rank(
    loss: Callable[[Batch], Tensor], batch: Batch, ranks: int, module: nn.Module
) -> Tensor:
    """The mean of the losses of all ranks' parts.

    Gradients are added to, as by `backward`. Each part finds the module's buffers as they were, and
    those after it are averaged.
    """
    before = {name: x.clone() for name, x in module.named_buffers()}
    after: dict[str, list[Tensor]] = {name: [] for name in before}
    losses = []
    for rank in range(ranks):
        for name, x in module.named_buffers():
            x.copy_(before[name])
        found = loss({name: x.chunk(ranks)[rank] for name, x in batch.items()})
        (found / ranks).backward()
        losses.append(found.detach())
        for name, x in module.named_buffers():
            after[name].append(x.clone())
    for name, x in module.named_buffers():
        x.copy_(torch.stack(after[name]).double().mean(0))
    return torch.stack(losses).mean()


def norm_gan() -> Case:
    torch.manual_seed(13)
    first, hidden = nn.Linear(4, 6), nn.Linear(6, 7, bias=False)
    layers = [first, nn.Tanh(), hidden, nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)]
    modules = {"gen": net(14, 3, 5, 4), "disc": nn.Sequential(*layers).double()}
    generate = applied(modules["gen"])
    judge, _, disc_buffers = fz.functionalize(modules["disc"], units=nn.Linear)
    sgd, adam = optim.sgd(0.1, momentum=0.9), optim.adam(0.02)

    def init(gen: Any, disc: Any) -> NormGan:
        return NormGan(gen, disc, sgd.init(gen), adam.init(disc), {"disc": disc_buffers})

    def disc_loss(disc: Any, gen: Any, *, buffers: Any, batch: Batch) -> Any:
        on_fake, after = judge(disc, buffers["disc"], generate(gen, batch["noise"]))
        on_real, after = judge(disc, after, batch["real"])
        loss = F.softplus(on_fake).mean() + F.softplus(-on_real).mean()
        return loss, fz.Aux(buffers={"disc": after})

    def gen_loss(gen: Any, disc: Any, *, buffers: Any, batch: Batch) -> Any:
        on_fake, after = judge(disc, buffers["disc"], generate(gen, batch["noise"]))
        return F.softplus(-on_fake).mean(), fz.Aux(buffers={"disc": after})

    def program(value: NormGan, batch: Batch) -> Any:
        gen, disc, gen_opt, disc_opt, buffers = value
        of_disc, of_gen = fz.value_and_grad(disc_loss), fz.value_and_grad(gen_loss)
        (d_loss, _, buffers), grads = of_disc(disc, gen, buffers=buffers, batch=batch)
        disc, disc_opt = adam.apply(grads, disc_opt, disc)
        (g_loss, _, buffers), grads = of_gen(gen, disc, buffers=buffers, batch=batch)
        gen, gen_opt = sgd.apply(grads, gen_opt, gen)
        metrics = {"d_loss": d_loss, "g_loss": g_loss}
        return NormGan(gen, disc, gen_opt, disc_opt, buffers), metrics

    def plain(batches: list[Batch], gen: nn.Module, disc: nn.Module, *, ranks: int) -> Plain:
        def on_disc(part: Batch) -> Tensor:
            on_fake, on_real = disc(gen(part["noise"])), disc(part["real"])
            return F.softplus(on_fake).mean() + F.softplus(-on_real).mean()

        def on_gen(part: Batch) -> Tensor:
            return F.softplus(-disc(gen(part["noise"]))).mean()

        gen_opt = torch.optim.SGD(gen.parameters(), 0.1, momentum=0.9)
        disc_opt = torch.optim.Adam(disc.parameters(), 0.02)
        metrics = []
        for batch in batches:
            disc_opt.zero_grad()
            d_loss = backward_by_rank(on_disc, batch, ranks, disc)
            disc_opt.step()
            gen_opt.zero_grad()
            g_loss = backward_by_rank(on_gen, batch, ranks, disc)
            gen_opt.step()
            metrics.append({"d_loss": d_loss, "g_loss": g_loss})
        return Plain({"gen": gen, "disc": disc}, metrics)

    step = fz.program_step(program, init=init)
    return Case(step, modules, {"noise": 3, "real": 4}, plain, by_rank=True)


# Sharpness-aware minimisation: the gradient at a displaced copy, as one step


class Trained(NamedTuple):
    params: Any
    opt: Any


def beginning(optimizer: optim.Transform) -> Callable[[Any], Trained]:
    return lambda params: Trained(params, optimizer.init(params))


def one_update(loss: Callable[[Any, Batch], Tensor], optimizer: optim.Transform) -> ProgramStep:
    def program(value: Trained, batch: Batch) -> Any:
        found, grads = fz.value_and_grad(loss)(value.params, batch)
        params, opt = optimizer.apply(grads, value.opt, value.params)
        return Trained(params, opt), {"loss": found}

    return fz.program_step(program, init=beginning(optimizer))


def sam() -> Case:
    modules = {"params": net(3, 4, 6, 2)}
    forward = applied(modules["params"])
    sgd = optim.sgd(0.1, momentum=0.9)

    def loss(params: Any, x: Tensor) -> Tensor:
        return forward(params, x).square().mean()

    def program(value: Trained, batch: Batch) -> Any:
        found, grads = fz.value_and_grad(loss)(value.params, batch["x"])
        radius = 0.05 / fz.dot(grads, grads).sqrt()
        away = fz.apply_updates(value.params, tree_map(lambda g: radius * g, grads))
        _, grads = fz.value_and_grad(loss)(away, batch["x"])
        params, opt = sgd.apply(grads, value.opt, value.params)
        return Trained(params, opt), {"loss": found, "radius": radius}

    def plain(batches: list[Batch], params: nn.Module) -> Plain:
        """Foret et al., "Sharpness-Aware Minimization" (2021)."""
        leaves, metrics = [*params.parameters()], []
        opt = torch.optim.SGD(leaves, 0.1, momentum=0.9)
        for batch in batches:
            found = params(batch["x"]).square().mean()
            grads = torch.autograd.grad(found, leaves)
            radius = 0.05 / torch.cat([g.flatten() for g in grads]).norm()
            with torch.no_grad():
                kept = [p.clone() for p in leaves]
                for p, g in zip(leaves, grads, strict=True):
                    p += radius * g
            opt.zero_grad()
            params(batch["x"]).square().mean().backward()
            with torch.no_grad():
                for p, old in zip(leaves, kept, strict=True):
                    p.copy_(old)
            opt.step()
            metrics.append({"loss": found.detach(), "radius": radius})
        return Plain({"params": params}, metrics)

    return Case(fz.program_step(program, init=beginning(sgd)), modules, {"x": 4}, plain)


# PCGrad: gradients of three tasks, each without its part against the others


def pcgrad() -> Case:
    modules = {"params": net(4, 4, 6, 3)}
    forward = applied(modules["params"])
    adam = optim.adam(0.02)

    def loss_of(task: int) -> Callable[[Any, Batch], Tensor]:
        def loss(params: Any, batch: Batch) -> Tensor:
            return (forward(params, batch["x"])[:, task] - batch["y"][:, task]).square().mean()

        return loss

    def without(own: Any, other: Any) -> Any:
        """A gradient without its part against another one."""
        against = fz.dot(own, other).clamp(max=0) / fz.dot(other, other)
        return tree_map(lambda g, o: g - against * o, own, other)

    def program(value: Trained, batch: Batch) -> Any:
        grads, losses = [], {}
        for task in range(3):
            losses[f"loss{task}"], found = fz.value_and_grad(loss_of(task))(value.params, batch)
            grads.append(found)
        total = tree_map(torch.zeros_like, grads[0])
        for i, own in enumerate(grads):
            for j, other in enumerate(grads):
                if i != j:
                    own = without(own, other)
            total = tree_map(torch.add, total, own)
        params, opt = adam.apply(total, value.opt, value.params)
        return Trained(params, opt), losses

    def plain(batches: list[Batch], params: nn.Module) -> Plain:
        """Yu et al., "Gradient Surgery for Multi-Task Learning" (2020), tasks in order."""
        leaves, metrics = [*params.parameters()], []
        opt = torch.optim.Adam(leaves, 0.02)
        for batch in batches:
            errors = (params(batch["x"]) - batch["y"]).square().mean(0)
            flat = []
            for error in errors:
                parts = torch.autograd.grad(error, leaves, retain_graph=True)
                flat.append(torch.cat([part.flatten() for part in parts]))
            total = torch.zeros_like(flat[0])
            for i, own in enumerate(flat):
                for j, other in enumerate(flat):
                    if i != j and own @ other < 0:
                        own = own - (own @ other) / (other @ other) * other
                total += own
            sizes = [p.numel() for p in leaves]
            for p, part in zip(leaves, total.split(sizes), strict=True):
                p.grad = part.view_as(p)
            opt.step()
            metrics.append({f"loss{i}": error.detach() for i, error in enumerate(errors)})
        return Plain({"params": params}, metrics)

    return Case(fz.program_step(program, init=beginning(adam)), modules, {"x": 4, "y": 3}, plain)


# MAML: an inner step by torch.func.grad, and the outer gradient through it; a task per row


def maml() -> Case:
    modules = {"params": net(5, 2, 6, 1)}
    forward = applied(modules["params"])

    def inner(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (forward(params, x) - y).square().mean()

    def loss(params: Any, batch: Batch) -> Tensor:
        whole = fz.unshard(params)
        losses = []
        # Each (16,): four points (x, x, y) to adapt to, and one to be judged by
        for task in batch["tasks"]:
            points = task[:15].view(5, 3)
            x, y = points[:, :2], points[:, 2:]
            grads = torch.func.grad(inner)(whole, x[:4], y[:4])
            fast = tree_map(lambda p, g: p - 0.1 * g, whole, grads)
            losses.append(inner(fast, x[4:], y[4:]))
        return torch.stack(losses).mean()

    def plain(batches: list[Batch], params: nn.Module) -> Plain:
        """Finn et al., "Model-Agnostic Meta-Learning" (2017)."""
        leaves, metrics = dict(params.named_parameters()), []
        opt = torch.optim.Adam(leaves.values(), 0.02)
        for batch in batches:
            losses = []
            for task in batch["tasks"]:
                points = task[:15].view(5, 3)
                x, y = points[:, :2], points[:, 2:]
                error = (params(x[:4]) - y[:4]).square().mean()
                grads = torch.autograd.grad(error, [*leaves.values()], create_graph=True)
                fast = {}
                for (name, p), g in zip(leaves.items(), grads, strict=True):
                    fast[name] = p - 0.1 * g
                losses.append((functional_call(params, fast, (x[4:],)) - y[4:]).square().mean())
            found = torch.stack(losses).mean()
            descend(opt, found)
            metrics.append({"loss": found.detach()})
        return Plain({"params": params}, metrics)

    return Case(one_update(loss, optim.adam(0.02)), modules, {"tasks": 16}, plain, rows=30)


# Reptile: three inner steps, and a part of the way that they went


class Params(NamedTuple):
    params: Any


def reptile() -> Case:
    modules = {"params": net(6, 3, 5, 2)}
    forward = applied(modules["params"])

    def loss(params: Any, x: Tensor) -> Tensor:
        return forward(params, x).square().mean()

    def program(value: Params, batch: Batch) -> Any:
        fast, losses = value.params, []
        for _ in range(3):
            found, grads = fz.value_and_grad(loss)(fast, batch["x"])
            losses.append(found)
            fast = fz.apply_updates(fast, tree_map(lambda g: -0.1 * g, grads))
        params = tree_map(lambda p, f: p + 0.3 * (f - p), value.params, fast)
        return Params(params), {"first": losses[0], "last": losses[-1]}

    def plain(batches: list[Batch], params: nn.Module) -> Plain:
        """Nichol et al., "On First-Order Meta-Learning Algorithms" (2018)."""
        metrics = []
        for batch in batches:
            fast, losses = copy.deepcopy(params), []
            opt = torch.optim.SGD(fast.parameters(), 0.1)
            for _ in range(3):
                found = fast(batch["x"]).square().mean()
                losses.append(found.detach())
                descend(opt, found)
            with torch.no_grad():
                for p, f in zip(params.parameters(), fast.parameters(), strict=True):
                    p += 0.3 * (f - p)
            metrics.append({"first": losses[0], "last": losses[-1]})
        return Plain({"params": params}, metrics)

    return Case(fz.program_step(program, init=Params), modules, {"x": 3}, plain)


# PPO: epochs over minibatches within one step, actor and critic apart


class ActorCritic(NamedTuple):
    actor: Any
    critic: Any
    actor_opt: Any
    critic_opt: Any


def ppo_case(minibatches: Callable[[Batch, int], list[Batch]]) -> Case:
    """`minibatches` gives those of an epoch."""
    modules = {"actor": net(9, 3, 6, 2), "critic": net(10, 3, 5, 1)}
    act, judge = applied(modules["actor"]), applied(modules["critic"])
    adam, rmsprop = optim.adam(0.02), optim.rmsprop(0.01)

    def gain(logits: Tensor, batch: Batch) -> Tensor:
        """Schulman et al., "Proximal Policy Optimization" (2017): the clipped gain."""
        ratio = (logits.log_softmax(1)[:, 0] - batch["old"][:, 0].clamp(-1, -0.1)).exp()
        advantage = batch["advantage"][:, 0]
        return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    def actor_loss(actor: Any, batch: Batch) -> Any:
        return -gain(act(actor, batch["x"]), batch), fz.Aux(weight=len(batch["x"]))

    def critic_loss(critic: Any, batch: Batch) -> Any:
        loss = F.mse_loss(judge(critic, batch["x"]), batch["returns"])
        return loss, fz.Aux(weight=len(batch["x"]))

    def init(actor: Any, critic: Any) -> ActorCritic:
        return ActorCritic(actor, critic, adam.init(actor), rmsprop.init(critic))

    def program(value: ActorCritic, batch: Batch) -> Any:
        actor, critic, actor_opt, critic_opt = value
        for epoch in range(2):
            for part in minibatches(batch, epoch):
                (a_loss, _), grads = fz.value_and_grad(actor_loss)(actor, part)
                actor, actor_opt = adam.apply(grads, actor_opt, actor)
                (c_loss, _), grads = fz.value_and_grad(critic_loss)(critic, part)
                critic, critic_opt = rmsprop.apply(grads, critic_opt, critic)
        metrics = {"actor": a_loss, "critic": c_loss}
        return ActorCritic(actor, critic, actor_opt, critic_opt), metrics

    def plain(batches: list[Batch], actor: nn.Module, critic: nn.Module) -> Plain:
        actor_opt = torch.optim.Adam(actor.parameters(), 0.02)
        critic_opt = torch.optim.RMSprop(critic.parameters(), 0.01)
        metrics = []
        for batch in batches:
            for epoch in range(2):
                for part in minibatches(batch, epoch):
                    a_loss = -gain(actor(part["x"]), part)
                    descend(actor_opt, a_loss)
                    c_loss = F.mse_loss(critic(part["x"]), part["returns"])
                    descend(critic_opt, c_loss)
            metrics.append({"actor": a_loss.detach(), "critic": c_loss.detach()})
        return Plain({"actor": actor, "critic": critic}, metrics)

    widths = {"x": 3, "old": 1, "advantage": 1, "returns": 1, "order": 2}
    return Case(fz.program_step(program, init=init), modules, widths, plain)


def ppo() -> Case:
    def minibatches(batch: Batch, epoch: int) -> list[Batch]:
        # By every other row, so that the parts of a batch have their minibatches' parts
        return [{name: x[start::2] for name, x in batch.items()} for start in range(2)]

    return ppo_case(minibatches)


def ppo_shuffled() -> Case:
    def minibatches(batch: Batch, epoch: int) -> list[Batch]:
        """Others in each epoch, to which each rank has another number of rows."""
        first = batch["order"][:, epoch] > 0
        return [{name: x[chosen] for name, x in batch.items()} for chosen in (first, ~first)]

    return ppo_case(minibatches)


# MeanFlow: the loss differentiates the network forward, by jvp


def mean_flow() -> Case:
    modules = {"params": net(11, 4, 8, 2)}
    forward = applied(modules["params"])

    def loss_of(velocity: Callable[[Tensor, Tensor, Tensor], Tensor], batch: Batch) -> Tensor:
        """Geng et al., "Mean Flows for One-step Generative Modeling" (2025)."""
        data, noise = batch["data"], batch["noise"]
        t = batch["times"].sigmoid().max(1, keepdim=True).values
        r = batch["times"].sigmoid().min(1, keepdim=True).values
        z, v = (1 - t) * data + t * noise, noise - data
        tangents = v, torch.zeros_like(r), torch.ones_like(t)
        u, du = torch.func.jvp(velocity, (z, r, t), tangents)
        return (u - (v - (t - r) * du).detach()).square().sum(1).mean()

    def loss(params: Any, batch: Batch) -> Tensor:
        return loss_of(lambda z, r, t: forward(params, torch.cat([z, r, t], 1)), batch)

    def plain(batches: list[Batch], params: nn.Module) -> Plain:
        opt, metrics = torch.optim.Adam(params.parameters(), 0.02), []
        for batch in batches:
            found = loss_of(lambda z, r, t: params(torch.cat([z, r, t], 1)), batch)
            descend(opt, found)
            metrics.append({"loss": found.detach()})
        return Plain({"params": params}, metrics)

    widths = {"data": 2, "noise": 2, "times": 2}
    return Case(one_update(loss, optim.adam(0.02)), modules, widths, plain)


# AdaHessian: the Hessian's diagonal by Hutchinson's estimate, in every other step


class AdaHessian(NamedTuple):
    params: Any
    mean: Any  # of gradients
    squares: Any  # of the diagonal
    num_steps: Tensor


def adahessian() -> Case:
    modules = {"params": net(12, 4, 6, 2)}
    forward = applied(modules["params"])
    b1, b2, every = 0.9, 0.99, 2

    def loss(params: Any, batch: Batch) -> Tensor:
        return F.mse_loss(forward(params, batch["x"]), batch["y"])

    def init(params: Any) -> AdaHessian:
        zeros = fz.zero_updates(params)
        return AdaHessian(params, zeros, zeros, torch.zeros((), dtype=torch.int64))

    def program(value: AdaHessian, batch: Batch) -> Any:
        t, squares = int(value.num_steps), value.squares
        if t % every == 0:
            z = fz.random.rademacher(value.mean, seed=5, step=t)
            found, grads, hz = fz.hvp(loss)(value.params, z, batch)
            squares = tree_map(lambda s, z, h: b2 * s + (1 - b2) * (z * h) ** 2, squares, z, hz)
        else:
            found, grads = fz.value_and_grad(loss)(value.params, batch)
        mean = tree_map(lambda m, g: b1 * m + (1 - b1) * g, value.mean, grads)
        first, second = 1 - b1 ** (t + 1), 1 - b2 ** (t // every + 1)
        updates = tree_map(
            lambda m, s: -0.05 * (m / first) / ((s / second).sqrt() + 0.01), mean, squares
        )
        params = fz.apply_updates(value.params, updates)
        return AdaHessian(params, mean, squares, value.num_steps + 1), {"loss": found}

    def plain(batches: list[Batch], params: nn.Module) -> Plain:
        """Yao et al., "AdaHessian" (2021), the diagonal as it is, without spatial averaging."""
        leaves, metrics = dict(params.named_parameters()), []
        means = {name: torch.zeros_like(p) for name, p in leaves.items()}
        squares = {name: torch.zeros_like(p) for name, p in leaves.items()}
        num_estimates = 0
        for t, batch in enumerate(batches):
            found = F.mse_loss(params(batch["x"]), batch["y"])
            grads = torch.autograd.grad(found, [*leaves.values()], create_graph=True)
            if t % every == 0:
                num_estimates += 1
                # Signs alone are the library's, so that they are those of the program
                signs = fz.random.rademacher(leaves, seed=5, step=t)
                curved = torch.autograd.grad(grads, [*leaves.values()], [*signs.values()])
                for name, h in zip(leaves, curved, strict=True):
                    squares[name].mul_(b2).add_((1 - b2) * (signs[name] * h).square())
            with torch.no_grad():
                for (name, p), g in zip(leaves.items(), grads, strict=True):
                    means[name].mul_(b1).add_((1 - b1) * g)
                    root = (squares[name] / (1 - b2**num_estimates)).sqrt()
                    p -= 0.05 * (means[name] / (1 - b1 ** (t + 1))) / (root + 0.01)
            metrics.append({"loss": found.detach()})
        return Plain({"params": params}, metrics)

    step = fz.program_step(program, init=init)
    return Case(step, modules, {"x": 4, "y": 2}, plain)


CASES = {
    f.__name__: f
    for f in (gan, sam, pcgrad, maml, reptile, byol, ppo, adahessian, dino, dino_weighted)
}
# Shapes follow from the batch's values, so there is no plan of the program
BY_VALUES = {f.__name__: f for f in (ppo_shuffled,)}
# Each number of ranks trains otherwise
BY_RANK = {f.__name__: f for f in (norm_gan,)}
# Torch's forward-mode levels are the process's, so ranks that are threads can't use them
OF_ONE_THREAD = {f.__name__: f for f in (mean_flow,)}
