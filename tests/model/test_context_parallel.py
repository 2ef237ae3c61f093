"""Context parallelism (`cp=`): ranks that hold a part of the tokens of every row train as one process."""

import pytest
import torch
import transformers

from cut_rows import CLOSE, DERIVED, FAMILIES, case_of, closeness, require_equal, rows_of, trained
from parity import Case, batch_of, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel, SlapoError, emulate, init_target_engine
from slapo_zoo.parallel.token_cut import WAYS

QUICK = ("BioGptForCausalLM", "padded", "gather")


def cells():
    for cls, (_, masks, _) in FAMILIES.items():
        for number, mask in enumerate(masks):
            for cp in (2, 4):
                quick = number == 0 and cp == 2
                yield pytest.param(cls, mask, cp, marks=() if quick else pytest.mark.slow)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("cls", "mask", "cp"), list(cells()))
def test_context_parallel_training_has_the_losses_and_gradients_of_one_process(cls, mask, cp):
    """Losses, every gradient, the norm, and weights after two steps, with dropout."""
    case = case_of(cls)
    alone = trained(case, mask)
    found = emulate(trained, case, mask, mesh=(1, 1, cp), cp=cp)
    require_equal(found[0], alone, **closeness(case))
    assert all(each[0] == found[0][0] for each in found)


@pytest.mark.parametrize(
    ("cls", "mask", "way"),
    [
        pytest.param(cls, mask, way, marks=() if (cls, mask, way) == QUICK else pytest.mark.slow)
        for cls, (_, masks, _) in DERIVED.items() for mask in masks for way in WAYS
    ],
)  # fmt: skip
def test_schedule_auto_training_with_cp_has_the_losses_and_gradients_of_one_process(
    cls, mask, way, forked_child
):
    """Attention of the model goes through the attention interface of transformers, where cp replaces it."""
    case = case_of(cls)
    alone = trained(case, mask, schedule="auto")
    options = {"cp": 2, "cp_attention": way, "schedule": "auto"}
    found = emulate(trained, case, mask, mesh=(1, 1, 2), **options)
    require_equal(found[0], alone, **closeness(case))


@pytest.mark.slow
@pytest.mark.parametrize("cls", DERIVED)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 1, 2), {"tp": 2}), ((1, 2, 2), {"pp": 2, "micro_batches": 2}),
        ((1, 1, 4), {"dp": 2, "dp_shard": 2}), ((1, 1, 4), {"cp": 4}),
    ],
)  # fmt: skip
def test_schedule_auto_training_with_cp_and_other_mesh_dims_has_the_losses_of_one_process(
    cls, mesh, options, forked_child
):
    case = case_of(cls)
    alone = trained(case, "padded", schedule="auto")
    found = emulate(trained, case, "padded", mesh=mesh, **{"cp": 2, "schedule": "auto", **options})
    require_equal(found[0], alone, **closeness(case))


# class, kind of rows, sizes of the mesh, options of the loader; the first three run always
TOGETHER = [
    ("GPT2LMHeadModel", "packed", {"cp": 2, "dp": 2}, {}),
    ("T5ForConditionalGeneration", "padded", {"cp": 2, "tp": 2}, {"checkpoint_ratio": 1.0}),
    ("BertForMaskedLM", "left", {"cp": 2}, {"micro_batches": 2, "attention": "eager"}),
    ("BartForConditionalGeneration", "padded", {"cp": 2, "tp": 2}, {"micro_batches": 2}),
    ("GPT2LMHeadModel", "left", {"cp": 2, "tp": 2, "dp": 2}, {"checkpoint_ratio": 0.5}),
    ("BertForMaskedLM", "padded", {"cp": 2, "tp": 2, "dp": 2}, {"micro_batches": 2}),
]


@pytest.mark.parametrize(
    ("cls", "mask", "sizes", "options"),
    [pytest.param(*row, marks=pytest.mark.slow if i > 2 else ()) for i, row in enumerate(TOGETHER)],
)
def test_context_parallel_with_tp_dp_micro_batches_or_recomputation_has_the_losses_of_one_rank(
    cls, mask, sizes, options
):
    """Over tp and dp, in micro-batches, recomputed, and by the family's own attention."""
    case, ranks = case_of(cls), sizes.get("dp", 1) * sizes["cp"]
    alone = trained(case, mask, attention=options.get("attention"))
    found = emulate(trained, case, mask, mesh=(sizes.get("tp", 1), 1, ranks), **sizes, **options)
    require_equal(found[0], alone)


def one_step(folder, case, mask, saved, cp):
    """Loss and gradients of a step on real processes; the weights are saved."""
    model = AutoScheduledModel.from_pretrained(folder, cp=cp, dtype=torch.float64).train()
    loss = model.train_step(rows_of(case, mask))
    grads = model.consolidated_state_dict(grads=True)
    model.save_pretrained(saved)
    return float(loss), grads


@pytest.mark.parametrize(
    ("cls", "mask"),
    [
        ("LlamaForCausalLM", "packed"),
        *(
            pytest.param(cls, mask, marks=pytest.mark.slow)
            for cls, (_, masks, _) in FAMILIES.items()
            for mask in masks
            if (cls, mask) != ("LlamaForCausalLM", "packed")
        ),
    ],
)
def test_context_parallel_training_has_the_loss_and_gradients_of_plain_transformers(
    cls, mask, tmp_path, ranks
):
    """Loss and gradients of a real batch over two processes; plain transformers loads what they saved."""
    case = case_of(cls, dropout=0.0)
    folder, batch = checkpoint(case, tmp_path), rows_of(case, mask)
    plain = getattr(transformers, cls).from_pretrained(folder, dtype=torch.float64).train()
    cached = {"use_cache": False} if cls.endswith(("ForCausalLM", "LMHeadModel")) else {}
    loss = plain(**batch, **cached).loss
    loss.backward()
    found, grads = ranks.run(one_step, 2, folder, case, mask, tmp_path / "saved", 2)[0]
    assert found == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, p in plain.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(grads[name], expected, **closeness(case), msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip
    again = type(plain).from_pretrained(tmp_path / "saved").state_dict()
    for name, p in plain.named_parameters():
        assert torch.equal(again[name], p), name


def looked_at(case):
    """Logits in evaluation and generated tokens of one rank."""
    model = AutoScheduledModel.from_config(
        tiny_config(case)[0], auto_class=case.cls, cp=2, seed=3, dtype=torch.float64
    ).eval()
    batch = batch_of(case)
    with torch.no_grad():
        output = model(**batch)
    tokens = model.generate(batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
    return output.logits, output.loss, tokens


def test_every_cp_rank_returns_the_logits_and_generated_tokens_of_the_full_sequence():
    case = case_of("GPT2LMHeadModel")
    found = emulate(looked_at, case, mesh=(1, 1, 2))
    model = AutoScheduledModel.from_config(
        tiny_config(case)[0], auto_class=case.cls, seed=3, dtype=torch.float64
    ).eval()
    with torch.no_grad():
        output = model(**batch_of(case))
    for logits, loss, tokens in found:
        torch.testing.assert_close(logits, output.logits)
        torch.testing.assert_close(loss, output.loss)
        assert torch.equal(tokens, found[0][2])


def accumulated(case, **layout):
    """Gradients of two batches that are one step, told the number of all targets."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    batches = [rows_of(case, "padded", step) for step in (0, 1)]
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    losses = [float(model.train().train_step(batch, targets=[count])) for batch in batches]
    return losses, model.consolidated_state_dict(grads=True)


def test_gradient_accumulation_with_cp_counts_every_target_once_in_the_mean_loss():
    case = case_of("GPT2LMHeadModel")
    losses, grads = accumulated(case)
    found = emulate(accumulated, case, mesh=(1, 1, 2), cp=2)[0]
    assert found[0] == pytest.approx(losses, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(found[1][name], grad, **CLOSE)


def uneven(case, mask, **layout):
    """Loss and gradients of a step whose rows have 11 tokens, or of an encoder 11 and of a decoder 9."""
    # plain GPT-Neo adds a mask of fp64 to scores of fp32: padding on the left hides nothing there
    neo = case.cls.startswith("GPTNeo") and mask == "left"
    dtype = torch.float32 if neo else torch.float64
    layout = {"dp": 1, "dtype": dtype, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    cut = {n: x[..., :11, :11] if x.ndim == 4 else x[:, :11] for n, x in rows_of(case, mask).items()}  # fmt: skip
    batch = {name: x.contiguous() for name, x in cut.items()}
    if model.config.is_encoder_decoder:
        batch["labels"] = batch["labels"][:, :9].contiguous()
    loss = float(model.train().train_step(batch))
    return loss, model.consolidated_state_dict(grads=True)


@pytest.mark.parametrize(
    ("cls", "mask", "cp"),
    [
        pytest.param(cls, mask, cp, marks=() if (mask, cp) == quick.get(cls) else pytest.mark.slow)
        for quick in [{"GPT2LMHeadModel": ("packed", 4), "T5ForConditionalGeneration": ("bare", 2)}]
        for cls, (_, masks, _) in FAMILIES.items() for mask in masks for cp in (2, 4)
    ],
)  # fmt: skip
def test_sequences_that_cp_does_not_divide_have_the_loss_and_gradients_of_one_process(
    cls, mask, cp
):
    """Without dropout: its masks are those of the padded rows."""
    case = case_of(cls, dropout=0.0)
    loss, grads = uneven(case, mask)
    ranks = emulate(uneven, case, mask, mesh=(1, 1, cp), cp=cp)
    for found, _ in ranks:
        assert found == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(
            ranks[0][1][name], grad, **closeness(case), msg=lambda m, n=name: f"{n}: {m}"
        )


REFUSED_AT_LOAD = [
    ("GPT2LMHeadModel", {"checkpoint_policy": "save_matmuls"}, "checkpoint_policy='save_matmuls' | not supported together with cp=2"),
    ("GPT2LMHeadModel", {"activation_memory": "1GB"}, "activation_memory='1GB' | not supported together with cp=2"),
    ("GPT2LMHeadModel", {"target": "deepspeed", "target_options": {"config": {}}}, "target='deepspeed' | not supported together with cp=2"),
    ("GPT2LMHeadModel", {"attention": "flash"}, "use sdpa or eager"),
    ("GPT2LMHeadModel", {"kernels": ["t5_attention"]}, "kernels=['t5_attention'] | not supported together with cp=2"),
    ("GPT2LMHeadModel", {"schedule": lambda sch: None}, "schedule=<function"),
    ("GPT2LMHeadModel", {"exact": True}, "exact | not supported together with cp=2"),
    ("BertModel", {}, "the loss of BertModel is no mean over tokens"),
    ("ViTForImageClassification", {}, "the loss of ViTForImageClassification is no mean over tokens"),
    ("EsmForMaskedLM", {}, "pass token_dropout=False"),
]  # fmt: skip


def said(work, *args, **kwargs):
    """Text of the SlapoError that each rank of a call raises."""
    try:
        work(*args, **kwargs)
    except SlapoError as error:
        return " | ".join((error.where, str(error.what), error.problem, error.hint))
    return "it ran"


def loaded(cls, **layout):
    case = Case(cls, ("tokens",))
    layout = {"dp": 1, **layout}
    return AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=cls, **layout)


@pytest.mark.parametrize(("cls", "options", "text"), REFUSED_AT_LOAD)
def test_options_that_do_not_work_with_cp_are_refused_at_load(cls, options, text):
    ranks = 2 * options.get("pp", 1) * options.get("dp", 1)
    for found in emulate(said, loaded, cls, cp=2, mesh=(1, 1, ranks), **options):
        assert text in found
        assert "cp=1" in found


def one_pattern(case, tokens, **layout):
    """Loss of rows that are all packed in one way, told by position_ids [1, S]."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    batch = {n: x[:, :tokens].contiguous() for n, x in rows_of(case, "bare").items()}
    places = (torch.arange(tokens) % 5)[None]
    return float(model.train().train_step({**batch, "position_ids": places}, micro_batches=1))


@pytest.mark.parametrize("tokens", [12, 11])
def test_position_ids_of_one_row_separate_documents_with_cp_as_in_one_process(tokens):
    """Parametrized with eleven tokens too, which cp=2 pads to twelve."""
    case = case_of("LlamaForCausalLM", dropout=0.0)
    found = emulate(one_pattern, case, tokens, cp=2, mesh=(1, 1, 2))
    assert found == pytest.approx([one_pattern(case, tokens)] * 2, rel=1e-6)


GROWING = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, "short_factor": [1.0] * 2,
        "long_factor": [2.0] * 2, "original_max_position_embeddings": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_length_dependent_rotary_frequencies_with_cp_use_the_full_sequence_length(kind):
    """The twelve tokens are more than the eight of pretraining, the six of a rank are not."""
    config = {"rope_parameters": GROWING[kind], "max_position_embeddings": 8}
    case = Case("LlamaForCausalLM", ("tokens",), tuple(config.items()))
    for mask in ("padded", "left"):
        require_equal(emulate(trained, case, mask, mesh=(1, 1, 2), cp=2)[0], trained(case, mask))


def used(cls, uses):
    """Return {use: text of the error with which it is refused} for a loaded model."""
    model = loaded(cls, cp=2).train()
    return {name: said(use, model) for name, use in uses.items()}


def _step(change=None, **options):
    def use(model):
        batch = batch_of(Case(type(model).unscheduled_class.__name__, ("tokens",)))
        model.train_step({**batch, **(change(batch) if change else {})}, **options)

    return use


def _other_attention(model):
    model.set_attn_implementation("sdpa")
    _step()(model)


def _own_loss_function(model):
    model.loss_function = torch.nn.functional.cross_entropy
    try:
        _step()(model)
    finally:
        del model._loss_function


def _replaced_core(model):
    model.transformer.h[1].attn.core_attn = torch.nn.Identity()
    _step()(model)


def _compiled(model):
    block = model.transformer.h[1]
    block.compile(backend="eager")
    try:
        _step()(model)
    finally:
        block._compiled_call_impl = None


USES = {
    "embeddings": (_step(lambda batch: {"input_ids": None, "inputs_embeds": torch.zeros(4, 12, 30)}), "inputs_embeds | no rule says how to shard this entry over cp"),
    "mask": (_step(lambda batch: {"attention_mask": batch["attention_mask"][:, None, None].bool()}), "attention_mask | found [4, 1, 1, 12], expected [rows, 1 or heads, 12, 12]"),
    "short mask": (_step(lambda batch: {"attention_mask": batch["attention_mask"][:, :9]}), "attention_mask | found [4, 9], expected 12 numbers per row"),
    "three axes": (_step(lambda batch: {"attention_mask": batch["attention_mask"][:, None]}), "attention_mask | found 3 axes"),
    "engine": (lambda model: init_target_engine(model, "torch", data_parallel="ddp"), "init_target_engine | data_parallel='ddp' | not supported together with cp=2"),
    "compiled": (_compiled, "torch.compile | cp > 1 | compiled code would not gather the keys"),
    "loss_function": (_own_loss_function, "model.loss_function | a loss function of your own would get labels that are already shifted and sharded over cp"),
    "replaced": (_replaced_core, "h.1.attn.core_attn | this attention or its attention function was replaced"),
    "other attention": (_other_attention, "core_attn | this attention or its attention function was replaced"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at a block's input
def test_wrong_calls_of_a_cp_model_are_refused_before_any_communication():
    uses = {name: use for name, (use, _) in USES.items()}
    for found in emulate(used, "GPT2LMHeadModel", uses, mesh=(1, 1, 2)):
        for name, (_, text) in USES.items():
            assert text in found[name], name


def of_sharded(case, change=None, **layout):
    """Loss and gradients of a step whose batch has this cp rank's tokens alone; or the error, for a changed batch."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    n, r = model.mesh.place("cp")
    batch = {name: x.chunk(n, 1)[r].contiguous() for name, x in rows_of(case, "padded").items()}
    step = model.train().train_step
    if change:
        return said(step, change(batch, r), batch_is_sharded=True)
    return float(step(batch, batch_is_sharded=True)), model.consolidated_state_dict(grads=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "RobertaForMaskedLM", "T5ForConditionalGeneration", "OPTForCausalLM"])  # fmt: skip
def test_batch_sharded_over_cp_by_the_user_has_the_gradients_of_the_full_batch(cls):
    """Positions that count real tokens, labels of the next rank's token, a decoder with fewer tokens; dropout."""
    case = case_of(cls)
    loss, grads = of_sharded(case)
    ranks = emulate(of_sharded, case, mesh=(1, 1, 2), cp=2)
    for found, _ in ranks:
        assert found == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(ranks[0][1][name], grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip


SHARDED = {
    "cannot be told": (lambda batch, _: {**batch, "attention_mask": torch.ones(4, 1, 6, 12)}, "batch_is_sharded=True | attention_mask | found [4, 1, 6, 12], expected [rows, tokens]"),
    "unknown": (lambda batch, _: {**batch, "weights": torch.ones(4, 6)}, "batch_is_sharded=True | weights | found [4, 6]"),
    "uneven": (lambda batch, r: {name: x[:, : 6 - r] for name, x in batch.items()}, "cp ranks have other entries or shapes than this one"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDED)
def test_invalid_batch_sharded_over_cp_by_the_user_is_refused_on_every_rank(name):
    change, text = SHARDED[name]
    for found in emulate(of_sharded, case_of("GPT2LMHeadModel"), change, mesh=(1, 1, 2), cp=2):
        assert text in found
