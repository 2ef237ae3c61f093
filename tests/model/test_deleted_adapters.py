"""Adapters that are merged, disabled or deleted, several active ones, folders that hold one, and AdaLoRA."""

import pytest
import torch
import transformers
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, SlapoError, load_checkpoint, save_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already found a .peft_config:UserWarning"),
]
LLAMA = Case("LlamaForCausalLM", ("tokens",))


def config():
    return LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)


def merged(folder, out, layout):
    """Save an adapter, merge it into the weights, delete it, and save the model with an optimizer."""
    model = AutoScheduledModel.from_pretrained(folder, **layout)
    model.add_adapter(config())
    model.save_pretrained(out / "adapter")
    for module in model.modules():
        if hasattr(module, "merge"):
            module.merge()
    model.delete_adapter("default")
    for p in model.parameters():
        p.grad = torch.zeros_like(p.requires_grad_(True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    save_checkpoint(model, out / "model", optimizer)
    load_checkpoint(model, out / "model", optimizer)


@pytest.mark.parametrize(
    "layout", [{}, {"tp": 2}, {"dp": 2, "dp_shard": 2}], ids=["one", "tp2", "rows"]
)
def test_merged_and_deleted_adapter_leaves_the_files_of_plain_peft(
    threads, tmp_path_factory, tmp_path, layout
):
    folder = checkpoint(LLAMA, tmp_path_factory.getbasetemp())
    threads.run(merged, layout.get("tp", 1) * layout.get("dp", 1), folder, tmp_path, layout)
    plain = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    ).merge_and_unload()
    found = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor)


def disabled(folder, layout):
    """Return by how much logits change with an adapter merged into the weights, and in two forwards with it disabled."""
    model = AutoScheduledModel.from_pretrained(folder, **layout).eval()
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        model.add_adapter(config())
        for module in model.modules():
            if hasattr(module, "merge"):
                module.merge()
        changes = [float((model(input_ids=ids).logits - before).abs().max())]
        model.disable_adapters()
        return changes + [
            float((model(input_ids=ids).logits - before).abs().max()) for _ in range(2)
        ]


@pytest.mark.parametrize(
    "layout", [{"precision": "bf16"}, {"dp": 2, "dp_shard": 2}], ids=["bf16", "rows"]
)
def test_model_whose_merged_adapter_is_disabled_computes_as_without_it(
    threads, tmp_path_factory, layout
):
    folder = checkpoint(LLAMA, tmp_path_factory.getbasetemp())
    for merged, *after in threads.run(disabled, layout.get("dp", 1), folder, layout):
        assert max(after) < merged / 20


def test_save_of_two_active_adapters_and_load_of_an_adapter_folder_are_refused(
    tmp_path_factory, tmp_path
):
    folder = checkpoint(LLAMA, tmp_path_factory.getbasetemp())
    model = AutoScheduledModel.from_pretrained(folder)
    for name in ("a", "b"):
        model.add_adapter(config(), name)
    model.set_adapter(["a", "b"])
    with pytest.raises(SlapoError, match="found the active adapters a, b"):
        model.save_pretrained(tmp_path / "out")
    before = model.get_adapter_state_dict("a")
    with pytest.raises(SlapoError, match="'a': the model has an adapter of this name"):
        model.add_adapter(config(), "a")
    assert model.get_adapter_state_dict("a").keys() == before.keys()
    for text in ("{", "[]", '{"peft_type": "NEW"}'):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(SlapoError, match=r"adapter_config.json that peft can read: \w+Error"):
            model.load_adapter(tmp_path, "c")
    model.delete_adapter("b")
    with pytest.raises(SlapoError, match="without a variant"):
        model.save_pretrained(tmp_path / "out", variant="x")
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(SlapoError, match="this folder holds an adapter of peft"):
        AutoScheduledModel.from_pretrained(tmp_path / "out")


def test_train_step_without_the_loss_term_of_adalora_is_refused(tmp_path_factory):
    model = AutoScheduledModel.from_pretrained(checkpoint(LLAMA, tmp_path_factory.getbasetemp()))
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    with pytest.raises(SlapoError, match="use the loss of the PeftModel"):
        model.train_step(batch_of(LLAMA))
    model(**batch_of(LLAMA)).loss.backward()


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of peft's own
@pytest.mark.parametrize(
    ("name", "targets"),
    [("LlamaForCausalLM", ["embed_tokens", "q_proj"]), ("MixtralForCausalLM", "all-linear")],
)
def test_adapters_of_embeddings_and_experts_on_one_process_get_gradients_and_load_into_plain_peft(
    tmp_path_factory, tmp_path, name, targets
):
    case = Case(name, ("tokens",))
    folder = checkpoint(case, tmp_path_factory.getbasetemp())
    model = AutoScheduledModel.from_pretrained(folder).train()
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model.train_step(batch_of(case))
    grads, weights = model.get_adapter_state_dict(grads=True), model.get_adapter_state_dict()
    assert grads.keys() == weights.keys()
    assert all(grad.any() for grad in grads.values())
    model.save_adapter(tmp_path)
    plain = PeftModel.from_pretrained(getattr(transformers, name).from_pretrained(folder), tmp_path)
    found = model.eval()(**batch_of(case)).logits
    torch.testing.assert_close(found, plain.eval()(**batch_of(case)).logits)
