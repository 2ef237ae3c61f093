"""Demo: training on real text, without a download: `ci/run.py demo [--steps N] [--json]`.

1. A byte-pair tokenizer is trained on the source of Python's standard library. 2. A small GPT-2 with dropout 0.1 is
saved as an ordinary HuggingFace checkpoint. 3. It is trained in one process, and again on tp=2 x pp=2 = 4 local
processes: same batches, same seed, so the two    losses of every step must agree. 4. Plain `transformers` loads the
checkpoint that the four ranks saved, and generates a line of code.
"""

import json
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import datasets
import typer
from rich.console import Console
from rich.syntax import Syntax

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import readable_errors, stdout_for_json
from slapo_zoo.cli.training.inputs import Inputs, require_rows
from slapo_zoo.cli.training.options import TrainOptions
from slapo_zoo.cli.training.records import progress
from slapo_zoo.cli.training.run import fit, ledger_table, load
from slapo_zoo.data.batches import Batches
from slapo_zoo.data.tasks import Causal, DataError
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.launch import run_local

TEXT_BYTES = 1_000_000
VOCAB_SIZE = 4099  # a prime: no number of ranks divides it
SEQ_LEN = 128
BATCH_SIZE = 8
TOLERANCE = 1e-3  # relative; four processes add in another order
END = "<|endoftext|>"
PROMPT = "    return self."

console = Console(highlight=False)


def stdlib_sources(most_bytes: int = TEXT_BYTES) -> list[str]:
    """Return the text of the first modules of Python's standard library, by name, up to `most_bytes` in all."""
    folder, texts, size = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for file in sorted(folder.glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if size + len(text) > most_bytes:
            break
        texts.append(text)
        size += len(text)
    if not texts:
        raise DataError(str(folder), "demo", "found no source of the standard library")
    return texts


def train_tokenizer(texts: Sequence[str]) -> Any:
    """Return a byte-pair tokenizer like GPT-2's, with a smaller vocabulary, trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)  # fmt: skip


def write_checkpoint(folder: Path, tokenizer: Any) -> int:
    """Save a new small GPT-2 and the tokenizer to a folder; return the number of parameters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=SEQ_LEN, vocab_size=len(tokenizer),
        embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1,
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def train_alone(options: TrainOptions, batches: Batches) -> list[float]:
    """Train the model in one process; return the loss of each step."""
    model = load(options)
    with progress(options.max_steps, every=max(1, options.max_steps // 2)) as on_step:
        return fit(model, Inputs(batches), options, on_step).losses


def train_beside(options: TrainOptions, batches: Batches, alone: list[float]) -> list[float]:
    """Train the same model as one rank of the mesh, and save it; return the loss of each step.

    Rank 0 prints a line per step with the loss and that of one process, `alone`.
    """
    model = load(options)
    ledgers = together(model.mesh, "load", lambda: model.ledger)
    show = None
    if model.mesh.rank == 0:
        console.print(ledger_table(model.mesh, ledgers), "")
        console.print(f"[bold]{'step':>5}{'one process':>14}{'tp=2 x pp=2':>14}{'difference':>13}")
        show = lambda step, record: console.print(loss_line(step, alone[step], record["loss"]))  # noqa: E731
    losses = fit(model, Inputs(batches), options, show).losses
    model.save_pretrained(options.output)
    return losses


def loss_line(step: int, alone: float, beside: float) -> str:
    """Format one line of the table of losses: step, loss in one process, loss on the mesh, difference."""
    colour = "green" if relative(alone, beside) <= TOLERANCE else "red"
    return f"{step + 1:>5}{alone:>14.6f}{beside:>14.6f}[{colour}]{beside - alone:>+13.1e}[/]"


def relative(alone: float, beside: float) -> float:
    """Return the difference of the two losses of a step, relative to the first; NaN becomes infinity."""
    distance = abs(beside - alone) / abs(alone)
    return distance if distance == distance else float("inf")


def verdict(alone: Sequence[float], beside: Sequence[float]) -> bool:
    """Print whether the losses of one process and of the mesh agree in every step, and return it."""
    worst = max(range(len(alone)), key=lambda step: relative(alone[step], beside[step]))
    distance = relative(alone[worst], beside[worst])
    close = distance <= TOLERANCE
    text = f"at most {distance:.1e} apart (relative; step {worst + 1}; limit {TOLERANCE:g})"
    if close:
        console.print(f"\n[bold green]The two columns agree[/]: {text}.")
    else:
        console.print(f"\n[bold red]The two columns differ[/]: {text}.\nThis is a bug: report it.")
    return close


def write_code(folder: Path) -> None:
    """Load the four ranks' checkpoint with plain `transformers`, generate a line of code with it, and print that
    line.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    breaks = [i for i in range(len(tokenizer)) if "\n" in tokenizer.decode([i])]
    ids = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    out = model.generate(**ids, max_new_tokens=16, do_sample=True, top_k=20, suppress_tokens=breaks)
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    console.print(f"\nSaved by the four ranks: {names}\nPlain transformers reads it and writes:")
    code = tokenizer.decode(out[0], skip_special_tokens=True)
    console.print(Syntax(code, "python", background_color="default"))


def make_inputs(folder: Path) -> tuple[Any, Batches]:
    """Make tokenizer, checkpoint (in `folder`) and batches, and print a line about each; return (tokenizer, batches)."""
    texts = stdlib_sources()
    tokenizer = train_tokenizer(texts)
    size = sum(map(len, texts)) / 1e6
    console.print(
        f"text        {len(texts)} modules of Python's standard library, {size:.1f} MB\n"
        f"tokenizer   byte pairs, {len(tokenizer)} tokens, trained on that text"
    )
    number = write_checkpoint(folder, tokenizer)
    console.print(
        f"checkpoint  GPT-2, 4 blocks of width 128, {number / 1e6:.2f}M parameters, dropout 0.1\n"
        f"training    AdamW, gradient norm at most 1, {BATCH_SIZE} rows of {SEQ_LEN} tokens a step\n"
    )
    task = Causal(tokenizer, SEQ_LEN)
    rows = datasets.Dataset.from_dict(task.encode({"text": texts}))
    require_rows(rows, BATCH_SIZE, TrainOptions("", seq_len=SEQ_LEN))
    return tokenizer, Batches(rows, task, BATCH_SIZE, seed=0)


def compared(steps: int) -> tuple[list[float], list[float], bool]:
    """Train both ways; return (losses of one process, losses of the mesh, whether they agree)."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    begin = time.perf_counter()
    console.print("[bold]slapo_zoo[/]: one GPT-2, in one process and on tp=2 x pp=2 = 4 processes\n")  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        start, end = Path(place, "start"), Path(place, "trained")
        tokenizer, batches = make_inputs(start)
        alone = TrainOptions(str(start), max_steps=steps, learning_rate=1e-3, seed=1, device="cpu")
        mesh = replace(alone, tp=2, pp=2, output=str(end))
        # one thread per rank: a fork is then safe and takes milliseconds
        (left,) = run_local(train_alone, 1, (alone, batches), threads=1, device="cpu")
        right = run_local(train_beside, 4, (mesh, batches, left), threads=1, device="cpu")[0]
        tokenizer.save_pretrained(end)
        agree = verdict(left, right)
        write_code(end)
    console.print(f"\n{time.perf_counter() - begin:.0f} s in all.")
    return left, right, agree


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 40,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT-2 on four ranks beside one process, and compare every loss."""
    with stdout_for_json(as_json):
        alone, beside, agree = compared(steps)
    if as_json:
        found = {"one_process": alone, "four_processes": beside, "agree": agree}
        typer.echo(json.dumps(found, indent=1))
    raise typer.Exit(0 if agree else 1)


if __name__ == "__main__":
    with readable_errors():
        typer.run(demo)
