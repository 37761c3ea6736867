"""The errors of a sharded program name trees, numbers and ways out as their readers know them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from optree import tree_map
from torch import Tensor, nn

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.errors import FunctorchZeroError, MismatchError, StructureError
from functorch_zero.groups import CountingGroup, run_ranks
from functorch_zero.sharded.agreement import agree
from functorch_zero.sharded.readable import told_apart

torch.manual_seed(0)
generate, FIRST_GEN, _ = fz.functionalize(nn.Linear(3, 4).double())
judge, FIRST_DISC, _ = fz.functionalize(nn.Linear(4, 1).double())
X = torch.randn(8, 3, dtype=torch.float64)
adam = optim.adam(0.1)

Program = Callable[..., Any]


class Gan(NamedTuple):
    gen: Any
    disc: Any
    gen_opt: Any


def init(gen: Any, disc: Any) -> Gan:
    return Gan(gen, disc, adam.init(gen))


def gen_loss(gen: Any, disc: Any, noise: Tensor) -> Tensor:
    return -judge(disc, {}, generate(gen, {}, noise)[0])[0].mean()


def train(value: Gan, noise: Tensor) -> Any:
    loss, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
    gen, gen_opt = adam.apply(grads, value.gen_opt, value.gen)
    return value._replace(gen=gen, gen_opt=gen_opt), {"loss": loss}


def refused(error: type[Exception], run: Callable[[], Any]) -> str:
    """The text of an error."""
    with pytest.raises(error) as caught:
        run()
    return str(caught.value)


def test_a_pattern_of_levels_that_names_nothing() -> None:
    group = CountingGroup(2)

    def text(step: Any, level: Any, *args: Any) -> str:
        sharded = fz.shard(step, level=level, group=group)
        return refused(StructureError, lambda: sharded.init(*args))

    gan = fz.program_step(train, init=init)
    assert (
        "path generator, expected one of init's arguments (gen, disc), or a path, such as "
        "disc.weight, disc.bias, gen.weight. Remedy: begin with the name of init's argument; in a "
        "pattern"
    ) in text(gan, {"generator": 3, "disc": 1}, FIRST_GEN, FIRST_DISC)
    alone = fz.train_step(lambda params, buffers, x: params["weight"].sum(), adam)
    words = "path wait, expected a path, such as weight, bias. Remedy: fz.named_leaves(params)"
    assert words in text(alone, {"wait": 3}, FIRST_GEN)
    words = "path disc.weight, got patterns 'gen'. Remedy: add a pattern"
    assert words in text(gan, {"gen": 3}, FIRST_GEN, FIRST_DISC)


def told(program: Program, level: Any, error: type[Exception] = FunctorchZeroError) -> list[str]:
    """What each rank is told by one step of a program."""
    step = fz.program_step(program, init=init)

    def run(group: Any) -> str:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init(FIRST_GEN, FIRST_DISC)
        with pytest.raises(error) as caught:
            sharded(state, X.chunk(group.size)[group.rank])
        return str(caught.value)

    return run_ranks(run, 2)


class Critic:
    """An object that a loss may use."""

    def __init__(self, params: Any):
        self.params = params

    def loss(self, gen: Any, noise: Tensor) -> Tensor:
        return judge(self.params, {}, generate(gen, {}, noise)[0])[0].mean()


def by_closure(value: Gan) -> Any:
    disc = value.disc
    return lambda gen, noise: (generate(gen, {}, noise)[0] * disc["weight"]).mean()


def by_value(value: Gan) -> Any:
    return lambda gen, noise: (generate(gen, {}, noise)[0] * value.disc["weight"]).mean()


def by_apply(value: Gan) -> Any:
    return lambda gen, noise: judge(value.disc, {}, generate(gen, {}, noise)[0])[0].mean()


def by_state(value: Gan) -> Any:
    return lambda gen, noise: generate(gen, {}, noise)[0].mean() + value.gen_opt.count


# How a loss reaches a tree that is none of its arguments, and the name that errors give it
REACHED = {
    "disc": by_closure,
    "value.disc": by_value,
    "path value.disc": by_apply,
    "path self.params": lambda value: Critic(value.disc).loss,
    "path value.gen_opt": by_state,
}


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("name", REACHED)
def test_a_tree_that_a_loss_closes_over_is_named(name: str, level: int) -> None:
    def program(value: Gan, noise: Tensor) -> Any:
        fz.value_and_grad(REACHED[name](value))(value.gen, noise)
        return value, {}

    texts = told(program, level)
    found = [text for text in texts if "PeerError" not in text and "failed:" not in text]
    assert found
    for text in found:
        assert name in text.partition(" Remedy: ")[0], text
        assert "expected" in text and "got" in text and "on rank" in text, text
        assert name.removeprefix("path ") in text.partition(" Remedy: ")[2], text
        # At level 1 the leaves are whole
        assert "one rank's pieces" not in text, text


def by_hand(gen: Any, noise: Tensor) -> Tensor:
    mean = generate(gen, {}, noise)[0].mean()
    return torch.autograd.grad(mean, gen["weight"], create_graph=True)[0].square().sum()


def by_transform(gen: Any, noise: Tensor) -> Tensor:
    grads = torch.func.grad(lambda params: generate(params, {}, noise)[0].mean())(gen)
    total: Tensor = grads["weight"].square().sum()
    return total


def by_backward(gen: Any, noise: Tensor) -> Tensor:
    generate(gen, {}, noise)[0].mean().backward()
    return gen["weight"].grad.square().sum()  # type: ignore[no-any-return]


def by_library(gen: Any, noise: Tensor) -> Tensor:
    _, grads = fz.value_and_grad(lambda params: generate(params, {}, noise)[0].mean())(gen)
    total: Tensor = grads["weight"].square().sum()
    return total


@pytest.mark.parametrize("loss", [by_hand, by_transform, by_backward, by_library])
def test_a_gradient_inside_of_a_loss_is_sent_to_the_docs(loss: Any) -> None:
    def program(value: Gan, noise: Tensor) -> Any:
        fz.value_and_grad(loss)(value.gen, noise)
        return value, {}

    docs = Path(__file__).parents[3] / "docs"
    for text in told(program, 3):
        for page, heading in re.findall(r'docs/([\w/-]+\.md), "([^"]+)"', text):
            assert f"\n## {heading}\n" in (docs / page).read_text()
        assert text.count("docs/") == 2, text


def by_rank(rank: int) -> float:
    """Numbers of two ranks that differ in the last bit."""
    return 0.1 if rank == 0 else math.nextafter(0.1, 1)


def own_metric(value: Gan, noise: Tensor, rank: int) -> Any:
    return value, {"own": torch.tensor(by_rank(rank), dtype=torch.float64)}


def own_number(value: Any, noise: Tensor, rank: int) -> Any:
    return value._replace(gen_opt=torch.tensor(by_rank(rank), dtype=torch.float64)), {}


def own_count(value: Any, noise: Tensor, rank: int) -> Any:
    return value._replace(gen_opt=value.gen_opt + rank), {}


def own_table(value: Any, noise: Tensor, rank: int) -> Any:
    table = torch.zeros(9, dtype=torch.float64)
    table[8] = by_rank(rank)
    return value._replace(gen_opt=table), {}


def own_factor(value: Gan, noise: Tensor, rank: int) -> Any:
    _, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
    grads = tree_map(lambda g: g * by_rank(rank), grads)
    gen, gen_opt = adam.apply(grads, value.gen_opt, value.gen)
    return value._replace(gen=gen, gen_opt=gen_opt), {}


def own_rate(value: Gan, noise: Tensor, rank: int) -> Any:
    _, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
    gen, gen_opt = optim.adam(by_rank(rank)).apply(grads, value.gen_opt, value.gen)
    return value._replace(gen=gen, gen_opt=gen_opt), {}


def own_branch(value: Gan, noise: Tensor, rank: int) -> Any:
    new, _ = train(value, noise)
    return (new if rank else value), {}


def first_of(third: Any) -> Callable[..., Any]:
    return lambda gen, disc: Gan(gen, disc, adam.init(gen) if third is None else third)


# Of each program, the third part of its value, and the words of its error
DIFFERENT: dict[Any, tuple[Any, str]] = {
    own_metric: (None, "metric 'own' is 0.1 on rank 0 and 0.10000000000000002 on rank 1 "),
    own_number: (torch.tensor(0.0).double(), "leaf 'gen_opt' is 0.1 on rank 0 and 0.1000000000000"),
    own_count: (7, "leaf 'gen_opt' is 7 on rank 0 and 8 on rank 1 (this is rank "),
    own_table: (torch.zeros(9).double(), "leaf 'gen_opt' is digest "),
    own_factor: (
        None,
        "tree 1 in call 2 (apply).weight is aten.mul.Tensor(step 0's result",
    ),
    own_rate: (None, "the optimizer in call 2 (apply).adam.learning_rate is 0.1 on rank 0 and "),
    own_branch: (
        None,
        "tree 'gen'.weight is step 0's value.gen.weight on rank 0 and step 0's result of",
    ),
}


@pytest.mark.parametrize("program", DIFFERENT, ids=lambda program: program.__name__)
def test_numbers_that_differ_are_decimal_and_told_apart(program: Any) -> None:
    third, words = DIFFERENT[program]

    def run(group: Any) -> str:
        step = fz.program_step(partial(program, rank=group.rank), init=first_of(third))
        sharded = fz.shard(step, level=3, group=group)
        state = sharded.init(FIRST_GEN, FIRST_DISC)
        return refused(MismatchError, lambda: sharded(state, X.chunk(2)[group.rank]))

    for text in run_ranks(run, 2):
        assert words in text and "Remedy: " in text, text
        assert "0x" not in text and '"' not in text, text


def test_long_words_are_shown_from_where_they_differ() -> None:
    settings = {f"name_{n}": n for n in range(40)}

    def run(group: Any) -> str:
        own = {"maker": settings | {"name_33": group.rank}}
        return refused(MismatchError, lambda: agree(group, {"x": [own] if group.rank else own}))

    for text in run_ranks(run, 2):
        assert "x is maker(name_0=0" in text and "[maker(name_0=0" in text and len(text) < 500

    names = ", ".join(settings)
    ours, theirs = told_apart(f"[{names}], 0", f"[{names}], 1")
    assert (ours[:3], ours[-11:]) == ("...", "name_39], 0") and theirs[-11:] == "name_39], 1"
    assert told_apart({"a": 1}, {"a": 2}) == ("{a: 1}", "{a: 2}")


def wrong_state(value: Any, noise: Tensor) -> Any:
    _, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
    return value, {"loss": adam.apply(grads, adam.init(value.disc), value.gen)}


def wrong_updates(value: Any, noise: Tensor) -> Any:
    _, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
    return value._replace(disc=fz.apply_updates(value.disc, grads)), {}


def wrong_params(value: Any, noise: Tensor) -> Any:
    _, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
    return value._replace(gen=fz.apply_updates(grads, grads)), {}


# Of each program, the expected tree and the one that it has given
GIVEN = {
    wrong_state: (
        "for 'gen' (tree 1) of leaves weight: (4, 3)",
        "a state for leaves weight: (1, 4)",
    ),
    wrong_updates: ("as the params are, 'disc' (tree 2)", "got 'gen' (tree 1) of leaves weight: "),
    wrong_params: ("held as params are", "got 'gen' (tree 1) of leaves weight: "),
}


@pytest.mark.parametrize("program", GIVEN, ids=lambda program: program.__name__)
def test_a_wrong_tree_is_named_beside_the_expected_one(program: Any) -> None:
    for text in told(program, 3):
        for part in (*GIVEN[program], "on rank", "Remedy: "):
            assert part in text, text


def descends(name: str) -> Program:
    """A program that adds gradients to params itself, in one of the ways that `UPDATES` names."""

    def program(value: Gan, noise: Tensor) -> Any:
        loss, grads = fz.value_and_grad(gen_loss)(value.gen, value.disc, noise)
        gen = value.gen
        if name == "assigned":
            for path in gen:
                gen[path] = grads[path]
        elif name == "a dict":
            gen = {path: p - g for (path, p), g in zip(gen.items(), grads.values(), strict=True)}
        return value._replace(gen=gen), {"loss": loss}

    return program


UPDATES = {
    ("assigned", 1): (TypeError, r"'weight' was assigned to.*fz\.apply_updates\(params, updates\)"),
    ("assigned", 3): (TypeError, r"'weight' was assigned to.*fz\.apply_updates\(params, updates\)"),
    ("a dict", 1): (StructureError, r"pieces of leaves.*shape.*Remedy: fz\.apply_updates"),
    ("a dict", 3): (StructureError, r"in a dict in place of a ShardedTree.*fz\.apply_updates"),
}


@pytest.mark.parametrize(("name", "level"), UPDATES)
def test_updates_by_hand_are_led_to_apply_updates(name: str, level: int) -> None:
    error, words = UPDATES[name, level]
    for text in told(descends(name), level, error):
        assert re.search(words, text), text


def test_a_backward_of_a_programs_own_gets_a_note() -> None:
    def program(w: Any, x: Tensor) -> Any:
        loss = (fz.unshard(w)["w"] * x).square().mean()
        loss.backward()
        return w, {"loss": loss}

    step = fz.program_step(program, init=lambda w: w)
    tree = {"w": torch.ones(3, dtype=torch.float64).requires_grad_()}

    def run(group: Any) -> None:
        made = step if group is None else fz.shard(step, level=3, group=group)
        with pytest.raises(RuntimeError, match="does not require grad") as caught:
            made(made.init(tree), X)
        assert "fz.value_and_grad(loss_fn)" in caught.value.__notes__[0]

    run(None)
    run_ranks(run, 1)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", ["gen", "gen_opt", "pull"])
def test_a_first_value_by_a_ranks_own_number_is_refused(name: str, level: int) -> None:
    """Nobody sees the values: pieces of ranks differ anyway."""

    def run(group: Any) -> str:
        def own_init(gen: Any) -> Any:
            value = {"gen": gen, "gen_opt": adam.init(gen), "pull": fz.zero_updates(gen)}
            own = tree_map(lambda x: (x + group.rank).requires_grad_(x.requires_grad), value[name])
            return {**value, name: own}

        step = fz.program_step(lambda value: (value, {}), init=own_init)
        sharded = fz.shard(step, level=level, group=group)
        return refused(MismatchError, lambda: sharded.init(FIRST_GEN))

    for text in run_ranks(run, 2):
        assert f"the first value's tree '{name}'" in text


@pytest.mark.parametrize("level", [0, 3])
def test_a_leaf_that_one_rank_has_written_to_is_refused_each_time(level: int) -> None:
    """By the first state, which has no name yet, and by one that a step has made."""
    optimizer = optim.sgd(0.1, momentum=0.9)

    def program(value: Any, x: Tensor) -> Any:
        mean, grads = fz.value_and_grad(lambda params, x: (params["a"] * x).sum())(value[0], x)
        return optimizer.apply(grads, value[1], value[0]), {"loss": mean}

    step = fz.program_step(program, init=lambda params: (params, optimizer.init(params)))

    def run(group: Any, num_steps: int) -> None:
        sharded = fz.shard(step, level=level, group=group)
        state = sharded.init({"a": torch.ones(4, requires_grad=True)})
        for _ in range(num_steps):
            state, _ = sharded(state, torch.ones(1))
        if group.rank == 1:
            optree.tree_leaves(state.value[1])[0].add_(1)
        for _ in range(2):
            with pytest.raises(MismatchError, match=r"'1'.*on rank 1"):
                sharded(state, torch.ones(1))

    for num_steps in (0, 1):
        run_ranks(partial(run, num_steps=num_steps), 2)
