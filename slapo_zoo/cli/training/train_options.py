"""Options of a training run: one object, from a file, from flags or from Python."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run; also the keys and the flags of `slapo-zoo train`.

    Where `transformers.TrainingArguments` has such an option, it has its name there.

    Args:
        model: checkpoint folder or Hub id.
        data: a file, a folder, or the name of a dataset on the Hub.
        data_config: configuration of a dataset that has several.
        data_split: the split that is trained on.
        columns: what a task reads --> the column of the data that holds it, e.g. {text: body}.
        stream: read the data while training goes on, and hold no more than `shuffle_rows` of it.
        shuffle_rows: a stream is shuffled within so many rows.
        task: causal, masked, span, classify, tag, seq2seq or pairs; None: the family's own.
        seq_len: tokens of a row; None: 128, or what the model takes if that is less.
        target_len: tokens of a target of seq2seq; None: as seq_len.
        document_masks: tokens see no other document of their row; None: where the model can.
        eval_data: what is evaluated on: a file, a folder, a dataset; None: eval_split of `data`.
        eval_split: the split that is evaluated on.
        eval_share: share of the rows that is held out for it instead.
        eval_steps: steps between two evaluations; there is one after the last step too.
        eval_batches: at most so many; None: all rows.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: copies of the model; None: what the launched processes leave.
        micro_batches: per step and copy; None leaves it to the loader.
        batch_size: rows of a step, all copies together.
        load: more arguments of `from_pretrained`, e.g. {sequence_parallel: true}.
        max_steps: optimizer steps.
        learning_rate: learning rate of AdamW; None: 1e-4, or that of the checkpoint.
        lr_scheduler_type: a name of `transformers.get_scheduler`.
        lr_scheduler_kwargs: of that schedule, e.g. {num_cycles: 2}.
        warmup_steps: over which the learning rate rises from 0.
        weight_decay: of matrices; vectors (biases, norms) have none.
        max_grad_norm: largest global gradient norm; 0 does not clip.
        seed: of dropout, of new weights, of the order of the rows and of the masks.
        output: folder for the trained checkpoint.
        checkpoint: folder for all that training needs to go on; one that is there is gone on from.
        save_steps: steps between two writes of `checkpoint`; it is written after the last step too.
        save_total_limit: how many checkpoints stay, in step folders below `checkpoint`; None: one, `checkpoint`.
        best: folder for the checkpoint with the best evaluation so far.
        metric_for_best_model: loss or accuracy.
        patience: stop after so many evaluations without a better one; None: never.
        log_file: one JSON line a step goes there.
        report_to: trackers of Trainer: tensorboard, wandb, trackio, mlflow, ...
        logging_dir: folder of trackers that write files; None: output (or checkpoint) with "-logs" behind.
        logging_steps: steps between two lines where there is no terminal; None: ten in all, and one a half minute.
        device: "cpu", "cuda", or None for what is there.
        engine: torch, deepspeed or megatron.
        zero_stage: of DeepSpeed.
    """

    model: str
    data: str | None = None
    data_config: str | None = None
    data_split: str = "train"
    columns: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    shuffle_rows: int = 1000
    task: str | None = None
    seq_len: int | None = None
    target_len: int | None = None
    document_masks: bool | None = None
    eval_data: str | None = None
    eval_split: str | None = None
    eval_share: float = 0.0
    eval_steps: int = 100
    eval_batches: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int | None = None
    micro_batches: int | None = None
    batch_size: int = 8
    load: Mapping[str, Any] = field(default_factory=dict)
    max_steps: int = 100
    learning_rate: float | None = None
    lr_scheduler_type: str = "constant"
    lr_scheduler_kwargs: Mapping[str, Any] = field(default_factory=dict)
    warmup_steps: int = 0
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0
    output: str | None = None
    checkpoint: str | None = None
    save_steps: int = 100
    save_total_limit: int | None = None
    best: str | None = None
    metric_for_best_model: str = "loss"
    patience: int | None = None
    log_file: str | None = None
    report_to: tuple[str, ...] = ()
    logging_dir: str | None = None
    logging_steps: int | None = None
    device: str | None = None
    engine: str = "torch"
    zero_stage: int = 0

    @property
    def evaluates(self) -> bool:
        """Return whether there is something to evaluate on."""
        return bool(self.eval_data or self.eval_split or self.eval_share)


def described() -> dict[str, str]:
    """Return the help of each option, from the docstring of the class."""
    text = str(TrainOptions.__doc__).partition("Args:")[2]
    return dict(re.findall(r"^ {8}(\w+): (.+)$", text, re.MULTILINE))


LEAST = {
    "shuffle_rows": 1, "seq_len": 2, "target_len": 1, "eval_share": 0, "eval_steps": 1,
    "eval_batches": 1, "tp": 1, "pp": 1, "dp": 1, "micro_batches": 1, "batch_size": 1, "max_steps": 1,
    "learning_rate": 0, "warmup_steps": 0, "weight_decay": 0, "max_grad_norm": 0, "save_steps": 1, "save_total_limit": 1,
    "patience": 1, "logging_steps": 1, "zero_stage": 0, "seed": 0,
}  # fmt: skip
BELOW = {"eval_share": 1, "zero_stage": 4}
WRITTEN = ("output", "best", "checkpoint", "log_file")
PATHS = (*WRITTEN, "model", "data", "eval_data", "logging_dir")
ONE_OF = {
    "task": ("causal", "masked", "span", "classify", "tag", "seq2seq", "pairs"),
    "metric_for_best_model": ("loss", "accuracy"),
}

# Keys and flags of the release before --> what they are called now; they go on working for one release.
RENAMED = {
    "steps": "max_steps", "lr": "learning_rate", "lr_schedule": "lr_scheduler_type", "lr_options": "lr_scheduler_kwargs",
    "clip": "max_grad_norm", "save_every": "save_steps", "keep": "save_total_limit", "eval_every": "eval_steps",
    "best_metric": "metric_for_best_model", "log_every": "logging_steps", "trackers": "report_to",
}  # fmt: skip
# What the Trainer of transformers and others call it --> our key, and what is different.
ELSEWHERE = {
    "lr_scheduler": "lr_scheduler_type", "gradient_clip_val": "max_grad_norm", "early_stopping_patience": "patience",
    "model_name_or_path": "model", "dataset_name": "data", "train_file": "data", "validation_file": "eval_data",
    "max_length": "seq_len", "max_seq_length": "seq_len", "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp",
    "output_dir": "checkpoint, the folder of all that training needs to go on; output is that of the trained model",
    "per_device_train_batch_size": "batch_size, which counts the rows of all copies together",
    "train_batch_size": "batch_size, which counts the rows of all copies together",
    "gradient_accumulation_steps": "micro_batches; batch_size counts the rows of a whole step",
    "num_train_epochs": "max_steps: rows of the data * epochs / batch_size",
    "warmup_ratio": "warmup_steps: ratio * steps",
    "load_best_model_at_end": "best, the folder of the best checkpoint",
    "bf16": "load: {precision: bf16}", "fp16": "load: {precision: fp16}", "deepspeed": "engine: deepspeed",
    "gradient_checkpointing": "load: {checkpoint_ratio: 1.0}",
}  # fmt: skip
