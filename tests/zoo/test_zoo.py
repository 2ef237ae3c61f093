"""The grid: every family, head class and layout against plain `transformers` in one process.

Each cell compares outputs, loss, every gradient, the norm and three AdamW steps with clipping, and
saves the model before it trains: the file holds the keys and bits that plain `transformers` wrote.
A part runs always, which has every family and layout, and every other head of a table; `ci/run.py grid` runs all cells.
"""

import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from heads import ELSEWHERE, HEADLESS, HEADS, REFUSED, UNEVEN
from parity import (
    LAYOUTS,
    Result,
    batch_of,
    checkpoint,
    compare,
    references,
    scheduled,
    tiny_config,
)
from slapo_zoo import AutoScheduledModel, SlapoError
from slapo_zoo.zoo.table import families

# layouts of main heads on ranks that are processes
IN_PROCESSES = {"gpt2": ("1x1x1", "4x1x1", "2x1x2", "2x2x1-sp")}
# Their rows are mostly those of another family, which runs on 2x2x1: of their heads the main one runs always, on two
# ranks (tests/golden/plans holds their plans on tp=2 pp=2); all of them in the slow grid.
FOLLOWERS = (
    "mt5", "umt5", "mbart", "m2m_100", "camembert", "xlm-roberta", "roberta", "electra", "distilbert", "esm", "deberta-v2",
    "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "phi3", "gptj", "bloom", "falcon", "whisper",
)  # fmt: skip
IN_STAGES = ("2x2x1", "2x2x1-sp")  # on one of them the main head of each other family
HEADS_WITH_TP = (
    "albert",
    "gpt_neo",
    "bart",
    "gpt_neox",
    "modernbert",
    "vit",
)  # so their main head runs on pp=2 alone
TWO_RANKS = ("1x2x1", "2x1x1-sp")  # on one of them, which the follower supports, its main head
TURNS = ("1x2x1", "2x1x1-sp", "2x1x2", "4x1x1", "2x1x1")  # layouts of other heads
P = 0.1


def always(family, index, number):
    """Return the layouts on which a case always runs: `index` in its family, `number` of all."""
    turn = list(HEADS).index(family)
    in_stages, one = IN_STAGES[turn % len(IN_STAGES)], TURNS[number % len(TURNS)]
    if index == 0 and family in IN_PROCESSES:
        return IN_PROCESSES[family]
    if family in FOLLOWERS:
        case, order = HEADS[family][0], TWO_RANKS[:: 1 if turn % 2 else -1]
        return () if index else [one for one in order if not refusal(case, LAYOUTS[one])][:1]
    if index == 0:
        return ("1x2x1",) if family in HEADS_WITH_TP else (in_stages,)
    return ({"4x1x1": "2x1x1"}.get(one, one),) if number in KINDS else ()


def first_of_their_kind():
    """Yield the numbers of those of every other head that bring labels, a variant or an option of the config of their own."""
    flat = [(family, index, case) for family, cases in HEADS.items() for index, case in enumerate(cases)]  # fmt: skip
    before = set()
    for number, (family, index, case) in enumerate(flat):
        kind = {*case.labels, *case.variant, *(key for key, _ in case.config)}
        if index and number % 2 and family not in FOLLOWERS and not kind <= before:
            before |= kind
            yield number


KINDS = set(first_of_their_kind())


def cell(layout, family, case, quick):
    marks = [pytest.mark.grid] if quick else [pytest.mark.grid, pytest.mark.slow]
    more = "-".join(str(value) for _, value in case.config if value != 3)
    name = "-".join(filter(None, [case.cls, *case.labels, *case.variant, more, layout]))
    return pytest.param(family, case, layout, marks=marks, id=name)


def cells():
    flat = [(f, i, case) for f, cases in HEADS.items() for i, case in enumerate(cases)]
    for number, (family, index, case) in enumerate(flat):
        for layout in LAYOUTS:
            yield cell(layout, family, case, layout in always(family, index, number))


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("zoo")


def size(layout):
    return layout[0] * layout[1] * layout[2]


def refusal(case, layout):
    """Return the text of the expected error where a head does not support a layout."""
    words = {k: v for name in (case.cls, *dict(case.config)) for k, v in REFUSED.get(name, {}).items()}  # fmt: skip
    parts = {"pp": layout[1] > 1, "dp": layout[2] > 1, "sp": layout[3:] == (True,)}  # fmt: skip
    return "|".join(words[name] for name, asked in parts.items() if asked and name in words)


@pytest.mark.parametrize(("family", "case", "layout"), [*cells()])
def test_every_model_family_has_the_losses_and_gradients_of_plain_transformers(
    family, case, layout, root, ranks, threads, tmp_path, record_property
):
    record_property("cell", (family, layout))
    ranks = ranks if family in IN_PROCESSES else threads
    sizes, folder, out = LAYOUTS[layout], checkpoint(case, root), tmp_path / "saved"
    micro_batches = 1 if "micro" in REFUSED.get(case.cls, ()) else None
    arguments = (size(sizes), case, folder, sizes, micro_batches, 0, out)
    if words := refusal(case, sizes):
        record_property("refused", words)
        with pytest.raises(SlapoError, match=words):
            ranks.run(scheduled, *arguments)
        return
    truth, plains = references(case, folder)
    results = ranks.run(scheduled, *arguments)
    compare(results[0][0], plains, truth)
    all_ranks_agree(results, sizes)
    saved_as_plain_transformers_saves(folder, out)


def all_ranks_agree(results, sizes):
    """Fail unless losses and outputs are on every rank, and tp and dp peers hold equal replicated weights."""
    first = results[0][0]
    for result, _ in results:
        assert result.losses == pytest.approx(first.losses, rel=1e-6)
        for name, want in first.outputs.items():
            torch.testing.assert_close(result.outputs[name], want, rtol=1e-5, atol=1e-6)
    tp, pp, dp = sizes[:3]
    for stage in range(pp):
        stage_ranks = results[stage * tp * dp : (stage + 1) * tp * dp]
        assert all(replicated == stage_ranks[0][1] for _, replicated in stage_ranks)


def saved_as_plain_transformers_saves(folder, out):
    want, found = (load_file(path / "model.safetensors") for path in (folder, out))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)


# one of each kind: every cell above has the keys and bits of its file
ALWAYS_LOADED = ("gpt2", "clip")


def main_cases():
    for family, (case, *_) in HEADS.items():
        marks = () if family in ALWAYS_LOADED else pytest.mark.slow
        yield pytest.param(family, case, marks=marks, id=family)


def save(folder, out):
    AutoScheduledModel.from_pretrained(folder, tp=2, pp=2).save_pretrained(out)


@pytest.mark.parametrize(("family", "case"), [*main_cases()])
def test_saved_files_of_every_model_family_load_in_plain_transformers(
    family, case, root, threads, tmp_path
):
    """Plain `from_pretrained` finds every key, and the weights are bit-equal."""
    folder, out = checkpoint(case, root), tmp_path / "saved"
    threads.run(save, 4, folder, out)
    cls = getattr(transformers, case.cls)
    model, info = cls.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    want = cls.from_pretrained(folder).state_dict()
    found = model.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], want[key]) for key in want)
    assert as_saved(model.config) == as_saved(cls.from_pretrained(folder).config)
    files = [path / "generation_config.json" for path in (folder, out)]
    assert len({path.read_text() for path in files if path.exists()}) <= 1


def as_saved(config):
    return config.to_dict() | {"_name_or_path": ""}


@pytest.mark.one_in(2, 2)
@pytest.mark.grid
@pytest.mark.parametrize(("case", "layout"), UNEVEN, ids=lambda x: getattr(x, "cls", str(x)))
def test_attention_heads_that_tp_does_not_divide_have_the_gradients_of_plain_transformers(
    case, layout, root, threads, tmp_path
):
    folder, out = checkpoint(case, root), tmp_path / "saved"
    truth, plains = references(case, folder)
    results = threads.run(scheduled, size(layout), case, folder, layout, None, 0, out)
    compare(results[0][0], plains, truth)
    saved_as_plain_transformers_saves(folder, out)


def headless_cells():
    for number, case in enumerate(HEADLESS):
        for layout in LAYOUTS:
            if refusal(case, LAYOUTS[layout]):
                continue
            quick = layout == TURNS[number % len(TURNS)]
            yield cell(layout, case.cls, case, quick)


@pytest.mark.one_in(3, 3)
@pytest.mark.parametrize(("family", "case", "layout"), [*headless_cells()])
def test_base_models_without_head_have_the_outputs_of_plain_transformers(
    family, case, layout, root, threads, tmp_path
):
    """Compare outputs on every rank and the saved file; base models have no loss to train."""
    sizes, folder, out = LAYOUTS[layout], checkpoint(case, root), tmp_path / "saved"
    arguments = (case, folder, sizes, None, 0, out)
    want = forward_plain(case, folder)
    for found in threads.run(scheduled, size(sizes), *arguments):
        assert want.keys() == found.keys()
        for name in want:
            torch.testing.assert_close(found[name], want[name], rtol=1e-5, atol=1e-5)
    saved_as_plain_transformers_saves(folder, out)


def forward_plain(case, folder):
    model = getattr(transformers, case.cls).from_pretrained(folder).eval()
    return {
        k: v.detach() for k, v in model(**batch_of(case)).items() if isinstance(v, torch.Tensor)
    }


def drops(case):
    """Return the main head of a family with dropout, if its config has one."""
    of_heads = {"classifier_dropout": None}
    with_p, without = (tiny_config(c)[0].to_dict() for c in (replace(case, dropout=P), case))
    return with_p | of_heads != without | of_heads


def dropout_cells():
    for number, (family, (case, *_)) in enumerate(HEADS.items()):
        for layout in LAYOUTS if drops(case) else ():
            if layout != "1x1x1" and not refusal(case, LAYOUTS[layout]):
                quick = layout == TURNS[number % len(TURNS)]
                yield cell(layout, family, replace(case, dropout=P), quick)


@pytest.mark.one_in(3, 5)
@pytest.mark.parametrize(("family", "case", "layout"), [*dropout_cells()])
def test_every_sharded_model_family_with_dropout_on_has_the_losses_of_one_process(
    family, case, layout, root, threads, record_property
):
    """Compare with the one-process run of the same seed, which for GPT-2 and BERT equals plain
    `transformers` under the same masks (tests/zoo/test_dropout.py), and without dropout everywhere.
    """
    record_property("cell", (f"{family} dropout", layout))
    sizes, folder = LAYOUTS[layout], checkpoint(case, root)
    alone = (case, folder, (1, 1, 1), None, 7, None)
    truth = on_one_rank(threads, *alone, dtype="float64")
    results = threads.run(scheduled, size(sizes), case, folder, sizes, None, 7)
    near = (case, nudged(folder), *alone[2:])
    compare(results[0][0], [on_one_rank(threads, *alone), on_one_rank(threads, *near)], truth)
    calm = replace(case, dropout=0.0)
    without = on_one_rank(threads, calm, checkpoint(calm, root), *alone[2:])
    assert abs(truth.losses[0] - without.losses[0]) > 1e-4


KEPT: dict = {}


def nudged(folder):
    """Return the same checkpoint, each weight moved by at most half a unit in its last place.

    What that changes is rounding: norms behind sums of many ranks enlarge it (Gemma 3).
    """
    near = folder.with_name(f"{folder.name}-near")
    if not near.exists():
        shutil.copytree(folder, near)
        draw = torch.Generator().manual_seed(0)
        for file in near.glob("*.safetensors"):
            tensors = load_file(file)
            for x in tensors.values():
                if x.dtype == torch.float32:
                    x.mul_(
                        1 + (torch.rand(x.shape, generator=draw) - 0.5) * torch.finfo(x.dtype).eps
                    )
            save_file(tensors, file, {"format": "pt"})
    return near


def on_one_rank(ranks, *arguments, dtype="float32") -> Result:
    key = (*arguments, dtype)
    if key not in KEPT:
        KEPT[key] = ranks.run(one_rank, 1, arguments, dtype)[0][0]
    return KEPT[key]


def one_rank(arguments, dtype):
    return scheduled(*arguments, dtype=dtype)


def heads_of_transformers(model_type):
    """Every class that the Auto classes of transformers map a model_type to."""
    found = set()
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_NAMES") and model_type in mapping:
            classes = mapping[model_type]
            found |= {classes} if isinstance(classes, str) else set(classes)
    return found


@pytest.mark.parametrize("family", families())
def test_every_transformers_head_class_of_a_model_family_has_a_test_case(family):
    covered = {case.cls for case in HEADS.get(family, ())} | {case.cls for case in HEADLESS}
    missing = heads_of_transformers(family) - covered - ELSEWHERE.keys()
    assert not missing, (
        f"add them to tests/support/heads.py, or say there why not: {sorted(missing)}"
    )
    assert family in HEADS or family == "wideresnet"
