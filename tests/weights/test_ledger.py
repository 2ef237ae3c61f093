"""The ledger of a load: bytes, files and peak memory."""

import mmap

import pytest

from slapo_zoo.weights import ledger
from slapo_zoo.weights.ledger import AnonymousPeak, Ledger, anonymous_bytes

MIB = 2**20


def growth_of_a_block():
    """Return the peak growth of this process over 32 MiB that are freed again."""
    with AnonymousPeak() as peak:
        block = mmap.mmap(
            -1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )  # new pages; an allocator may have some at hand
        for place in range(0, len(block), mmap.PAGESIZE):  # no buffer that would be given back
            block[place] = 1
        peak._glance()  # the thread would see it, but a loaded machine may be late
        block.close()
    return peak.growth


def test_memory_peak_reported_by_a_load_includes_memory_released_later(ranks):
    """Measured in a worker process: memory that the test process frees meanwhile would be subtracted."""
    if not anonymous_bytes():
        pytest.skip("this kernel does not tell anonymous memory")
    assert 32 * MIB <= ranks.run(growth_of_a_block, 1)[0] < 96 * MIB


def test_memory_peak_reported_without_a_proc_filesystem_is_0(monkeypatch, tmp_path):
    monkeypatch.setattr(ledger, "SMAPS", tmp_path / "none")
    monkeypatch.setattr(ledger, "STATM", tmp_path / "none")
    assert anonymous_bytes() == 0
    with AnonymousPeak() as peak:
        pass
    assert peak.growth == 0


def test_load_report_prints_tensors_bytes_and_files_read_in_one_line():
    text = str(Ledger(12, 1_500_000, 3_000, 1, 0.25, 10**10, ["score.weight"], []))
    assert text == (
        "12 tensors, 1.5 MB read from 1 file in 0.25 s into 3.0 KB; peak anonymous +10.0 GB; "
        "1 newly initialized, 0 unexpected"
    )
