"""Weights that several stages share: equal after every step, saved once; token shards are sent as shards."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from parity import EPS, Case, batch_of, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel, MeshError, ScheduleError, emulate
from slapo_zoo.language.directive import ForwardContext
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.rank_plan import TIED
from slapo_zoo.pipeline.dry_run import dry_run
from slapo_zoo.pipeline.pipeline_runtime import fake_schedule
from slapo_zoo.pipeline.stages import StagePlan
from slapo_zoo.zoo.outline import Outline

T5 = Case("T5ForConditionalGeneration", ("tokens",), (("num_layers", 2), ("num_decoder_layers", 2)))
ALBERT = Case("AlbertForMaskedLM", ("tokens",), (("num_hidden_layers", 4),))
GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),))
T5_NAMES = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "lm_head.weight",
)
BLOCK = "albert.encoder.albert_layer_groups.0."
CASES = [(T5, T5_NAMES, 3), (ALBERT, (BLOCK,), 4)]  # case, names of what is shared, its owners


def train_and_save(case, folder, names, out):
    """Return this rank's shared tensors after each step; then all ranks save."""
    model = AutoScheduledModel.from_pretrained(folder, pp=4, auto_class=case.cls).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = []
    for step in range(2):
        optimizer.zero_grad()
        model.train_step(batch_of(case, step))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        shared = [p for n, p in model.named_parameters() if n.startswith(names)]
        states = [optimizer.state[p]["exp_avg"].clone() for p in shared]
        steps.append(([p.detach().clone() for p in shared], states))
    model.save_pretrained(out)
    return steps


@pytest.mark.parametrize(("case", "names", "owners"), CASES, ids=lambda x: getattr(x, "cls", None))
def test_weights_tied_over_pipeline_stages_stay_equal_and_are_saved_once(
    case, names, owners, tmp_path, threads
):
    folder = checkpoint(case, tmp_path)
    results = threads.run(train_and_save, 4, case, folder, names, tmp_path / "out")
    holders = [steps for steps in results if steps[0][0]]
    assert len(holders) == owners
    for step in range(2):
        first, *others = (steps[step] for steps in holders)
        for other in others:  # values, and the optimizer's state of them
            assert all(map(torch.equal, first[0], other[0]))
            assert all(map(torch.equal, first[1], other[1]))
        assert step == 0 or not torch.equal(first[0][0], holders[0][step - 1][0][0])
    want, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert found.keys() == want.keys()
    saved = [tensor for name, tensor in found.items() if name.startswith(names)]
    assert len(saved) == len(holders[0][-1][0])
    assert {t.sum().item() for t in saved} == {t.sum().item() for t in holders[0][-1][0]}


@pytest.mark.parametrize(("sequence_parallel", "tokens"), [(False, 12), (True, 6)])
def test_sequence_parallel_stages_send_shards_of_hidden_states_without_gathering(
    sequence_parallel, tokens
):
    config, cls = tiny_config(GPT2)
    outline = Outline(config, cls, Mesh(tp=2, pp=2), torch.float32,
                      sequence_parallel=sequence_parallel)  # fmt: skip
    mode, schedule = fake_schedule(outline.schedule, outline.cls)
    schedule.state.forward = ForwardContext(sequence_parallel)
    calls, _ = dry_run(schedule.model, outline.units, mode, batch_of(GPT2))
    plan = StagePlan.make(calls, outline.state.cuts, 0)
    hidden = [shape.shape for shape in map(plan.shape, plan.crossing(1)) if shape.requires_grad]
    assert hidden == [(GPT2.rows, tokens, 30)]


def test_pipeline_cut_after_a_call_that_no_forward_makes_is_refused():
    with pytest.raises(ScheduleError, match="a forward calls this block 1 times"):
        StagePlan.make([SimpleNamespace(unit="h.0")], [("h.0", 1)], 0)


PP2 = (1, 2, 1)
LLAMA = Case("LlamaForCausalLM", ("tokens",), (("tie_word_embeddings", True),))
BERT = Case("BertForMaskedLM", ("tokens",))
SEQ2SEQ = [Case(f"{name}ForConditionalGeneration", ("tokens",))
           for name in ("T5", "Bart", "M2M100", "Whisper")]  # fmt: skip
PARTS = {
    "head": lambda m: m.get_output_embeddings(), "table": lambda m: m.get_input_embeddings(),
    "cls": lambda m: m.cls, "encoder": lambda m: m.get_encoder(), "decoder": lambda m: m.get_decoder(),
}  # fmt: skip
FROZEN = [(case, part) for case in (GPT2, LLAMA, BERT) for part in ("head", "table")]
FROZEN += [
    (BERT, "cls"),
    *((case, part) for case in SEQ2SEQ for part in ("encoder", "decoder", "head")),
]


def train(model, case, change):
    """Train two steps after a change, with an optimizer over the trainable parameters, if any."""
    change(model)
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=1e-2, eps=EPS) if wanted else None
    for step in range(2):
        model.zero_grad()
        if isinstance(model, transformers.PreTrainedModel) and not hasattr(model, "train_step"):
            model(**batch_of(case, step)).loss.backward()
        else:
            rows = model.mesh.coord("dp"), model.mesh.dp
            model.train_step(
                {k: x.tensor_split(rows[1])[rows[0]] for k, x in batch_of(case, step).items()}
            )
        if optimizer is not None:
            optimizer.step()
    return model


def as_plain(case, folder, change, dp=1, **options):
    """Fail unless training with pp=2 equals plain, and tied weights agree bit by bit."""
    plain = getattr(transformers, case.cls).from_pretrained(folder).train()
    want = {n: p.detach() for n, p in train(plain, case, change).named_parameters()}

    def staged():
        model = AutoScheduledModel.from_pretrained(
            folder, pp=2, auto_class=case.cls, **options
        ).train()
        named = dict(train(model, case, change).named_parameters())
        (tied,) = model.plan.sums_of(named, TIED).values()
        ties = {name: named[name].detach() for name in tied}
        return model.consolidated_state_dict(), ties

    (found, here), *_, (_, there) = emulate(staged, mesh=(1, 2, dp))
    assert here.keys() == there.keys()
    assert here
    for name, tensor in here.items() if dp == 1 else ():
        assert torch.equal(tensor, there[name]), name
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5, msg=name)


ALWAYS = (GPT2, "head"), (LLAMA, "table"), (SEQ2SEQ[1], "decoder")


@pytest.mark.parametrize(
    ("case", "part"),
    [pytest.param(*cell, marks=() if cell in ALWAYS else pytest.mark.slow) for cell in FROZEN],
    ids=lambda x: getattr(x, "cls", x),
)
def test_weight_tied_over_stages_and_frozen_under_either_name_trains_as_in_plain_transformers(
    case, part, tmp_path
):
    as_plain(case, checkpoint(case, tmp_path), lambda m: PARTS[part](m).requires_grad_(False))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", ["head", "table"])
@pytest.mark.parametrize("case", [GPT2, SEQ2SEQ[0]], ids=lambda x: x.cls)
def test_gradient_hook_on_either_name_of_a_tied_weight_is_applied_exactly_once(
    case, part, tmp_path
):
    def halved(model):
        PARTS[part](model).weight.register_hook(lambda grad: grad / 2)

    as_plain(case, checkpoint(case, tmp_path), halved)


def changed_on_one_stage(folder):
    model = AutoScheduledModel.from_pretrained(folder, pp=2).train()
    model.train_step(batch_of(GPT2))
    if model.mesh.rank == 0:
        model.get_input_embeddings().weight.data.mul_(1.001)
    model.train_step(batch_of(GPT2))


def test_tied_weight_whose_values_differ_between_pipeline_stages_raises(tmp_path):
    with pytest.raises(
        MeshError, match="this tied weight has different values on different stages"
    ):
        emulate(changed_on_one_stage, checkpoint(GPT2, tmp_path), mesh=PP2)


def frozen_on_one_stage(folder):
    model = AutoScheduledModel.from_pretrained(folder, pp=2).train()
    if model.mesh.rank == 1:
        model.lm_head.requires_grad_(False)
    model.train_step(batch_of(GPT2))
    return [model.lm_head.weight.requires_grad, model.transformer.wte.weight.grad]


def test_tied_weight_frozen_on_one_pipeline_stage_is_frozen_on_all_stages(tmp_path):
    assert emulate(frozen_on_one_stage, checkpoint(GPT2, tmp_path), mesh=PP2) == [[False, None]] * 2


def test_frozen_tied_weight_with_dp_shard_keeps_its_value_in_training(tmp_path):
    def frozen(model):
        model.get_output_embeddings().requires_grad_(False)

    as_plain(GPT2, checkpoint(GPT2, tmp_path), frozen, dp=2, dp_shard=2)
