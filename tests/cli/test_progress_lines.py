"""Progress lines of long work that prints nothing itself."""

import time

import pytest

from slapo_zoo.cli.waiting import waiting


def test_long_running_command_without_output_prints_progress_lines(capsys):
    with waiting("verify gpt2", first_s=0.01, every_s=0.01):
        deadline = time.monotonic() + 30
        said = ""
        while said.count("verify gpt2: 0 s\n") < 2 and time.monotonic() < deadline:
            said += capsys.readouterr().err
            time.sleep(0.01)
    assert said.count("verify gpt2: 0 s\n") >= 2
    capsys.readouterr()
    with pytest.raises(KeyError), waiting("quick"):
        raise KeyError
    assert capsys.readouterr().err == ""
