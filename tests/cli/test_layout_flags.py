"""Every option of the loader that shapes a layout is a flag of the commands that show, plan or verify one."""

import inspect
import json

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from slapo_zoo.cli.commands.plan import plan
from slapo_zoo.cli.commands.show import show
from slapo_zoo.cli.commands.verify import verify
from slapo_zoo.cli.main import main
from slapo_zoo.zoo.options import LoaderOptions

pytestmark = pytest.mark.usefixtures("shared_dry_runs")

LAYOUT = (
    "tp", "pp", "dp", "cp", "sequence_parallel", "dp_shard", "zero_stage", "pipeline_order", "stages_per_rank",
    "checkpoint_ratio", "checkpoint_policy", "cp_attention",
)  # fmt: skip


def cli(*words):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, words)))
    return caught.value.code or 0


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Return the folder of a checkpoint of four blocks; the family's own twelve take three times as long."""
    config = GPT2Config(n_embd=64, n_head=4, n_layer=4, n_positions=512, vocab_size=101, bos_token_id=0, eos_token_id=0)  # fmt: skip
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", [plan, show, verify])
def test_layout_flags_of_the_commands_have_the_defaults_of_from_pretrained(command):
    usual, flags = {**vars(LoaderOptions()), "dp": 1}, inspect.signature(command).parameters
    assert {name: flags[name].default for name in LAYOUT} == {name: usual[name] for name in LAYOUT}


def test_plan_command_accepts_the_layout_flags_that_it_prints(gpt2, capsys):
    """The flags are those that `plan --gpus` prints: virtual stages, a recompute policy, sequence parallelism."""
    words = ("--pp", 2, "--pipeline-order", "interleaved_1f1b", "--stages-per-rank", 2, "--checkpoint-ratio", 1,
             "--checkpoint-policy", "save_matmuls")  # fmt: skip
    assert cli("plan", gpt2, "--training", "--seq", 64, *words, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["training"]["stages"]) == 4
    sharded = ("--tp", 2, "--sequence-parallel", "--dp", 2, "--dp-shard", 2)
    assert cli("plan", gpt2, "--training", "--seq", 64, *sharded, "--json") == 0
    least = json.loads(capsys.readouterr().out)["training"]["ranks"][0]
    assert cli("plan", gpt2, "--training", "--seq", 64, "--tp", 2, "--dp", 2, "--json") == 0
    most = json.loads(capsys.readouterr().out)["training"]["ranks"][0]
    assert least["optimizer"] < 0.6 * most["optimizer"]
    assert least["activations"] < most["activations"]
    assert cli("show", gpt2, *words, "--rank", 1) == 0
    assert "checkpoint" not in capsys.readouterr().err


@pytest.mark.one_in(3)  # tests/verify checks with each option itself
@pytest.mark.parametrize(
    "words",
    [
        ("--cp", 2),
        ("--dp", 2, "--dp-shard", 2),
        ("--pp", 2, "--pipeline-order", "interleaved_1f1b", "--stages-per-rank", 2),
    ],
)
def test_verify_command_with_layout_flags_prints_verified(words, capsys, verify_here):
    assert cli("verify", "gpt2", *words) == 0
    assert "verified" in capsys.readouterr().out


def test_verify_command_refuses_flags_that_the_schedule_card_sets(capsys):
    assert (
        cli("verify", "gpt2", "--tp", 2, "--schedule", "hub_cards/gpt2", "--sequence-parallel") == 2
    )
    assert "the card given by --schedule sets this option" in capsys.readouterr().err


def test_show_command_with_cp_counts_cp_collectives_and_plan_command_halves_activations(
    gpt2, capsys
):
    """Keys and values of 4 layers are gathered over cp; half of a row's activations stay on a rank."""
    assert cli("show", gpt2, "--cp", 2, "--seq-len", 64, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["collectives"]
    scattered = [
        r["count"] for r in rows if r["mesh_dim"] == "cp" and r["kind"] == "reduce_scatter"
    ]
    assert scattered == [8]
    by_heads = ("--cp-attention", "ulysses")
    assert cli("show", gpt2, "--cp", 2, *by_heads, "--seq-len", 64, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["collectives"]
    assert [r["count"] for r in rows if r["kind"] == "all_to_all"] == [16, 16]
    kept = []
    for cp in (1, 2):
        words = ("--seq", 512, "--cp", cp, "--json")
        assert cli("plan", gpt2, "--training", *words) == 0
        kept.append(json.loads(capsys.readouterr().out)["training"]["ranks"][0]["activations"])
    assert kept[1] < 0.55 * kept[0]


@pytest.mark.parametrize("command", ["plan", "show", "verify"])
def test_commands_with_cp_refuse_unsupported_options_and_name_them(command, capsys):
    more = ("--training",) if command == "plan" else ()
    assert cli(command, "gpt2", "--cp", 2, "--checkpoint-policy", "save_matmuls", *more) == 2
    assert (
        "checkpoint_policy='save_matmuls': not supported together with cp=2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["plan", "show", "verify"])
@pytest.mark.parametrize(
    ("way", "cp", "words"),
    [
        ("ulisses", 2, "cp_attention: found 'ulisses', expected one of gather, ulysses, ring hint: pass a value"),
        ("ulysses", 5, 'cp=5 does not divide the 12 heads of a rank hint: use cp_attention="gather"'),
    ],
)  # fmt: skip
def test_commands_with_cp_refuse_a_cp_attention_option_that_the_model_does_not_support(
    way, cp, words, command, capsys
):
    more = ("--training",) if command == "plan" else ()
    assert cli(command, "gpt2", "--cp", cp, "--cp-attention", way, *more) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", ["--exact", "--layers"])
def test_verify_command_with_cp_refuses_the_exact_and_layers_flags(flag, capsys):
    assert cli("verify", "gpt2", flag, "--cp", 2) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert f"verify: {flag}: not supported together with cp=2" in found
    assert f"leave {flag} out, or use cp=1" in found
