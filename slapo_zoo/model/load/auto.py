"""AutoScheduledModel: from a HuggingFace checkpoint or config to a model that trains on a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.errors import SlapoError
from slapo_zoo.model.integrations.dialects import check_target, in_target
from slapo_zoo.model.load.exact import exact_model
from slapo_zoo.model.load.planned import with_options
from slapo_zoo.model.load.resolve import Trust, resolve_schedule
from slapo_zoo.model.loader import Source, load_checkpoint, new_model
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.tune.planner.budget import policies_within, require_shape
from slapo_zoo.weights.load_rank_slices import LoadOptions, parse_size
from slapo_zoo.zoo.hf_arguments import HubArguments, renamed
from slapo_zoo.zoo.options import LoaderOptions
from slapo_zoo.zoo.schedule_source import FROM_TABLE, kind_of


def _prepared(options: LoaderOptions, config: Any, mesh: Mesh, dtype: torch.dtype) -> LoaderOptions:
    """Return the loader's options with a schedule card (published schedule) replaced by its changes, and with a
    `checkpoint_policy` that fits the budget `activation_memory=`, if given. `dtype` is that of the parameters.
    """
    trust = Trust(options.trust_remote_code, options.verify)
    options = resolve_schedule(options, config, options.auto_class, mesh, trust)
    return within_budget(options, config, mesh, dtype)


def _from_files(
    options: LoaderOptions, name_or_path: str | Path, revision: str | None, allow_pickle: bool,
    max_load_memory: int | str | None, check_finite: bool, map_weights: bool,
    config_changes: dict[str, Any],
) -> Any:  # fmt: skip
    """Load a checkpoint, the folder or Hub id `name_or_path`; return the model or, for `target=`, the engine around it.
    `AutoScheduledModel.from_pretrained` has the same arguments; its others, which do not concern files, are `options`.
    `map_weights` leaves weights in memory-mapped files (CPU), `check_finite` warns of NaN, `allow_pickle` allows `.bin`
    files, `config_changes` are fields of the config and arguments of transformers' `from_pretrained`.
    """
    if options.exact:
        files = name_or_path, revision, allow_pickle, max_load_memory, check_finite, map_weights
        return exact_model(options, lambda own: _from_files(own, *files, dict(config_changes)))
    hub = HubArguments.taken(config_changes)
    attention, dtype = renamed(config_changes, options.attention, options.dtype)
    options = replace(options, attention=attention, dtype=dtype)
    check_target("from_pretrained", options.target, options.target_options)
    with rank_guard("from_pretrained"):
        most = parse_size(max_load_memory, "max_load_memory")
        load = LoadOptions(most, check_finite, map_weights, hub.ignore_mismatched_sizes)
        source = Source(str(name_or_path), revision, allow_pickle, config_changes, hub, load)
        model = load_checkpoint("from_pretrained", options, source, _prepared)
        if hub.generation_config is not None:
            model.generation_config = hub.generation_config
        return in_target(model, options.target, options.target_options)


def _from_config(options: LoaderOptions, config: Any) -> Any:
    """Return a scheduled model of a config with new weights, as `AutoScheduledModel.from_config` describes."""
    if options.exact:
        return exact_model(options, lambda own: _from_config(own, config))
    check_target("from_config", options.target, options.target_options)
    with rank_guard("from_config"):
        model = new_model("from_config", options, config, _prepared)
        return in_target(model, options.target, options.target_options)


class AutoScheduledModel:
    """Factory of scheduled (sharded) models: `from_pretrained` reads a checkpoint, `from_config` draws new weights."""

    def __init__(self) -> None:
        hint = "call AutoScheduledModel.from_pretrained(...) or .from_config(...)"
        raise SlapoError("AutoScheduledModel", "()", "this class has no instances", hint)

    @classmethod
    @with_options(_from_files)
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        tp: int = 1,
        pp: int = 1,
        dp: int | None = None,
        sequence_parallel: bool = False,
        schedule: Any = "zoo",
        pipeline_order: str = "1f1b",
        stages_per_rank: int | None = None,
        auto_class: Any = None,
        dtype: str | torch.dtype = "auto",
        precision: str | None = None,
        dp_shard: int = 1,
        zero_stage: int = 3,
        device: str | torch.device | None = None,
        micro_batches: int | None = None,
        checkpoint_ratio: float = 0.0,
        checkpoint_policy: str | Sequence[str] = "",
        exact: bool | Mapping[str, int] = False,
        activation_memory: int | str | None = None,
        micro_batch_shape: tuple[int, int] | None = None,
        attention: str | None = None,
        kernels: str | Sequence[str] = "auto",
        seed: int | None = None,
        revision: str | None = None,
        allow_pickle: bool = False,
        max_load_memory: int | str | None = None,
        check_finite: bool = False,
        trust_remote_code: bool = False,
        verify: str = "quick",
        map_weights: bool = True,
        target: str | None = "torch",
        target_options: Mapping[str, Any] | None = None,
        cp: int = 1,
        cp_attention: str = "gather",
        **config_changes: Any,
    ) -> Any:
        """Load a checkpoint as a scheduled model; every rank reads only its own bytes of the files.

        Args:
            name_or_path: a folder, or a model id of the Hub.
            tp: ranks that shard each layer.
            pp: ranks that shard the layers into stages.
            dp: ranks that shard the batch; None takes all ranks divided by tp * pp * cp.
            sequence_parallel: tp ranks shard the tokens too, between the sharded layers.
            schedule: how modules are sharded. "zoo" takes the table (sharding rules) of the model's family; a `Table`
                replaces that table. A card (a published schedule) is a folder, or "org/name@<sha>" of the Hub;
                arguments that it recommends for this model and these devices hold unless they are passed. A Schedule,
                its steps, or the .json file of its `to_json` is replayed. A function is called with the Schedule;
                `extend(function)` applies "zoo" before it. "auto" is "zoo", or for a family without a table one that is
                derived from its modules, and checked on a tiny model (outputs, loss, gradients) before use.
            pipeline_order: 1f1b, gpipe, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipev.
            stages_per_rank: stages on each rank in an interleaved order, at least 2.
            auto_class: model class or Auto class of `transformers`, or its name; None takes the checkpoint's class.
            dtype: dtype of the parameters; "auto" takes the checkpoint's.
            precision: "bf16" or "fp16": fp32 parameters, gradients and optimizer states, and 16 bits in forward and
                backward; "bf16-pure": 16 bits everywhere; "fp32". None computes in the dtype of the parameters.
            dp_shard: dp ranks over which parameters, gradients and optimizer states are sharded (ZeRO), a
                divisor of dp; each group of `dp_shard` ranks holds one replica.
            zero_stage: 3 gathers the parameters of a block only while it runs; 2 gathers all of a stage for a
                step; 2 and 3 reduce gradients after each micro-batch; 1 shards optimizer states alone, and
                reduces unsharded gradients once per step.
            device: None takes this rank's GPU, or the CPU.
            micro_batches: number of micro-batches of a step where `train_step` is not given one.
            checkpoint_ratio: share of the blocks whose activations are recomputed, 0 to 1.
            checkpoint_policy: what those blocks keep: "" nothing, "save_matmuls" the outputs of matrix products,
                "offload" everything, in host memory (on a GPU), "sharded" nothing but a tp shard of a block's input; or
                a list of one policy per block: "keep", "recompute", "save_matmuls", "offload" or "sharded".
            exact: train with the same bits on every mesh: the largest mesh that the run will ever have, e.g.
                `{"tp": 4, "dp": 2}`; each process then computes the shards of several ranks of that mesh, one
                thread each. True takes the mesh itself. On the CPU; see "The same bits" in the documentation.
            activation_memory: most bytes that a rank keeps for its backwards, "8GiB" or bytes: the planner chooses the
                cheapest policy per block; if none fits, the nearest budget is named before anything is allocated.
            micro_batch_shape: (rows, tokens) of the micro-batches, which `activation_memory` needs.
            attention: backend: sdpa (default), eager, flash (the package flash-attn), flex or
                xformers; SlapoError if family or device do not support it.
            kernels: "auto" takes the kernels that measurements on this kind of device show not to be slower (on a
                device without measurements, only those that leave work out), "measure" measures them first, once,
                "reference" takes none, a name or a list exactly these; `model.schedule.kernels` says why.
                A model that you compile as a whole is best loaded with "reference".
            seed: seed of dropout and of weights that the checkpoint lacks.
            revision: branch, tag or commit of the Hub.
            allow_pickle: read `.bin` files, which are pickles; refused otherwise.
            max_load_memory: most memory that this rank's weights may take, "8GB" or bytes: checked
                before anything is allocated.
            check_finite: warn about tensors that contain NaN or infinity.
            trust_remote_code: run the `schedule.py` of a card that is pinned to a sha.
            verify: "quick" refuses a card whose schedule is wrong on a small model of the family;
                "off" skips the check.
            map_weights: on the CPU, leave contiguous tensors in the memory-mapped files until
                `train()` copies them; False reads all of them now. Mapped files must not be changed
                in place; replacing them by a rename, as every save of ours does, is safe.
            target: engine that trains the model: torch, deepspeed or megatron.
            target_options: options of that engine, as `init_target_engine` takes them, e.g.
                `{"config": "ds.json", "optimizer": AdamW}`.
            cp: ranks that shard the tokens of each row, for rows that are too long for one device; the guide,
                "Long rows", says which models and options it takes.
            cp_attention: how attention sees the tokens of all cp ranks: "gather" all-gathers keys and values;
                "ulysses" computes some heads of all tokens on each rank, and cp must divide the heads of a rank;
                "ring" passes keys and values from rank to rank.
            config_changes: fields of the config to change, e.g. `num_labels=3`; and arguments of
                transformers' `from_pretrained`: token, cache_dir, local_files_only, subfolder,
                variant, config, attn_implementation, torch_dtype, ignore_mismatched_sizes, ....

        Returns:
            for torch without options the model itself; else the engine, which has all that the
            model has, its `model` and `optimizer`, and `update(batch)` for a whole step.

        Raises:
            SlapoError: an argument of the wrong type, or an unknown one (with the nearest names); an
                engine that does not exist, is not installed, or lacks an option.
        """

    @classmethod
    @with_options(_from_config, like=from_pretrained)
    def from_config(cls, config: Any, *options: Any, **named: Any) -> Any:
        """Make a model with new weights, the same for every (tp, pp, dp).

        Args:
            config: config of `transformers`.
            *options: arguments of `from_pretrained` (tp, pp, dp, ...) in its order, without those for files.
            **named: the same arguments by name.

        Returns:
            the model; with `target="deepspeed"` or another engine than torch, the engine, whose `model` is the model.
        """


def within_budget(
    options: LoaderOptions, config: Any, mesh: Mesh, dtype: torch.dtype
) -> LoaderOptions:
    """Return the options with a `checkpoint_policy` (what each block saves for the backward) that fits the budget
    `activation_memory=`; unchanged if no budget is given.

    Args:
        options: options of the model.
        config: config of the model.
        mesh: mesh of the model.
        dtype: dtype of the parameters.

    Raises:
        SlapoError: no choice of policies fits the budget, or the budget contradicts another argument.
    """
    asked = options.activation_memory
    budget = parse_size(asked, "activation_memory")
    if budget is None:
        return options
    where, what = "from_pretrained", f"activation_memory={asked!r}"
    if options.checkpoint_ratio or options.checkpoint_policy:
        problem = "found checkpoint_ratio= or checkpoint_policy= too, but activation_memory= chooses the recomputation"
        raise SlapoError(where, what, problem, "pass only one of the two")
    if kind_of(options.schedule) not in FROM_TABLE:
        problem = "a card or a schedule of your own decides itself which blocks are recomputed"
        hint = 'leave activation_memory= out, or use schedule="zoo"'
        raise SlapoError(where, what, problem, hint)
    width = getattr(config.get_text_config(), "hidden_size", 0)
    least = width * (options.compute_dtype or dtype).itemsize // mesh.tp
    if budget < least:  # too little for any micro-batch shape
        problem = f"a block keeps {least} bytes of one token, even with full recomputation; the budget is {budget}"
        hint = 'give a larger budget, e.g. activation_memory="8GiB"'
        raise SlapoError(where, what, problem, hint)
    shape = require_shape(options.micro_batch_shape)
    policies = policies_within(
        budget, repr(asked), config, options.auto_class, mesh, options, dtype, shape,
        options.micro_batches,
    )  # fmt: skip
    return options if set(policies) == {"keep"} else options.but(checkpoint_policy=policies)
