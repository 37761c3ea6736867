"""`optim.to_torch` in the engines of others: a tiny Llama of Hugging Face under `fully_shard`,
accelerate, the Trainer, and Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import functorch_zero as fz
from functorch_zero import optim
from functorch_zero.groups import launch
from tests.modules import seeded
from tests.sharded.test_to_torch import STEPS, TRANSFORMS, whole
from tests.tiers import FULL

transformers = pytest.importorskip("transformers")
pytestmark = FULL

VOCAB, ROWS, LENGTH = 31, 8, 6


def llama() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            attn_implementation="eager",
        )
        made: nn.Module = transformers.LlamaForCausalLM(config).double()
        return made


def tokens() -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (STEPS, ROWS, LENGTH), generator=g)


def loss_of(model: Any, x: Tensor) -> Tensor:
    logits = model(input_ids=x).logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), x[:, 1:].reshape(-1))


def mixed(name: str) -> optim.Transform:
    """Layers' matrices by the optimizers of matrices, as the row of that name has them."""
    if name not in ("muon", "shampoo", "soap"):
        return TRANSFORMS[name][0]()
    matrices = {"muon": optim.muon, "shampoo": optim.shampoo, "soap": optim.soap}[name](1e-2)

    def label(path: str, leaf: Tensor) -> str:
        return "matrix" if leaf.ndim == 2 and ".layers." in path else "rest"

    return optim.partition({"matrix": matrices, "rest": optim.adamw(1e-2)}, label)


def in_one_process(name: str) -> dict[str, Tensor]:
    apply, params, buffers = fz.functionalize(llama())

    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return loss_of(lambda **given: apply(params, buffers, **given)[0], x)

    step = fz.train_step(loss_fn, mixed(name))
    state = step.init(params, buffers)
    for x in tokens():
        state, _ = step(state, x)
    return dict(fz.named_leaves(state.params))


def under_fully_shard(names: list[str], wanted: Any) -> dict[str, float]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {}
    for name in names:
        model: Any = llama()
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = optim.to_torch(mixed(name), model)
        for x in tokens():
            optimizer.zero_grad()
            loss_of(model, x.chunk(ranks)[rank]).backward()
            optimizer.step()
        first = dict(llama().named_parameters())
        errors = []
        for path, param in model.named_parameters():
            off, moved = whole(param) - wanted[name][path], wanted[name][path] - first[path]
            errors.append(float(off.abs().max() / moved.detach().abs().max()))
        found[name] = max(errors)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_llama_under_fully_shard(ranks: int) -> None:
    names = [*TRANSFORMS]
    wanted = {name: {k: x.detach() for k, x in in_one_process(name).items()} for name in names}
    for found in launch(under_fully_shard, ranks, names, wanted, start_method="fork", timeout=115):
        bounds = {name: bound for name, (_, bound) in TRANSFORMS.items()}
        assert not {name: x for name, x in found.items() if x > bounds[name]}


def clipped(lr: Any) -> optim.Transform:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(lr, weight_decay=0.01))


def small() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 3)).double())


def inputs() -> Tensor:
    return torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plainly() -> list[Tensor]:
    model = small()
    optimizer = optim.to_torch(clipped, model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for x in inputs():
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def as_from_torchrun() -> int:
    """Set a launcher's variables, without which an engine sees no ranks; how many there are."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update(told, ACCELERATE_USE_CPU="1", TORCHELASTIC_RUN_ID="launched")
    return dist.get_world_size()


def by_accelerate(kind: str) -> list[Tensor]:
    import accelerate
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    ranks = as_from_torchrun()
    options: dict[str, Any] = {}
    if kind == "fsdp2":
        options["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
    accelerator = accelerate.Accelerator(cpu=True, step_scheduler_with_optimizer=False, **options)
    assert accelerator.num_processes == ranks
    if kind == "fsdp2":  # which accelerate itself refuses to CPUs, without a word: it takes DDP
        state = AcceleratorState()
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, options["fsdp_plugin"]
    model: Any = small()
    optimizer: Any = optim.to_torch(clipped, model, lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(model, FSDPModule if kind == "fsdp2" else DistributedDataParallel)
    for x in inputs():
        own = x.chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(model(own).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [whole(param) for param in model.parameters()]


@pytest.mark.filterwarnings("ignore")  # accelerate's own
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accelerate(kind: str) -> None:
    pytest.importorskip("accelerate")
    for params in launch(by_accelerate, 2, kind, start_method="fork", timeout=100):
        for p, q in zip(params, plainly(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def trained(make: Any, folder: Path, resume: str | None = None, ranks: int = 1) -> list[Tensor]:
    """By the Trainer, on batches of two rows over all ranks."""
    if ranks > 1:
        as_from_torchrun()
    model = llama().float()
    data = [{"input_ids": x, "labels": x} for x in tokens().reshape(-1, LENGTH)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2 // ranks,
        max_steps=4,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        max_grad_norm=0.0,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, optimizers=(make(model), None)
    )
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.args.world_size == ranks
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) == (ranks > 1)
    return [param.detach() for param in model.parameters()]


@pytest.mark.filterwarnings("ignore")  # the Trainer's own
def test_the_trainer(tmp_path: Path) -> None:
    """With its schedule of learning rates; a run that goes on from its checkpoint; and on ranks."""
    pytest.importorskip("accelerate")

    def ours(model: nn.Module) -> Any:
        return optim.to_torch(lambda lr: optim.adamw(lr, weight_decay=0.0), model, lr=1e-2)

    def theirs(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def on_ranks(folder: Path) -> list[Tensor]:
        return trained(ours, folder, ranks=2)

    params = trained(ours, tmp_path / "ours")
    for p, q in zip(params, trained(theirs, tmp_path / "theirs"), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    again = trained(ours, tmp_path / "ours", str(tmp_path / "ours" / "checkpoint-2"))
    assert all(map(torch.equal, params, again))
    found = launch(on_ranks, 2, tmp_path / "ranks", start_method="fork", timeout=100)
    for p, *those_of_ranks in zip(params, *found, strict=True):
        for q in those_of_ranks:
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def by_lightning(folder: str, strategy: str, epoch: int, rows: slice) -> list[Tensor]:
    """Up to this epoch, which has these rows of the inputs; from a checkpoint of the one before."""
    import lightning

    ranks = as_from_torchrun() if strategy == "ddp" else 1  # Lightning is to start none itself

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = small()

        def training_step(self, batch: Tensor) -> Tensor:
            assert self.trainer.world_size == ranks
            assert isinstance(self.trainer.model, DistributedDataParallel) == (ranks > 1)
            loss: Tensor = self.model(batch).square().mean()
            return loss

        def train_dataloader(self) -> Any:
            own: Any = [x.chunk(ranks)[self.trainer.global_rank] for x in inputs()[rows]]
            return torch.utils.data.DataLoader(own, batch_size=None, num_workers=0)

        def configure_optimizers(self) -> Any:
            optimizer = optim.to_torch(clipped, self.model, lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=epoch,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module, ckpt_path=f"{folder}/{epoch - 1}" if epoch > 1 else None)
    trainer.save_checkpoint(f"{folder}/{epoch}")
    return [param.detach() for param in module.parameters()]


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(tmp_path: Path) -> None:
    """With a scheduler; a run that goes on from a checkpoint; and DDP."""
    pytest.importorskip("lightning")
    by_lightning(str(tmp_path), "auto", 1, slice(3))
    found = [by_lightning(str(tmp_path), "auto", 2, slice(3, None))]
    given = (by_lightning, 2, str(tmp_path), "ddp", 1, slice(None))
    found += launch(*given, start_method="fork", timeout=100)
    for params in found:
        for p, q in zip(params, plainly(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
