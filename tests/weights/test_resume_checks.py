"""Training states that no save writes are refused before anything changes."""

import base64
import json
import random

import numpy as np
import pytest
import torch

from parity import Case, batch_of, checkpoint
from slapo_zoo import AutoScheduledModel, load_checkpoint, save_checkpoint
from slapo_zoo.errors import WeightsError
from slapo_zoo.weights.encode import encode
from slapo_zoo.weights.optimizer import Restored

CASE = Case("GPT2LMHeadModel", ("tokens",))
NAN = float("nan")


def start(folder, **mesh):
    model = AutoScheduledModel.from_pretrained(folder, seed=3, **mesh).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
    return model, optimizer, scheduler


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(CASE, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def saved(source, tmp_path_factory):
    """Return a checkpoint without checksums, as older releases wrote it, and the objects to load it into."""
    out = tmp_path_factory.mktemp("saved") / "out"
    model, optimizer, scheduler = start(source)
    model.train_step(batch_of(CASE))
    optimizer.step()
    scheduler.step()
    save_checkpoint(model, out, optimizer, scheduler, step=1, data_position={"rows": 4})
    (out / "checksums.json").unlink()
    state = json.loads((out / "training_state.json").read_text())
    del state["save"]
    (out / "training_state.json").write_text(json.dumps(state))
    return out, state, (model, optimizer, scheduler)


def put(*path, value=None, drop=False):
    """Return an edit of one entry of the state."""

    def edit(state):
        place = state
        for key in path[:-1]:
            place = place[key]
        if drop:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return edit


def options(name, value):
    return put("optimizer", "groups", 0, "options", name, value=value)


def drop_moments(keys):
    def edit(state):
        for key in keys:
            del state["optimizer"]["state"]["transformer.wte.weight"][key]

    return edit


EDITS = {
    "rng text": put("torch_random", "cpu", "states", value=["%%%"]),
    "rng short": put("torch_random", "cpu", "states", value=["AAAA"]),
    "rng number": put("torch_random", "cpu", "states", value=[7]),
    "of_rank empty": put("torch_random", "cpu", "of_rank", value=[]),
    "of_rank beyond": put("torch_random", "cpu", "of_rank", value=[3]),
    "rng none": put("torch_random", value={}),
    "rng of a stranger": put("torch_random", "os", value={"states": [], "of_rank": []}),
    "python rng": put("torch_random", "python", "states", value=["WzMsIFsxXSwgbnVsbF0="]),
    "numpy rng": put("torch_random", "numpy", "states", value=["WzMsIFsxXSwgbnVsbF0="]),
    "random empty": put("random", value={}),
    "random text": put("random", "seed", value="x"),
    "random calls": put("random", "calls", value=-1),
    "random turns": put("random", "turns", value=[[1, 2, 3]]),
    "random step": put("random", "step", value=-1),
    "scheduler empty": put("scheduler", value={}),
    "scheduler list": put("scheduler", value=[1]),
    "scheduler text": put("scheduler", "last_epoch", value="now"),
    "scheduler stranger": put("scheduler", "_get_lr_called", value={"$tensor": "x", "dtype": "os"}),
    "position tuple": put("data_position", value={"$tuple": 3}),
    "position tensor": put("data_position", value={"$tensor": [[1], []], "dtype": "float32"}),
    "position dtype": put("data_position", value={"$tensor": [1], "dtype": "load"}),
    "position mark": put("data_position", value={"$call": "os.system"}),
    "position unhashable": put("data_position", value={"$items": [[{}, 1]]}),
    "position of dp": put("data_position", value={"$by_dp": [1, 2, 3]}),
    "optimizer empty": put("optimizer", value={}),
    "like": put("optimizer", "state", "transformer.wte.weight", "exp_avg", value={"$like": "load"}),
    "like list": put(
        "optimizer", "state", "transformer.wte.weight", "exp_avg", value={"$like": []}
    ),
    "params": options("params", []),
    "lr nan": options("lr", NAN),
    "lr text": options("lr", "1"),
    "lr list": options("lr", [1.0]),
    "betas one": options("betas", {"$tuple": [0.9, "x"]}),
    "no such option": options("learning_rate", 1.0),
    "names": put("optimizer", "groups", 0, "names", value=[3]),
    "moments missing": drop_moments(["exp_avg", "exp_avg_sq", "step"]),
    "moment missing": drop_moments(["exp_avg"]),
    "mesh": put("mesh", value={}),
    "mesh zero": put("mesh", "tp", value=0),
    "mesh huge": put("mesh", "tp", value=2**40),
    "mesh true": put("mesh", "tp", value=True),
    "step negative": put("step", value=-5),
    "step true": put("step", value=True),
    "step huge": put("step", value=10**400),
    "deep": put("extra", value=json.loads("[" * 900 + "]" * 900)),
}


@pytest.mark.parametrize("case", EDITS)
def test_damaged_training_state_is_refused_before_model_or_optimizer_change(saved, case):
    out, state, (model, optimizer, scheduler) = saved
    file = out / "training_state.json"
    before = [p.detach().clone() for p in model.parameters()]
    moments = [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()]
    rates, drawn = [g["lr"] for g in optimizer.param_groups], torch.get_rng_state()
    edited = json.loads(json.dumps(state))
    EDITS[case](edited)
    file.write_text(json.dumps(edited))
    try:
        with pytest.raises(WeightsError):
            load_checkpoint(model, out, optimizer, scheduler)
    finally:
        file.write_text(json.dumps(state))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [g["lr"] for g in optimizer.param_groups] == rates
    assert torch.equal(torch.get_rng_state(), drawn)
    for one, then in zip(optimizer.state.values(), moments, strict=True):
        assert all(torch.equal(one[key], value) for key, value in then.items())


def test_valid_training_state_loads_with_its_step_and_data_position(saved):
    out, _, made = saved
    found = load_checkpoint(made[0], out, *made[1:])
    assert (found.step, found.data_position) == (1, {"rows": 4})


def test_checkpoint_restores_the_python_and_numpy_random_states(source, tmp_path):
    model = start(source)[0]
    random.seed(5)
    np.random.seed(6)
    save_checkpoint(model, tmp_path / "out")
    expected = random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()
    random.seed(50)
    np.random.seed(60)
    load_checkpoint(model, tmp_path / "out")
    assert (random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()) == expected


def save_own_place(folder, out, tp, dp):
    model = start(folder, tp=tp, dp=dp)[0]
    copy = model.mesh.coord("dp")
    save_checkpoint(model, out, data_position={"rank": copy, "rows": 100 + copy}, extra=[copy])


def load_own_place(folder, out, tp, dp):
    model = start(folder, tp=tp, dp=dp)[0]
    found = load_checkpoint(model, out)
    try:
        return found.data_position, found.extra
    except WeightsError as error:
        return str(error), found.data_positions


def test_checkpoint_restores_the_data_position_of_each_dp_rank(ranks, source, tmp_path):
    ranks.run(save_own_place, 4, source, tmp_path / "out", 2, 2)
    found = ranks.run(load_own_place, 4, source, tmp_path / "out", 2, 2)
    assert found == [({"rank": r // 2, "rows": 100 + r // 2}, [r // 2]) for r in range(4)]
    text, every = ranks.run(load_own_place, 1, source, tmp_path / "out", 1, 1)[0]
    assert "the checkpoint has a value for each of 2 dp ranks" in text
    assert every == ({"rank": 0, "rows": 100}, {"rank": 1, "rows": 101})


@pytest.mark.parametrize(
    ("saved", "loaded", "found"),
    [({"cp": 2}, {}, "[7] 7"), ({"dp": 2}, {"cp": 2}, "of 2 dp ranks, but dp has changed")],
    ids=str,
)
def test_data_position_is_saved_once_per_dp_rank_also_with_context_parallelism(
    threads, source, tmp_path, saved, loaded, found
):
    def save():
        model = start(source, **saved)[0]
        save_checkpoint(model, tmp_path / "out", data_position=7 + model.mesh.coord("dp"))

    def load():
        resumed = load_checkpoint(start(source, **loaded)[0], tmp_path / "out")
        try:
            return f"{[*resumed.data_positions]} {resumed.data_position}"
        except WeightsError as error:
            return str(error)

    threads.run(save, 2)
    assert all(found in text for text in threads.run(load, 2 if loaded else 1))


def save_equal_extra(folder, out):
    model = start(folder, dp=2)[0]
    extra = {"schedule": [1, 2], "loss": float("nan"), "best": np.float64(0.5)}
    save_checkpoint(model, out, data_position=4, extra=extra)


def test_extra_checkpoint_state_equal_on_all_ranks_loads_with_another_dp(ranks, source, tmp_path):
    """Equal state resumes on any dp; a data position does not, because another dp gives a rank other rows."""
    ranks.run(save_equal_extra, 2, source, tmp_path / "out")
    found = load_checkpoint(start(source)[0], tmp_path / "out")
    assert repr(found.extra) == "{'schedule': [1, 2], 'loss': nan, 'best': 0.5}"
    assert found.data_positions == (4, 4)
    with pytest.raises(WeightsError, match="the checkpoint has a value for each"):
        found.data_position  # noqa: B018


def save_at_two_steps(folder, out, what):
    model = start(folder, tp=2)[0]
    rank = model.mesh.rank
    save_checkpoint(model, out, **{what: rank})


@pytest.mark.parametrize("what", ["step", "data_position"])
def test_checkpoint_save_refuses_different_data_positions_on_tp_peers(
    ranks, source, tmp_path, what
):
    with pytest.raises(WeightsError, match=rf"{what}: rank 1"):
        ranks.run(save_at_two_steps, 2, source, tmp_path / "out", what)
    assert not (tmp_path / "out").exists()


def test_checkpoint_with_out_of_range_numbers_in_the_numpy_random_state_is_refused(saved):
    """Found by ci/fuzz.py: NumPy raises OverflowError for such numbers."""
    out, state, made = saved
    numbers = base64.b64encode(json.dumps(["MT19937", [2**40] * 624, 1, 0, 0.0]).encode()).decode()
    edited = json.loads(json.dumps(state))
    edited["torch_random"]["numpy"]["states"] = [numbers]
    file = out / "training_state.json"
    file.write_text(json.dumps(edited))
    try:
        with pytest.raises(WeightsError, match="not a state that the generator takes"):
            load_checkpoint(made[0], out, *made[1:])
    finally:
        file.write_text(json.dumps(state))


def test_resumed_learning_rate_of_a_capturable_optimizer_stays_in_its_tensor():
    """A compiled or captured step reads the rate there, on its device."""
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=(rate := torch.tensor(0.5)))
    restored = object.__new__(Restored)
    restored.optimizer, restored._state = optimizer, {}
    options = encode({"lr": torch.tensor(0.25), "betas": (0.5, 0.5)}, "options")
    restored.record = {"groups": [{"names": [], "options": options}]}
    restored.apply()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.5)
