"""The schedule of each zoo table and the plan of its last rank, line by line in golden files, and its replay.

A table that changes on purpose changes its file: `pytest tests/zoo/test_golden.py --update-golden`.
"""

import copy
import importlib
from pathlib import Path

import pytest
import torch
import transformers

import slapo_zoo.hf.own.wideresnet  # noqa: F401 - transformers has no such family
from releases import OLDER_ROWS, is_older
from slapo_zoo import Mesh, Schedule
from slapo_zoo.errors import ArchitectureError
from slapo_zoo.hf import models as hf
from slapo_zoo.language.schedule import from_json
from slapo_zoo.parallel.paths import select
from slapo_zoo.zoo.apply import apply_table
from slapo_zoo.zoo.options import BuildOptions
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import base_prefix, extend, families, table_for
from tiny_configs import TINY

GOLDEN = Path(__file__).parents[1] / "golden"
OLDER = "-before-5.24"
# What switches on the modules that a family has only in some of its configs.
VARIANTS = {
    "gpt2": [{"add_cross_attention": True}],
    "bert": [{"add_cross_attention": True, "is_decoder": True}],
    "roberta": [{"add_cross_attention": True, "is_decoder": True}],
    "xlm-roberta": [{"add_cross_attention": True, "is_decoder": True}],
    "electra": [{"add_cross_attention": True, "is_decoder": True}],
    "esm": [
        {"position_embedding_type": "absolute", "emb_layer_norm_before": True},
        {"add_cross_attention": True, "is_decoder": True},
    ],
    "swin": [{"use_absolute_embeddings": True, "depths": [1, 1, 1, 1], "num_heads": [5, 5, 5, 5]}],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 5},
        {"alibi": True, "multi_query": False, "parallel_attn": False},
    ],
    "deberta-v2": [
        {
            "position_biased_input": True,
            "type_vocab_size": 2,
            "embedding_size": 14,
            "share_att_key": False,
            "conv_kernel_size": 3,
        },
    ],
    "camembert": [{"add_cross_attention": True, "is_decoder": True}],
    "opt": [{"word_embed_proj_dim": 14}],
    "t5": [{"feed_forward_proj": "gated-gelu"}, {"tie_word_embeddings": False}],
    "mt5": [{"feed_forward_proj": "relu"}],
    "umt5": [{"feed_forward_proj": "relu"}],
}
# The class of the golden file; BERT's has all of its heads.
MAIN = ("BertForPreTraining", "LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification")  # fmt: skip


def config_of(family, **changes):
    return transformers.AutoConfig.for_model(family, **{**TINY[family], **changes})


def classes_of(family):
    """Every model class of the family that transformers has; Gemma 3's module has models of images too."""
    config = config_of(family)
    module = type(config).__module__.replace("configuration_", "modeling_")
    modeling = importlib.import_module(module)
    classes = [getattr(modeling, name) for name in modeling.__all__]
    models = [c for c in classes if hasattr(c, "base_model_prefix") and c.__init__ is not None]
    models = [c for c in models if isinstance(config, c.config_class or object)]
    return [c for c in models if c.forward is not torch.nn.Module.forward]  # a base class has none


def main_class(family):
    by_name = {c.__name__: c for c in classes_of(family)}
    return by_name[next(name for ending in MAIN for name in by_name if name.endswith(ending))]


def on_meta(family, cls=None, **changes):
    cls = cls or main_class(family)
    seam = table_for(family).seam
    return hf.build_on_meta(cls, config_of(family, **changes), torch.float32, seam)


def file_of(family):
    """Name of a family's golden file; a family of OLDER_ROWS has one for older releases of transformers too."""
    return f"{family}{OLDER if is_older(family) else ''}.txt"


def scheduled(model, family, mesh, ratio=0.5):
    return apply_table(
        Schedule(model, mesh), table_for(family), BuildOptions(checkpoint_ratio=ratio)
    )


@pytest.mark.parametrize("family", families())
def test_printed_schedule_of_a_model_family_equals_its_golden_file(family, request):
    sch = scheduled(on_meta(family), family, Mesh(tp=2, pp=2))
    path, text = GOLDEN / file_of(family), f"{sch}\n"
    if request.config.getoption("update_golden"):
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path.name} is missing: run with --update-golden"
    assert text == path.read_text(encoding="utf-8"), "on purpose? then run with --update-golden"


@pytest.mark.parametrize("family", families())
def test_printed_sharding_plan_of_the_last_rank_equals_its_golden_file(family, request):
    """The test is fast, because the costs of the pipeline stages were estimated in the test of the schedule."""
    tp, pp = (1, 1) if family in ("mamba", "wideresnet") else (2, 2)
    mesh = Mesh(tp, pp, 2, rank=2 * tp * pp - 1)
    plan = Outline(config_of(family), main_class(family), mesh, torch.float32).plan
    file = GOLDEN / "plans" / file_of(family)
    text = "\n".join(line for line in str(plan).splitlines() if not line.startswith("plan ")) + "\n"
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_golden_files_exist_for_every_model_family_and_for_nothing_else():
    for folder in (GOLDEN, GOLDEN / "plans"):
        wanted = {*families(), *(family + OLDER for family in OLDER_ROWS)}
        assert {path.stem for path in folder.glob("*.txt")} == wanted


@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize("family", families())
def test_schedule_built_on_every_rank_has_the_same_directives_and_pipeline_cuts(family):
    """Built on meta without a process group: only the local shapes differ between ranks."""
    sizes = {"tp": 2, "pp": 2, "dp": 2}
    schedules = [scheduled(on_meta(family), family, Mesh(**sizes, rank=r)) for r in range(8)]
    whole = {n: p.shape for n, p in on_meta(family).named_parameters()}
    first = schedules[0]
    for sch in schedules:
        assert str(sch) == str(first)
        assert sch.diff(first) == ""
        assert sch.state.cuts == first.state.cuts
        for name, p in sch.model.named_parameters():
            placed = sch.state.placed.get(name)
            r = sch.mesh.coord("tp")
            want = placed.placement.local_shape(whole[name], 2, r) if placed else whole[name]
            assert p.is_meta
            assert tuple(p.shape) == tuple(want), name


@pytest.mark.one_in(2, 2)
@pytest.mark.parametrize("family", families())
def test_schedule_replayed_from_json_gives_the_same_history_and_weights(family):
    torch.manual_seed(0)
    config = config_of(family)
    if table_for(family).seam:
        config._attn_implementation = "slapo_zoo"
    model = main_class(family)(config)
    for rank in (0, 3):
        first, second = copy.deepcopy(model), copy.deepcopy(model)
        sch = scheduled(first, family, Mesh(tp=2, pp=2, rank=rank))
        again = Schedule(second, sch.mesh).replay(from_json(sch.to_json()))
        assert again.history == sch.history
        assert again.to_json() == sch.to_json()
        assert str(again) == str(sch)
        assert again.diff(sch) == ""
        assert again.state.placed.keys() == sch.state.placed.keys()
        assert [p for p, _ in second.named_modules()] == [p for p, _ in first.named_modules()]
        ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (second, first))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert _ties(second) == _ties(first)
        assert vars(second.config) == vars(model.config)


def _ties(model):
    """Names of each parameter that has several."""
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return sorted(n for n in names.values() if len(n) > 1)


@pytest.mark.parametrize("family", families())
def test_schedule_table_has_a_row_for_every_parameter_and_no_row_that_matches_nothing(family):
    """For all head classes and variants each parameter has a line in the table, and each line matches a module."""
    table, unused = table_for(family), None
    for changes in [{}, *VARIANTS.get(family, [])]:
        for cls in classes_of(family):
            model = on_meta(family, cls, **changes)
            rows = [pattern for pattern, _ in table.rows(model)]
            names = {path: type(module).__name__ for path, module in model.named_modules()}
            found = [select(pattern, names) for pattern in rows]
            _every_parameter_has_a_row(model, found, cls)
            empty = {i for i, paths in enumerate(found) if not paths}
            unused = empty if unused is None else unused & empty
    patterns = [pattern for pattern, _ in (*table.body, *table.heads)]
    empty = [patterns[i] for i in unused if i < len(patterns)]
    older = OLDER_ROWS.get(family, []) if not is_older(family) else []
    assert empty == older, "no class has these modules"


def _every_parameter_has_a_row(model, found, cls):
    named = {path for paths in found for path in paths}
    prefix = base_prefix(model)
    holders = {n.rpartition(".")[0] for n, _ in model.named_parameters(remove_duplicate=False)}
    nameless = sorted(at for at in holders - named if at.startswith(prefix))
    if not prefix:  # the base model, or a class that has none: heads stand beside the body
        nameless = [at for at in nameless if cls.__name__.endswith("Model")]
    assert not nameless, f"{cls.__name__}: the table has no row for {nameless[:5]}"


@pytest.mark.one_in(5, 4)
@pytest.mark.parametrize("family", families())
def test_schedule_table_shards_every_head_class_and_config_variant_without_error(family):
    """The table applies to every head class and variant without error, and every shard is at most as large as its tensor."""
    for changes in [{}, *VARIANTS.get(family, [])]:
        for cls in classes_of(family):
            model = on_meta(family, cls, **changes)
            before = {n: p.numel() for n, p in model.named_parameters()}
            sch = scheduled(model, family, Mesh(tp=4, pp=2, rank=5))
            assert sch.history
            local = {n: p.numel() for n, p in model.named_parameters()}
            assert all(local[n] <= before[n] for n in before), cls.__name__
            assert sum(local.values()) < sum(before.values())


def test_source_files_of_sharding_rules_have_at_most_100_lines():
    """Other libraries take 61 to 2,900 lines for a family; here its table file is all."""
    files = (Path(__file__).parents[2] / "schedules").glob("*.py")
    lines = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert set(lines) == {family.replace("-", "_") for family in families()}
    assert max(lines.values()) <= 100, lines


def test_extended_schedule_table_keeps_all_rows_that_are_not_overridden():
    """An extended table lists only the lines that differ; all others are the base table's."""
    llama, mixtral = table_for("llama"), table_for("mixtral")
    assert set(llama.body) - set(mixtral.body) == {r for r in llama.body if ".mlp" in r[0]}
    assert mixtral.heads == llama.heads
    with pytest.raises(ArchitectureError, match=r"no row 'layers\.\*\.ffn'"):
        extend("llama", "other", "nowhere", without=("layers.*.ffn",))


def test_config_options_unsupported_with_tp_are_accepted_with_pp_and_refused_with_tp():
    """BLOOM's slow_but_exact path multiplies slices of a row-parallel weight itself, past the all-reduce."""
    model = on_meta("bloom", slow_but_exact=True, pretraining_tp=2)
    assert scheduled(model, "bloom", Mesh(pp=2)).history
    with pytest.raises(ArchitectureError, match="slow_but_exact of bloom"):
        scheduled(on_meta("bloom", slow_but_exact=True), "bloom", Mesh(tp=2))
    assert scheduled(on_meta("falcon", attention_dropout=0.1), "falcon", Mesh(tp=2)).history
    with pytest.raises(ArchitectureError, match=r"found 0.1, expected 0.0 with alibi"):
        scheduled(on_meta("falcon", attention_dropout=0.1, alibi=True), "falcon", Mesh(tp=2))


def test_config_option_unsupported_with_sequence_parallelism_is_refused_only_with_it():
    table, options = table_for("deberta-v2"), BuildOptions(sequence_parallel=True)
    for mesh in (Mesh(tp=2), Mesh(pp=2)):
        sch = Schedule(on_meta("deberta-v2", conv_kernel_size=3), mesh)
        assert apply_table(sch, table, BuildOptions() if mesh.tp > 1 else options).history
    sch = Schedule(on_meta("deberta-v2", conv_kernel_size=3), Mesh(tp=2))
    with pytest.raises(ArchitectureError, match="found 3, expected 0 with sequence_parallel"):
        apply_table(sch, table, options)


def test_schedule_diff_between_two_option_sets_prints_the_changed_directives():
    family = "gpt2"
    a = scheduled(on_meta(family), family, Mesh(tp=2, pp=2), ratio=0.0)
    b = scheduled(on_meta(family), family, Mesh(tp=2, pp=2), ratio=1.0)
    lines = [line for line in b.diff(a).splitlines() if line[:1] in "+-"]
    assert lines[:2] == ["--- this", "+++ other"]
    changed = [f"-sch['transformer.h.{i}'].checkpoint()" for i in range(3)]
    assert lines[2:] == changed
