"""Recorded pipeline steps: every action once, in Chrome's trace format and as a picture."""

import json

import pytest

from parity import Case, batch_of, checkpoint
from slapo_zoo.cli.main import main
from slapo_zoo.cli.training import step_times
from slapo_zoo.pipeline.orders import StageMap
from slapo_zoo.pipeline.timeline import bubble

GPT2 = Case("GPT2LMHeadModel", ("tokens",), (("n_layer", 4),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(GPT2, tmp_path_factory.mktemp("trace"))


def recorded(folder, order):
    from slapo_zoo import AutoScheduledModel
    from slapo_zoo.pipeline.profiler import record_step

    model = AutoScheduledModel.from_pretrained(folder, pp=2, pipeline_order=order).train()
    spans = record_step(model, batch_of(GPT2))
    assert model._slapo.pipeline.spans is None
    return spans


@pytest.mark.parametrize("order", ["1f1b", "gpipe", "interleaved_1f1b", "zbv", "dualpipev"])
def test_executed_pipeline_step_runs_the_actions_that_the_simulation_lists_on_every_rank(
    order, folder, ranks
):
    """The simulated list of `actions` equals what torch's pipeline runtime executes, rank by rank."""
    spans, same = ranks.run(recorded, 2, folder, order)
    assert spans == same
    for rank, actions in enumerate(StageMap.make(order, 2, None).actions(4)):
        assert [span.action for span in spans if span.rank == rank] == actions
    assert 0.0 <= bubble(spans) < 1.0


def test_bench_command_writes_a_pipeline_trace_as_json_and_a_picture(folder, tmp_path, capsys):
    arguments = ["bench", str(folder), "--pp", "2", "--batch-size", "4", "--seq-len", "8",
                 "--steps", "1", "--device", "cpu", "--pipeline-trace", str(tmp_path / "out")]  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "ms per step" in capsys.readouterr().out
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    work = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "communication"]
    assert len(work) == 2 * 4 * 2  # forward and backward of 4 micro-batches on 2 ranks
    assert {e["tid"] for e in work} == {0, 1}
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in trace["traceEvents"] if e["ph"] == "X")
    assert (tmp_path / "out" / "trace.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_bench_command_exits_before_running_without_matplotlib(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["bench", str(folder), "--pp", "2", "--pipeline-trace", str(tmp_path / "out")])
    assert "found no matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bench_command_refuses_to_time_a_model_with_a_wrong_loss(folder, capsys, monkeypatch):
    own = step_times.AutoScheduledModel.from_pretrained

    def changed(*args, **kwargs):
        model = own(*args, **kwargs)
        model.transformer.h[0].mlp.c_fc.bias.data += 0.5
        return model

    arguments = ["bench", str(folder), "--steps", "1", "--batch-size", "2", "--seq-len", "8"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert "plain transformers: 5." in capsys.readouterr().out
    monkeypatch.setattr(step_times.AutoScheduledModel, "from_pretrained", changed)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "that of plain transformers" in captured.err
    assert "per step" not in captured.out


@pytest.mark.parametrize(("loss", "allowed"), [(0.2, 1e-3), (4.0, 4e-3)])
def test_bench_command_compares_losses_as_its_help_says(loss, allowed, folder, capsys, monkeypatch):
    """Allow 1e-3 of the loss or, since rounding does not shrink with a loss below 1, of 1."""
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    assert "within 1e-3 (fp32; else 3e-2) of max(1, loss)" in " ".join(
        capsys.readouterr().out.split()
    )
    model, batch = step_times.AutoScheduledModel.from_pretrained(folder), batch_of(GPT2)
    ours = float(model.eval()(**batch).loss.detach())
    share = ours / loss
    monkeypatch.setattr(
        model, "forward", lambda _own=model.forward, **given: _scaled(_own(**given), share)
    )
    for off in (0.9, -0.9):
        monkeypatch.setattr(step_times, "_plain_loss", lambda *_, off=off: loss + off * allowed)
        assert step_times._compared("gpt2", model, batch)[0] == pytest.approx(loss)
    monkeypatch.setattr(step_times, "_plain_loss", lambda *_: loss + 1.2 * allowed)
    with pytest.raises(step_times.VerifyError):
        step_times._compared("gpt2", model, batch)


def _scaled(output, share):
    output.loss = output.loss / share
    return output
