"""Context parallelism in a loop of one's own, with a loss of one's own, an adapter, and where all tokens are run."""

import copy
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import cross_entropy

from cut_rows import case_of, require_equal, rows_of
from parity import Case, batch_of, checkpoint, tiny_config
from slapo_zoo import AutoScheduledModel, MeshError, emulate, load_checkpoint, save_checkpoint
from slapo_zoo.zoo.schedule_source import find_table

FAMILIES = ("GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "LlamaForCausalLM")


def of_logits(output, batch):
    """A loss of all tokens that the model does not compute, and half of its own."""
    logits, labels = output.logits, batch["labels"]
    share = cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten())
    return share + logits.square().mean(1).max() + output.loss / 2


def forward_and_backward(model, batch, way):
    """Loss of a step; gradients are in .grad."""
    if way == "loss_fn":
        return model.train_step(batch, micro_batches=1, loss_fn=of_logits)
    if way == "part":  # called alone, it computes all tokens on every rank
        part = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        states = part(batch["input_ids"], attention_mask=batch["attention_mask"])
        loss = states.last_hidden_state.square().mean()
    else:
        output = model(**batch)
        loss = output.loss if way == "loss" else of_logits(output, batch)
    loss.backward()
    return loss.detach()


def looped(case, mask, way, **layout):
    """Return what `cut_rows.trained` returns, by another way to train; then logits, hidden states and tokens of generate."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, eps=1e-3)
    losses, first = [], None
    for step in range(3):
        optimizer.zero_grad()
        losses.append(float(forward_and_backward(model, rows_of(case, mask, step), way)))
        first = model.consolidated_state_dict(grads=True) if first is None else first
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
    return (losses, first, float(norm), model.consolidated_state_dict()), shown(model, case, mask)


def shown(model, case, mask):
    """Outputs of all tokens: in training, as `train_step` returns them, in evaluation, and generated tokens."""
    batch, kept = rows_of(case, mask, 3), {"output_hidden_states": True}
    odd = {
        name: x[:, : x.shape[1] - 1].contiguous() for name, x in batch.items()
    }  # cp does not divide them
    output = model(**batch, **(kept if model.mesh.pp == 1 else {}))
    states = output.get("hidden_states") or output.get("decoder_hidden_states") or ()
    found = [*(x.detach() for x in states), output.logits.detach()]
    found += [model.train_step(batch, micro_batches=1, return_logits=True).logits]
    logits = model.train_step(odd, micro_batches=1, return_logits=True).logits, model(**odd).logits
    found += [torch.tensor(x.shape) for x in logits]  # their dropout is that of padded rows
    with torch.no_grad():
        output = model.eval()(**batch)
        found += [output.logits, output.loss]
    if model.can_generate():
        tokens = {"max_new_tokens": 3, "do_sample": False}
        found.append(model.generate(batch["input_ids"][:, :4], **tokens))
    return found


# way to train, kind of rows, sizes of the mesh, options of the loader
WAYS = {
    "loss": ("loss", "padded", {}, {"checkpoint_ratio": 1.0}),
    "logits": ("logits", "left", {"tp": 2}, {}),
    "loss_fn": ("loss_fn", "padded", {}, {}),
    "loss-sp": ("loss", "padded", {"tp": 2}, {"sequence_parallel": True, "checkpoint_ratio": 0.5}),
    "logits-dp_shard2": ("logits", "bare", {}, {"dp_shard": 2}),
    "part": ("part", "padded", {}, {"checkpoint_ratio": 1.0}),
    "loss_fn-pp2": ("loss_fn", "left", {"pp": 2}, {}),
}
ALWAYS = {("GPT2LMHeadModel", "loss"), ("BertForMaskedLM", "loss_fn")}


def ways():
    for cls in FAMILIES:
        for name in WAYS:
            marks = () if (cls, name) in ALWAYS else pytest.mark.slow
            yield pytest.param(cls, name, marks=marks)


@pytest.mark.parametrize(("cls", "name"), list(ways()))
def test_hand_written_loops_with_cp_have_the_losses_and_outputs_of_one_process(cls, name):
    """Losses, gradients, norm and weights after three steps, with dropout; outputs are whole on every rank."""
    way, mask, sizes, options = WAYS[name]
    case, mesh = case_of(cls), (sizes.get("tp", 1), sizes.get("pp", 1), 2)
    alone, outputs = looped(case, mask, way)
    found = emulate(looped, case, mask, way, mesh=mesh, cp=2, **sizes, **options)
    require_equal(found[0][0], alone, rtol=1e-4, atol=1e-6)  # losses of fp32 logits
    for each, mine in found:
        assert each[0] == found[0][0][0]
        for ours, one in zip(reversed(mine), reversed(outputs), strict=False):
            torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-6)


def counted(case, **layout):
    """Gradients of a sum over two micro-batches, told the number of its terms."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)

    def summed(output, batch):
        assert "shift_labels" not in batch  # made before the cut, for the model
        return (output.logits.square().mean(-1) * batch["weights"]).sum()

    batch = {**batch_of(case), "weights": torch.arange(48).view(4, 12) / 7}
    loss = model.train().train_step(batch, 2, loss_fn=summed, targets=[31])
    return [float(loss)], model.consolidated_state_dict(grads=True), 0.0, {}


def test_user_loss_that_sums_over_extra_batch_entries_with_cp_has_the_gradients_of_one_process():
    case = case_of("GPT2LMHeadModel")
    found = emulate(counted, case, mesh=(1, 1, 2), cp=2)
    require_equal(found[0], counted(case))


def distilled(case, folder, **layout):
    """Loss and gradients of a step whose loss calls a copy of the model, the model itself and a plain one, all in eval."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_pretrained(folder, auto_class=case.cls, **layout).train()
    plain = getattr(transformers, case.cls).from_pretrained(folder, dtype=torch.float64)
    teachers = (copy.deepcopy(model).eval(), plain.eval(), model)

    def loss_fn(output, batch):
        model.eval()
        given = {"input_ids": batch["input_ids"], "use_cache": False}
        with torch.no_grad():
            means = [teacher(**given).logits.mean(1) for teacher in teachers]
        model.train()
        return (output.logits.mean(1) - 2 * sum(means)).square().mean()

    loss = model.train_step(rows_of(case, "bare"), 1, loss_fn=loss_fn)
    return [float(loss)], model.consolidated_state_dict(grads=True), 0.0, {}


def test_teachers_called_in_a_user_loss_with_cp_see_all_tokens(tmp_path):
    case = case_of("LlamaForCausalLM", dropout=0.0)
    folder = checkpoint(case, tmp_path)
    found = emulate(distilled, case, folder, mesh=(1, 1, 2), cp=2)
    require_equal(found[0], distilled(case, folder))


def divided(case, **layout):
    """Loss and gradients of a step by hand that is told the number of targets; T5's loss does not read it."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    loss = model.train()(**rows_of(case, "padded"), num_items_in_batch=torch.tensor(29)).loss
    loss.backward()
    return [float(loss.detach())], model.consolidated_state_dict(grads=True), 0.0, {}


@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_loss_divided_by_num_items_in_batch_with_cp_is_that_of_one_process(cls):
    case = case_of(cls, dropout=0.0)
    found = emulate(divided, case, mesh=(1, 1, 2), cp=2)
    require_equal(found[0], divided(case), rtol=1e-4, atol=1e-6)


def wrapped(case, **layout):
    """Loss and gradients of a step by hand whose blocks are in torch's checkpoint_wrapper."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    blocks = model.train().transformer.h
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block)
    loss = model(**rows_of(case, "padded"), use_cache=False).loss
    loss.backward()
    return [float(loss.detach())], model.consolidated_state_dict(grads=True), 0.0, {}


def test_blocks_in_checkpoint_wrapper_with_cp_have_the_gradients_of_one_process():
    case = case_of("GPT2LMHeadModel")
    found = emulate(wrapped, case, mesh=(1, 1, 2), cp=2)
    require_equal(found[0], wrapped(case), rtol=1e-4, atol=1e-6)


def routed(case, by_hand):
    """Text of the error of a step of a mixture of experts whose loss got a term of its router after the load."""
    table = replace(find_table(tiny_config(case)[0]), cut_tokens={case.cls: "counted"})
    model = AutoScheduledModel.from_config(
        tiny_config(case)[0], auto_class=case.cls, cp=2, schedule=table
    )
    model.train().config.output_router_logits = True
    with pytest.raises(MeshError) as error:
        model(**batch_of(case)) if by_hand else model.train_step(batch_of(case), 1)
    return str(error.value)


@pytest.mark.parametrize("by_hand", [True, False])
def test_loss_of_a_router_with_cp_is_refused_since_it_needs_all_tokens(by_hand):
    for said in emulate(routed, Case("MixtralForCausalLM", ("tokens",)), by_hand, mesh=(1, 1, 2)):
        assert "found cp=2: with output_router_logits=True the loss needs the whole batch" in said


def adapted(case, **layout):
    """Losses and weights of a LoRA adapter after three steps, its files' keys, and which parameters are trained."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    torch.manual_seed(0)
    targets, conv1d = TARGETS[case.cls], case.cls.startswith("GPT2")
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=targets, fan_in_fan_out=conv1d)
    model.add_adapter(config)
    optimizer = torch.optim.AdamW(
        (p for p in model.train().parameters() if p.requires_grad), lr=1e-2, eps=1e-3
    )
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(float(model.train_step(rows_of(case, "padded", step))))
        grads = model.get_adapter_state_dict(grads=True)
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
    return losses, grads, float(norm), model.get_adapter_state_dict()


TARGETS = {
    "GPT2LMHeadModel": ["c_attn", "mlp.c_proj"],  # tp=2 shards the 30 columns of attn.c_proj unevenly
    "BertForMaskedLM": ["query", "value"],
    "T5ForConditionalGeneration": ["q", "v", "wo"], "LlamaForCausalLM": ["q_proj", "v_proj", "down_proj"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "sizes"),
    [
        ("GPT2LMHeadModel", {}),
        *(pytest.param(cls, sizes, marks=pytest.mark.slow) for cls in FAMILIES for sizes in ({"tp": 2}, {"pp": 2})),
    ],
)  # fmt: skip
def test_lora_adapters_with_cp_have_the_losses_and_gradients_of_one_process(cls, sizes):
    """LoRA with its own dropout: losses, every gradient, and the matrices after three steps."""
    case, mesh = case_of(cls), (sizes.get("tp", 1), sizes.get("pp", 1), 2)
    alone = adapted(case)
    found = emulate(adapted, case, mesh=mesh, cp=2, **sizes)
    require_equal(found[0], alone, rtol=1e-4, atol=1e-6)
    assert alone[1]
    assert all(each[0] == found[0][0] for each in found)


def carried(case, source, target, steps, **layout):
    """Load a training checkpoint if given, train so many steps, save; losses of these steps."""
    layout = {"dp": 1, "dtype": torch.float64, "seed": 3, "kernels": "reference", **layout}
    model = AutoScheduledModel.from_config(tiny_config(case)[0], auto_class=case.cls, **layout)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, eps=1e-3)
    first = load_checkpoint(model, source, optimizer).step if source else 0
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(float(model.train_step(rows_of(case, "padded", step))))
        optimizer.step()
    save_checkpoint(model, target, optimizer, step=first + steps)
    states = [x for state in optimizer.state_dict()["state"].values() for x in state.values()]
    return losses, states, model.consolidated_state_dict()


MESHES = [({"cp": 2}, {"tp": 2}), ({"cp": 2, "pp": 2}, {"cp": 2}), ({"cp": 2, "dp_shard": 2}, {"tp": 2, "cp": 2})]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "first", "second"),
    [
        pytest.param(cls, *meshes, marks=() if (cls, i) == ("GPT2LMHeadModel", 0) else pytest.mark.slow)
        for cls in FAMILIES
        for i, meshes in enumerate(MESHES)
    ],
)  # fmt: skip
def test_checkpoint_moved_from_cp_2_to_another_mesh_and_back_has_the_losses_of_one_process(
    cls, first, second, tmp_path
):
    """Saved at cp=2, resumed on another mesh and saved, resumed at cp=2: weights, optimizer and dropout go on."""
    case = case_of(cls)

    def on(mesh, source, target, steps):
        sizes = mesh.get("tp", 1), mesh.get("pp", 1), mesh.get("cp", 1)
        return emulate(carried, case, source, tmp_path / target, steps, mesh=sizes, **mesh)[0]

    began = on(first, None, "a", 1)
    moved = on(second, tmp_path / "a", "b", 0)
    ended = on(first, tmp_path / "b", "c", 2)
    alone = carried(case, None, tmp_path / "alone", 3)
    require_equal((began[0] + ended[0], {}, 0.0, ended[2]), (alone[0], {}, 0.0, alone[2]))
    for name, x in began[2].items():
        assert torch.equal(moved[2][name], x), name
    kept = [carried(case, tmp_path / folder, tmp_path / "again", 0)[1] for folder in ("a", "b")]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert kept[0]
