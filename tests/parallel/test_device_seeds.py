"""Dropout seeds made on the device: equal to the host's, and seeds of a slice give a slice of the mask."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from slapo_zoo.parallel.rng.device_seeds import DeviceSeeds, mix, signed, split_cells
from slapo_zoo.parallel.rng.layout_independent_random import RandomStream, hashed_cells

P, SITE = 0.3, "h.0.attn"


class Hashed(RandomStream):
    """Random stream that draws on a CPU as on other devices."""

    @staticmethod
    def draws_in_blocks(device):
        return False


def stream(**more):
    return Hashed(**{"is_open": True, "seed": 7, "step": 3, "first_row": 2, "num_rows": 2} | more)


def kept(seeds, x):
    return hashed_cells(x, P, seeds)


@pytest.mark.parametrize("heads", [(), (0,), range(3, 7), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 2])
@pytest.mark.parametrize("step", [0, 1, 12345])
def test_dropout_seeds_computed_on_the_device_equal_those_computed_on_the_host(
    heads, num_rows, step
):
    at = stream(step=step, num_rows=num_rows, seed=2**40 + 1)
    shape = (4, len(heads), 5) if heads else (4, 5)  # two choices per row are flattened
    for first_row in (0, 6):
        at.first_row = first_row
        found = at.seeds(torch.empty(shape), SITE, heads).tolist()
        assert found == at.cells(4, SITE, heads)


def test_signed_function_reinterprets_a_64_bit_word_as_int64():
    for word in (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1):
        assert torch.tensor(signed(word)).item() & ((1 << 64) - 1) == word & ((1 << 64) - 1)
    assert mix(1, 2) != mix(2, 1)


def test_dropout_seeds_split_into_heads_give_the_same_mask():
    x = torch.empty(3, 4, 10)
    seeds = stream().seeds(x, SITE)
    assert torch.equal(kept(split_cells(seeds, 4, 10), x), kept(seeds, x))


@pytest.mark.parametrize("n", [2, 4])
def test_dropout_mask_of_a_column_shard_is_a_slice_of_the_full_mask(n):
    whole = stream().keep_mask(torch.empty(2, 3, 8), P, SITE)
    for r in range(n):
        run = (r * 8 // n, (r + 1) * 8 // n)
        x = torch.empty(2, 3, 8 // n)
        found = kept(stream().seeds_of_columns(x, SITE, run, 8), x)
        assert torch.equal(found, (whole[..., run[0] : run[1]] > 0).float())


@pytest.mark.parametrize("flat", [False, True])
def test_dropout_mask_of_a_token_shard_is_a_slice_of_the_full_mask(flat):
    shape = (2 * 6, 5) if flat else (2, 6, 5)
    whole = (stream().keep_mask(torch.empty(shape), P, SITE) > 0).float().view(2, 6, 5)
    for r in range(3):
        x = torch.empty(2 * 2, 5) if flat else torch.empty(2, 2, 5)
        found = kept(stream().seeds_of_tokens(x, SITE, 3, r), x).view(2, 2, 5)
        assert torch.equal(found, whole[:, 2 * r : 2 * r + 2])


def test_dropout_mask_of_unpadded_tokens_is_a_slice_of_the_full_mask():
    real = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0]]).bool()
    at = stream()
    whole = at.keep_mask(torch.empty(2, 4, 6), P, SITE) > 0
    with at.packing(real):
        x = torch.empty(1, 4, 6)
        packed = at.keep_mask(x, P, SITE) > 0
        columns = kept(at.seeds_of_columns(x[..., :3], SITE, (3, 6), 6), x[..., :3]) > 0
    assert torch.equal(packed[0], whole[real])
    assert torch.equal(columns[0], whole[real][:, 3:])


class Launches(TorchDispatchMode):
    """Counter of operations, and of those that copy from the host."""

    def __init__(self):
        super().__init__()
        self.count, self.from_host = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "slice" not in func.name():
            self.count += 1
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.from_host += any(t.device.type == "cpu" for t in tensors) or func.name().startswith("aten::_to_copy")  # fmt: skip
        return out


def launches_of_a_step(sites):
    at, x = stream(), torch.empty(2, 12, 8, device="meta")
    for step in (1, 2):
        with at.at(step, 0, 2), Launches() as found:
            for site in range(sites):
                at.seeds(x, f"h.{site}", range(12))
    return found


def test_dropout_seeds_of_30_layers_take_as_many_kernel_launches_as_those_of_one():
    one, many = launches_of_a_step(1), launches_of_a_step(30)
    assert one.count == many.count < 50
    assert one.from_host == many.from_host == 0


def test_dry_run_on_fake_tensors_leaves_later_dropout_seeds_unchanged():
    at, x = stream(), torch.empty(2, 5)
    want = at.cells(2, SITE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        at.seeds(x, SITE)
    assert at.seeds(x, SITE).tolist() == want
    assert len(at.device_seeds.plans) == 1


def test_dropout_seed_cache_holds_fewer_than_20_entries_after_99_batch_sizes():
    held = DeviceSeeds()
    for rows in range(1, 100):
        held.find(torch.device("cpu"), 0, (1, 0, rows), 5, rows, ())
    assert len(held.plans) < 20


def test_dropout_seeds_computed_in_inference_mode_are_usable_in_a_later_training_step():
    at, x = stream(), torch.ones(2, 3, requires_grad=True)
    with torch.inference_mode():
        at.seeds(x, SITE)
    found = [at.seeds(x, SITE)]
    at.step += 1
    found.append(at.seeds(x, SITE))
    assert not any(seeds.is_inference() for seeds in found)
    assert not torch.equal(*found)


def test_seeding_of_random_draws_on_the_cpu_does_not_initialize_or_seed_any_gpu(monkeypatch):
    """torch's fork_rng and manual_seed would initialise CUDA, which a forked rank cannot, and seed every GPU."""
    from slapo_zoo import build, create_schedule
    from slapo_zoo.parallel.rng.layout_independent_random import drawn_from

    def touch(*_args):
        raise AssertionError("a GPU was touched")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("get_rng_state", "set_rng_state", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, touch)
    sch = create_schedule(torch.nn.Sequential(torch.nn.RReLU()))
    sch["0"].fork_rng()
    assert build(sch).train()(-torch.ones(2, 4)).unique().numel() == 8
    before, found = torch.get_rng_state(), []
    for _ in range(2):
        with drawn_from(3):
            found.append(torch.rand(2))
    assert torch.equal(*found)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_state_added_before_cuda_was_used_draws_on_the_gpu_from_its_seed(monkeypatch):
    from slapo_zoo.parallel.rng.seeds import RngTracker

    tracker, gpu = RngTracker(), torch.Generator()  # in place of the GPU's
    tracker.add("tp", 5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _=0: gpu.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _=0: gpu.set_state(state))
    before, expected = gpu.get_state(), torch.Generator().manual_seed(5)
    for _ in range(2):
        with tracker.fork("tp"):
            assert torch.equal(torch.rand(2, generator=gpu), torch.rand(2, generator=expected))
        assert torch.equal(gpu.get_state(), before)


def test_draws_without_rows_within_others_leave_the_outer_ones_without_rows():
    own, inside = stream(), []
    assert own.place(SITE, 2) == (3, 2, 2)
    with own.without_rows():
        with own.without_rows():
            inside.append(own.place(SITE, 2))
        inside.append(own.place(SITE, 2))
    assert inside == [(3, 0, 0)] * 2
    assert own.place(SITE, 2) == (3, 2, 2)
