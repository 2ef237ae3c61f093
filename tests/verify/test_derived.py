"""Derived tables, which are proven before use; the proof rejects wrong ones."""

import dataclasses
import re
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

from slapo_zoo.errors import ArchitectureError, WeightsError
from slapo_zoo.language.primitives import ForkRng, Shard, ShardAttribute, SumGradient, Sync
from slapo_zoo.language.schedule import Schedule
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.placement import Placement, TensorSpec
from slapo_zoo.verify.case import Trial
from slapo_zoo.verify.derive import Search, derive, problem_of
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.weights.keys import KeyMap
from slapo_zoo.zoo.apply import apply_table
from slapo_zoo.zoo.derivation.observe import Observation
from slapo_zoo.zoo.derivation.source import to_source
from slapo_zoo.zoo.derivation.spelling import find_spelling
from slapo_zoo.zoo.derivation.stacks import find_stacks
from slapo_zoo.zoo.derivation.table_document import from_document, to_document
from slapo_zoo.zoo.derivation.table_rows import derive_table
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.tiny_config import Sizes, tiny

CLASSES = {
    "bloom": transformers.BloomForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "distilbert": transformers.DistilBertForMaskedLM,
    "qwen2_moe": transformers.Qwen2MoeForCausalLM,
    "camembert": transformers.CamembertForCausalLM,
    "convnext": transformers.ConvNextForImageClassification,
    "ctrl": transformers.CTRLLMHeadModel,
    "clip": transformers.CLIPForImageClassification,
    "youtu": transformers.YoutuForCausalLM,
    "jetmoe": transformers.JetMoeForCausalLM,
    "qwen2_audio": transformers.Qwen2AudioForConditionalGeneration,
    "layoutlmv3": transformers.LayoutLMv3ForSequenceClassification,
    "modernvbert": transformers.ModernVBertForMaskedLM,
    "t5gemma": transformers.T5GemmaForConditionalGeneration,
    "falcon_h1": transformers.FalconH1ForCausalLM,
}
MUTATED = ("bloom", "qwen2", "distilbert", "qwen2_moe")


@pytest.fixture(scope="module")
def searches():
    """Return a function: model type --> a search on its tiny model."""
    made = {}
    with tempfile.TemporaryDirectory() as scratch:

        def search(name):
            if name not in made:
                config = tiny(CLASSES[name].config_class())
                folder = Path(scratch, name)
                case = tiny_case(config, CLASSES[name], folder, Sizes())
                made[name] = Search(config, case, (2, 1, 1), {})
            return made[name]

        yield search


def table_of(search):
    """Return the best candidate, which is correct."""
    make = search.candidates()[0]
    return make(search.case.config, search.small)


MUTATIONS = {
    "other axis": lambda d: dataclasses.replace(d, axis=1 - d.axis) if isinstance(d, Shard) and d.axis < 2 else d,
    "not sharded": lambda d: None if isinstance(d, Shard) and d.param_name == "weight" else d,
    "no gradient sum": lambda d: None if isinstance(d, Sync) and d.mode == "bwd_post" else d,
    "no output sum": lambda d: None if isinstance(d, Sync) and d.mode == "fwd_post" else d,
    "a head cut": lambda d: dataclasses.replace(d, unit=d.unit // 2) if isinstance(d, Shard) and type(d.unit) is int and d.unit > 1 else d,
    "no attribute": lambda d: None if isinstance(d, ShardAttribute) else d,
    "groups forgotten": lambda d: dataclasses.replace(d, groups=()) if isinstance(d, Shard) and d.groups else d,
    "summed twice": lambda d: dataclasses.replace(d, sync_op_or_fn="all_reduce_twice")
    if isinstance(d, Sync) and d.mode == "fwd_post" and d.sync_op_or_fn == "all_reduce" else d,
    "gradient not summed": lambda d: None if isinstance(d, SumGradient) else d,
}  # fmt: skip


def mutants(table):
    """Yield the table with each line broken in every way that changes it."""
    fields = [("body", i) for i in range(len(table.body))]
    fields += [("heads", i) for i in range(len(table.heads))]
    for where, i in fields:
        rows = list(getattr(table, where))
        pattern, rule = rows[i]
        for name, mutate in MUTATIONS.items():
            new = tuple(m for m in map(mutate, rule) if m is not None)
            if new != rule:
                rows[i] = (pattern, new)
                yield f"{pattern}: {name}", dataclasses.replace(table, **{where: tuple(rows)})


# Another way to write the same program: a tied head is sharded with its embedding; groups of query heads
# shrink only with more ranks than KV heads.
SAME = {
    ("bloom", "lm_head: not sharded"), ("distilbert", "vocab_projector: not sharded"),
    ("qwen2", "layers.*.self_attn: no attribute"), ("qwen2_moe", "layers.*.self_attn: no attribute"),
}  # fmt: skip


def caught(search, kinds=None):
    """Return the number of mutants, and those that the proof accepts."""
    found = [(name, table) for name, table in mutants(table_of(search))
             if (search.config.model_type, name) not in SAME
             and (kinds is None or name.rpartition(": ")[2] in kinds)]  # fmt: skip
    return len(found), [name for name, table in found if not problem_of(Trial(search.case, (2, 1, 1), table))]  # fmt: skip


def test_verification_rejects_wrong_automatically_derived_schedules(searches):
    """Try a few wrong schedules of each kind; the slow test tries all."""
    count, passed = caught(searches("bloom"), {"no gradient sum", "no attribute"})
    assert count >= 4
    assert passed == []


def test_verification_rejects_a_schedule_whose_dropout_differs_between_replicated_tensors(searches):
    """The fault shows only with dropout."""
    search = searches("distilbert")
    table, width = table_of(search), search.case.config.dim
    # drops what every rank has whole
    wrong = ("embeddings.dropout", (ForkRng(axis=-1, size=2 * width),))
    body = (wrong, *(row for row in table.body if row[0] != wrong[0]))
    found = problem_of(Trial(search.case, (2, 1, 1), dataclasses.replace(table, body=body)))
    assert re.match(r"dropout: .* differs from that of rank 0, as its gradient does", found)


@pytest.mark.slow
def test_verification_rejects_forty_wrong_automatically_derived_schedules(searches):
    counts = [caught(searches(name)) for name in MUTATED]
    assert sum(count for count, _ in counts) >= 40
    assert [name for _, passed in counts for name in passed] == []


def test_automatically_derived_schedule_passes_verification_on_a_pipeline():
    config = tiny(transformers.ElectraConfig())
    proof = derive(config, transformers.ElectraForSequenceClassification, (1, 2, 1))
    assert proof.table.blocks == ("encoder.layer.*",)
    assert proof.share > 0  # the share that tp would shard; the table is right on any mesh
    assert "proven on tp=1, pp=2" in proof.words()[0]


def test_automatically_derived_schedule_without_a_list_of_blocks_refuses_a_pipeline(searches):
    search = searches("bloom")
    table = dataclasses.replace(table_of(search), blocks=())
    assert "2 stages, but the model has 0 blocks" in problem_of(
        Trial(search.case, (1, 2, 1), table)
    )


def test_failed_automatic_schedule_derivation_raises_with_the_cause(searches):
    """The error names the first problem where no module's sharding causes the fault."""
    search = searches("distilbert")
    broken = Search(search.config, search.case, (2, 1, 1), {"pipeline_order": "no such order"})
    with pytest.raises(
        ArchitectureError, match=r"no table .* is right; the last one: .*no such order"
    ):
        broken.run()


def test_automatically_derived_schedule_is_equal_after_writing_to_and_reading_from_json(searches):
    from slapo_zoo.zoo.derivation.table_document import freeze

    for name in ("bloom", "qwen2_moe"):
        search = searches(name)
        frozen = freeze(table_of(search), search.small)
        assert from_document(to_document(frozen)) == frozen


def test_python_source_written_for_a_derived_schedule_recreates_the_schedule(searches):
    from slapo_zoo.zoo.table import ZOO

    search = searches("distilbert")
    table = derive_table(search.config, search.small, search.case.seen, {})
    table = dataclasses.replace(table, model_type="another")
    names = {}
    try:
        exec(to_source(table, {}), names)
        assert ZOO["another"] == table
    finally:
        ZOO.pop("another", None)


def test_tiny_config_for_schedule_derivation_keeps_grouped_kv_heads_and_growing_swin_heads():
    config = transformers.Qwen2Config(num_attention_heads=28, num_key_value_heads=4)
    small = tiny(config)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 1)
    assert small.num_hidden_layers == 2
    assert config.num_hidden_layers == 32
    swin = tiny(transformers.SwinConfig())
    assert list(swin.num_heads) == [4, 8, 16, 32]
    assert swin.embed_dim == 32


def test_lists_of_equal_blocks_are_detected_inside_resnet_stages_and_bart_towers():
    with torch.device("meta"):
        resnet = transformers.ResNetForImageClassification(tiny(transformers.ResNetConfig()))
        bart = transformers.BartModel(tiny(transformers.BartConfig()))
    assert find_stacks(resnet) == ["resnet.encoder.stages.*.layers.*"]
    assert find_stacks(bart) == ["encoder.layers.*", "decoder.layers.*"]


def test_schedule_derivation_splits_only_the_decoder_into_stages_if_others_fail(
    searches, monkeypatch
):
    """Cuts in all lists of blocks, then in each list alone, are tried; here only cuts in the decoder pass."""
    config = tiny(transformers.BartConfig())
    with tempfile.TemporaryDirectory() as scratch:
        cls = transformers.BartForConditionalGeneration
        search = Search(config, tiny_case(config, cls, Path(scratch), Sizes()), (1, 2, 1), {})
        proven = Search._probe
        right = "model.decoder.layers.*"
        monkeypatch.setattr(Search, "_probe", lambda self, make, sizes: proven(self, make, sizes)
                            if self.stack == right else "wrong")  # fmt: skip
        assert search.run().table.blocks == ("decoder.layers.*",)


@pytest.mark.one_in(3, 4)
@pytest.mark.parametrize("name", [
    "camembert", "convnext", "youtu", "jetmoe", "qwen2_audio", "ctrl", "layoutlmv3", "modernvbert", "t5gemma", "falcon_h1",
])  # fmt: skip
def test_schedule_derivation_passes_verification_for_unusual_model_classes(name):
    """Heads defined before their embedding; a constructor that looks at its numbers; rows of padding;
    experts that are chosen in a block; a forward that looks at its inputs; weights that are read, and parts
    that are called, beside their modules; other masks without a cache; buffers that a module above sets."""
    config, cls = CLASSES[name].config_class(num_labels=3), CLASSES[name]
    with tempfile.TemporaryDirectory() as scratch:
        case = tiny_case(config, cls, Path(scratch), Sizes())
        found = Search(case.config, case, (1, 2, 1), {})
        assert problem_of(Trial(case, (1, 2, 1), found._gathered(case.config, found.small))) == ""


def test_schedule_derivation_ignores_a_transformers_tp_plan_that_lacks_the_dropout_of_the_config():
    """transformers' tp_plan cannot express the dropout of the real config, which the tiny model lacks."""
    config = tiny(transformers.SeedOssConfig(residual_dropout=0.1))
    proof = derive(config, transformers.SeedOssForCausalLM, (2, 1, 1))
    assert proof.open_table.source.startswith("derived from")
    assert proof.share > 0.9


@pytest.mark.parametrize("name", ["T5", "Dinov2", "CLIP"])
def test_tiny_model_for_schedule_derivation_has_finite_gradients(name, tmp_path):
    """The tiny config sets a decoder's first token, a backbone's last stage and an image's size."""
    cls = getattr(
        transformers,
        {"T5": "T5ForConditionalGeneration"}.get(name, f"{name}ForImageClassification"),
    )
    case = tiny_case(
        tiny(cls.config_class() if name != "CLIP" else transformers.CLIPConfig()), cls, tmp_path
    )
    assert all(grad.isfinite().all() for grad in case.truth.grads.values())
    assert case.truth.loss > 0


def test_automatically_derived_schedule_does_not_shard_a_single_expert():
    config = tiny(transformers.HunYuanMoEV1Config())
    assert config.num_experts == 1
    with torch.device("meta"):
        model = transformers.HunYuanMoEV1ForCausalLM(config)
    rows = dict(derive_table(config, model, Observation(), {}).rows(model))
    assert rows["model.layers.*.mlp.experts"] == ()


def test_list_of_equal_layers_is_found_as_blocks_beside_a_larger_layer():
    with torch.device("meta"):
        small = torch.nn.ModuleDict(
            {"h": torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])}
        )
        small["front"] = torch.nn.Linear(100, 100)
    assert find_stacks(small) == ["h.*"]


def test_renamed_checkpoint_keys_are_detected_by_comparing_tensor_values():
    g = torch.Generator().manual_seed(0)
    experts, gate = torch.randn(2, 6, 4, generator=g), torch.randn(2, 4, generator=g)
    model = {"layers.0.mlp.experts.gate_up_proj": experts, "layers.0.mlp.gate.weight": gate}
    files = {"layers.0.moe.gate.weight": gate}
    for e in range(2):
        files[f"layers.0.mlp.experts.{e}.gate_proj.weight"] = experts[e, :3]
        files[f"layers.0.mlp.experts.{e}.up_proj.weight"] = experts[e, 3:]
    found = find_spelling(files, model)
    assert found.renames == ((".moe.", ".mlp."),)
    assert found.unknown == ()
    (piece,) = found.pieces
    assert piece.tensor == ".experts.gate_up_proj"
    assert piece.names == (".experts.{}.gate_proj.weight", ".experts.{}.up_proj.weight")


def test_checkpoint_key_that_matches_no_parameter_by_value_is_reported_as_unknown():
    tensor = torch.arange(6.0).view(2, 3)
    assert find_spelling({"w_t": tensor.t()}, {"w": tensor}).unknown == ("w_t",)


def test_checkpoint_key_renames_use_full_keys_when_parts_of_keys_are_ambiguous():
    """Two parts of one key map to two parts of model names that other keys share."""
    g = torch.Generator().manual_seed(0)
    pairs = [
        ("attn.wq", "self_attn.q_proj"),
        ("attn.norm", "self_attn.q_norm"),
        ("norm", "post_norm"),
    ]
    tensors = {(i, old): torch.randn(2, generator=g) for i in range(2) for old, _ in pairs}
    files = {f"llm.layers.{i}.{old}.weight": t for (i, old), t in tensors.items()}
    names = dict(pairs)
    model = {f"layers.{i}.{names[old]}.weight": t for (i, old), t in tensors.items()}
    found = find_spelling(files, model)
    assert found.unknown == ()
    keys = KeyMap(found.renames)
    assert keys.to_model("llm.layers.17.attn.wq.weight") == "layers.17.self_attn.q_proj.weight"
    assert keys.to_file("layers.17.post_norm.weight") == "llm.layers.17.norm.weight"


def test_checkpoint_tensor_stored_as_slices_along_its_first_axis_is_matched_to_its_parameter():
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 1, 4, generator=g)
    files = {
        f"layers.0.attn.{n}_conv1d.weight": t for n, t in zip("qkv", whole.chunk(3), strict=True)
    }
    found = find_spelling(files, {"layers.0.attn.conv1d.weight": whole})
    assert found.unknown == ()
    spec = TensorSpec("layers.5.attn.conv1d.weight", (6, 1, 4), "float32")
    keys = KeyMap(found.renames, found.pieces)
    parts = [f"layers.5.attn.{n}_conv1d.weight" for n in "qkv"]
    assert [s.name for s in keys.read_specs([spec])] == parts
    split = keys.split({spec.name: whole}, [spec], Mesh())
    assert all(torch.equal(split[n], t) for n, t in zip(parts, whole.chunk(3), strict=True))
    with pytest.raises(WeightsError, match="cannot be sharded"):
        keys.read_specs([dataclasses.replace(spec, placement=Placement(0))])


@pytest.mark.parametrize("name", ["Lilt", "RecurrentGemma", "Gemma4", "ProphetNet"])
def test_search_for_a_tiny_config_takes_the_first_size_whose_loss_is_finite(name, tmp_path):
    """Classes need widths that divide each other, deeper layers or other head sizes; one class has no size that trains."""
    ends = {"Lilt": "ForSequenceClassification"}
    cls = getattr(transformers, name + ends.get(name, "ForCausalLM"))
    if name == "ProphetNet":
        with pytest.raises(ArchitectureError, match=r"can train a tiny model.*its loss is nan"):
            derive(cls.config_class(), cls, (2, 1, 1))
        return
    config = cls.config_class() if name != "Gemma4" else transformers.Gemma4TextConfig()
    case = tiny_case(config, cls, tmp_path, Sizes())
    assert all(grad.isfinite().all() for grad in case.truth.grads.values())
    assert 0 < sum(grad.numel() for grad in case.truth.grads.values()) < 4e6


def test_automatically_derived_schedule_with_sequence_parallelism_shards_tokens_within_blocks():
    """The residual that ERNIE passes beside a submodule's input is sharded with it; a class without shardable tokens raises."""
    asked = {"sequence_parallel": True}
    found = derive(transformers.ErnieConfig(), transformers.ErnieForMaskedLM, (2, 1, 1), **asked)
    parts = ("attention", "intermediate", "output")
    assert found.open_table.all_tokens == tuple(f"encoder.layer.*.{part}" for part in parts)
    with pytest.raises(ArchitectureError, match="cannot be sharded over tp"):
        derive(transformers.ConvNextConfig(), transformers.ConvNextForImageClassification, (2, 1, 1), **asked)  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["OpenAIGPTLMHeadModel", "BioGptForCausalLM"])
def test_schedule_derivation_with_sequence_parallelism_shards_over_70_percent(name):
    """Parts of these blocks return lists, or are a product themselves."""
    cls = getattr(transformers, name)
    assert derive(cls.config_class(), cls, (2, 1, 1), sequence_parallel=True).share > 0.7


def test_derived_schedule_all_reduces_gradients_of_parameters_applied_to_sharded_tokens():
    """Parameters of any name count, also those that the block itself holds."""
    config = tiny(transformers.Dinov2Config())
    with torch.device("meta"):
        model = transformers.Dinov2ForImageClassification(config)
    model.dinov2.encoder.layer[0].scale = torch.nn.Parameter(torch.empty(4, device="meta"))
    model.dinov2.encoder.layer[0].mlp.sinks = torch.nn.Parameter(torch.empty(4, device="meta"))
    table = derive_table(config, model, Observation(), {}, tokens=True)
    sch = apply_table(Schedule(model, Mesh(2)), table, BuildOptions(sequence_parallel=True))
    summed = sch.state.sequence_gradients
    first = "dinov2.encoder.layer.0"
    assert {f"{first}.scale", f"{first}.layer_scale1.lambda1", f"{first}.norm1.bias"} <= summed
    assert not any("mlp" in name or "embeddings" in name for name in summed)


@pytest.mark.parametrize("mesh", [(2, 1, 1), pytest.param((2, 2, 1), marks=pytest.mark.slow)])
def test_schedule_derivation_of_a_bert_gpt2_encoder_decoder_shards_over_80_percent(mesh, caplog):
    """The derivation logs no warning of a failed dry run."""
    encoder, decoder = transformers.BertConfig(), transformers.GPT2Config()
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    assert derive(config, transformers.EncoderDecoderModel, mesh).share > 0.8
    assert not [record for record in caplog.records if "fake_tensor" in record.name]
