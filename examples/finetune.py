"""Fine-tune a folder of Hugging Face on several local ranks, into another such folder.

    $ python examples/finetune.py                                        # 2 ranks, level 3
    $ python examples/finetune.py --level 1 --ranks 3 --root runs/docstrings
    $ torchrun --nproc-per-node 2 examples/finetune.py                   # ranks that torchrun
    started

Nothing is downloaded. A tokenizer and a tiny Llama learn from the source files of Python's own
standard library; their folder stands in for a pretrained model. The model is then tuned on pairs:
the prompt is the first line of a function, and the answer that of its docstring. Prompts and
padding have labels of -100, so ranks have unequal numbers of labels that count. The losses are
those of one process all the same, up to rounding, at every level and number of ranks. The two
trainings take less than two minutes on two cores.
"""

import argparse
import re
import sysconfig
import tempfile
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader, default_collate
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

import functorch_zero as fz
from functorch_zero import optim

CONTEXT = 64  # tokens of a row
BATCH = 16  # rows of a batch over all ranks
EXAM = 96  # rows held out
FUNCTION = re.compile(r'^ *(def [^\n]+:)\n +"""([A-Z][^\n"]+)', re.MULTILINE)
PROMPT = "def is_empty(self):"

Row = dict[str, Tensor]  # input_ids, attention_mask and labels: each (CONTEXT,) int64


def read_source() -> str:
    """The standard library's."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))


def make_folder(folder: Path, source: str) -> None:
    """A tokenizer of this text, and a Llama with random weights."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([source[:1_000_000]], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", padding_side="right"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def text_rows(tokenizer: Any, source: str) -> list[Row]:
    """Windows of the text, in which every label counts."""
    tokens = torch.tensor(tokenizer(source[:300_000])["input_ids"])
    windows = tokens.split(CONTEXT)[:-1]  # the last one may be short
    return [dict(input_ids=w, attention_mask=torch.ones_like(w), labels=w) for w in windows]


def pair_rows(tokenizer: Any, source: str) -> list[Row]:
    """A function's first line and that of its docstring, whose labels alone count."""
    rows = []
    for function, docstring in FUNCTION.findall(source):
        prompt = tokenizer(f"{function}\n# ")["input_ids"]
        answer = tokenizer(docstring + tokenizer.eos_token)["input_ids"]
        length = len(prompt) + len(answer)
        row = {
            "input_ids": prompt + answer + (CONTEXT - length) * [tokenizer.pad_token_id],
            "attention_mask": length * [1] + (CONTEXT - length) * [0],
            "labels": len(prompt) * [-100] + answer + (CONTEXT - length) * [-100],
        }
        if length <= CONTEXT:
            rows.append({name: torch.tensor(values) for name, values in row.items()})
    return rows


def fit(
    folder: Path, out: Path, rows: list[Row], exam: Row, args: argparse.Namespace, group: fz.Group
) -> str:
    """Train the model of one folder, and save it as another; the held-out loss before and after."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    apply, params, buffers = fz.functionalize(model.train(), remat="model.layers.*")
    predict = apply.eval()

    def loss_fn(params, buffers, batch, apply=apply):
        output, _ = apply(params, buffers, **batch, use_cache=False)
        counted = (batch["labels"][:, 1:] != -100).sum()  # the model shifts labels by one
        return output.loss, fz.Aux(weight=counted)

    def evaluate(params, buffers, batch):
        loss, aux = loss_fn(params, buffers, batch, predict)
        return fz.Aux(metrics={"loss": loss}, weight=aux.weight)

    schedule = optim.warmup_cosine_decay_schedule(2e-4, 2e-3, args.steps // 10, args.steps)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule))
    step = fz.shard(fz.train_step(loss_fn, optimizer), level=args.level, group=group)
    check = fz.shard(fz.eval_step(evaluate), level=args.level, group=group)
    order = fz.data.GlobalOrder(len(rows), BATCH, group, seed=0)
    epochs = repeat(DataLoader(rows, batch_sampler=order))

    state = step.init(params, buffers)
    before = check(state, fz.data.share(exam, group))["loss"]
    for batch in islice(chain.from_iterable(epochs), args.steps):
        state, _ = step(state, batch)
        order.advance()
    after = check(state, fz.data.share(exam, group))["loss"]

    whole = step.unshard(state)
    if group.rank == 0:
        model.load_state_dict({**whole.params, **whole.buffers}, strict=False)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    group.exchange(b"saved")  # the others wait
    return f"{before:.6f} -> {after:.6f}"


def train(args: argparse.Namespace) -> None:
    """What one rank does."""
    logging.disable_progress_bar()
    group = fz.ProcessGroup()
    root = Path(group.exchange(args.root.encode())[0].decode())  # rank 0's
    base, pretrained, tuned = (root / name for name in ("base", "pretrained", "tuned"))
    source = read_source()
    if group.rank == 0:
        make_folder(base, source)
    group.exchange(b"made")

    tokenizer = AutoTokenizer.from_pretrained(base)
    pairs = pair_rows(tokenizer, source)
    exam, pairs = default_collate(pairs[:EXAM]), pairs[EXAM:]
    first = fit(base, pretrained, text_rows(tokenizer, source), exam, args, group)
    second = fit(pretrained, tuned, pairs, exam, args, group)
    if group.rank == 0:
        print(f"held-out loss of docstrings, pretraining {first}, fine-tuning {second}")
        model = AutoModelForCausalLM.from_pretrained(tuned)
        prompt = tokenizer(PROMPT + "\n# ", return_tensors="pt", return_token_type_ids=False)
        written = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        print(tokenizer.decode(written[0], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", type=int, default=3, choices=range(4))
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes to start, when torchrun did not"
    )
    parser.add_argument("--steps", type=int, default=200, help="of each of the two trainings")
    parser.add_argument("--root", help="the folder of the models; by default a temporary one")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {args.steps}")
    with tempfile.TemporaryDirectory() as folder:
        args.root = args.root or folder
        fz.launch(train, args.ranks, args)


if __name__ == "__main__":
    main()
