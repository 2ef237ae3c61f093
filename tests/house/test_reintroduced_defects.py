"""Known defects, put back into a copy of the sources: the test of each must fail there."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEFECTS = "tests/house/test_known_defects.py"
CONTEXT = "tests/verify/test_context.py"
SHARD, SYNC = "slapo_zoo/language/primitives/shard.py", "slapo_zoo/language/primitives/sync.py"
LOGITS, LOSS = "kernels/loss/vocab_logits.py", "kernels/loss/lm_loss.py"


@dataclass(frozen=True)
class Defect:
    """Defect that replaces `right` by `wrong` in `file`, and that `test` must detect."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


ALL = [
    Defect("vocabulary: an id at the edge of a shard", SHARD, "(input >= self.stop)",
           "(input > self.stop)", f"{DEFECTS}::test_vocab_parallel_embedding_equals_the_plain_embedding_for_every_token_id"),
    Defect("vocabulary: ids of later ranks are not moved", SHARD, "ids = (input - self.start)",
           "ids = input.clamp(max=self.stop - self.start - 1)", f"{DEFECTS}::test_vocab_parallel_embedding_equals_the_plain_embedding_for_every_token_id"),
    Defect("axis 0 changes in_features", SHARD, '{0: "out_features", 1: "in_features"}',
           '{0: "in_features", 1: "out_features"}', f"{DEFECTS}::test_shard_of_a_linear_weight_changes_only_the_feature_count_of_its_axis"),
    Defect("a double shard is accepted", SHARD, "if earlier := site.placed(self.param_name):",
           "if (earlier := site.placed(self.param_name)) and not earlier:", f"{DEFECTS}::test_shard_of_an_already_sharded_weight_is_refused"),
    Defect("ties come apart when they are sharded", SHARD, "names = site.state.set_parameter(old, new)",
           "names = [self.param_name]; setattr(site.module, self.param_name, new)", f"{DEFECTS}::test_build_of_a_sharded_schedule_keeps_embedding_and_head_tied"),
    Defect("ties come apart when they get values", "slapo_zoo/model/load/build.py", "if id(module._parameters[n]) not in tied]",
           "]; tied.clear()", f"{DEFECTS}::test_build_of_a_sharded_schedule_keeps_embedding_and_head_tied"),
    Defect("a default counts as an input", "slapo_zoo/language/graph/insert.py", "if p.default is p.empty]",
           "]", f"{DEFECTS}::test_subgraph_replaced_by_a_function_with_a_default_argument_keeps_the_logits"),
    Defect("dropout in eval", "slapo_zoo/language/primitives/fork_rng.py", "if not module.training or module.p == 0.0:\n            return input",
           "if module.p == 0.0:\n            return input", f"{DEFECTS}::test_model_in_eval_mode_applies_no_dropout"),
    Defect("dropout in eval of a graph", "slapo_zoo/language/graph/modes.py", "both = (mine, theirs) if training else (theirs, mine)",
           "both = (mine, mine)", "tests/language/graph"),
    Defect("tanh for erf", "slapo_zoo/language/graph/canonical.py", 'IGNORED = {"_stacklevel",',
           'IGNORED = {"_stacklevel", "approximate",', f"{DEFECTS}::test_schedule_and_fused_pattern_keep_the_erf_or_tanh_variant_of_gelu"),
    Defect("the parallel loss drops label smoothing", LOGITS, '{"ignore_index": ignore_index, "label_smoothing": label_smoothing}',
           '{"ignore_index": ignore_index}', f"{DEFECTS}::test_vocab_parallel_loss_with_smoothing_and_ignored_labels_equals_torch"),
    Defect("the parallel loss smooths over local classes", LOSS, "row_losses(whole, target >= 0, smoothing, vocab_size)",
           "row_losses(whole, target >= 0, smoothing, logits.shape[1])", f"{DEFECTS}::test_vocab_parallel_loss_with_smoothing_and_ignored_labels_equals_torch"),
    Defect("the parallel loss counts ignored labels", LOSS, "number = counts.sum()\n    return torch.where(number",
           "number = torch.tensor(len(counts))\n    return torch.where(number", f"{DEFECTS}::test_vocab_parallel_loss_with_smoothing_and_ignored_labels_equals_torch"),
    Defect("a pre-hook drops the other arguments", SYNC, "values[i] = op(values[i])\n    return tuple(values[: len(args)])",
           "values[i] = op(values[i])\n    return tuple(values[: min(i + 1, len(args))])", f"{DEFECTS}::test_collective_before_a_forward_changes_only_the_first_argument_of_the_forward"),
    Defect("a reshard without a gradient", "slapo_zoo/language/primitives/sync_reshard.py", "return collectives.all_to_all(x, target, source, group)",
           "return collectives.all_to_all(x.detach(), target, source, group)", f"{DEFECTS}::test_reshard_of_a_sharded_tensor_has_the_gradient_of_the_full_tensor"),
    Defect("a switched off Verify runs the model", "slapo_zoo/verify/context.py", "if self.enable:",
           "if self.sch is not None:", f"{CONTEXT}::test_verify_context_with_enable_false_makes_no_report_and_runs_no_model"),
]  # fmt: skip


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Return a copy of the checkout; each test restores its file."""
    copy = tmp_path_factory.mktemp("sources") / "checkout"
    names = ("slapo_zoo", "kernels", "schedules", "tests", "pyproject.toml")
    for name in names:
        place = copy / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
        else:
            shutil.copy(ROOT / name, place)
    (copy / "hub_cards").symlink_to(ROOT / "hub_cards")
    return copy


def run_test(sources, test):
    env = {**os.environ, "PYTHONPATH": str(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=sources, env=env, capture_output=True, text=True, check=False)  # fmt: skip


def test_source_line_changed_by_each_reintroduced_defect_occurs_once_in_its_file():
    """Runs by default, so that a defect whose source line moved is noticed at once."""
    for defect in ALL:
        assert (ROOT / defect.file).read_text().count(defect.right) == 1, defect.name


@pytest.mark.slow
@pytest.mark.parametrize("defect", ALL, ids=lambda d: d.name.replace(" ", "-"))
def test_source_with_a_reintroduced_defect_fails_the_test_listed_for_it(defect, sources):
    file = sources / defect.file
    right = file.read_text()
    file.write_text(right.replace(defect.right, defect.wrong))
    try:
        done = run_test(sources, defect.test)
    finally:
        file.write_text(right)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]  # 1: a test failed
    assert str(sources) not in done.stdout or "error" not in done.stdout.splitlines()[-1]
