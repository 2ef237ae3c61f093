"""README and tutorial are run: their Python blocks are executed, the commands must exist."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from forked_script import run_script
from pages import ROOT, blocks, clean_environment, commands, page

README = page("README.md")


def execute(arguments, folder):
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=clean_environment() | {"HF_DATASETS_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def pages_server(tmp_path_factory):
    """Return a function that runs a script in its folder, in a fork with torch imported: (exit status, output)."""
    env = clean_environment() | {"HF_DATASETS_CACHE": str(tmp_path_factory.mktemp("cache"))}

    def run(script):
        code, out, err = run_script(script, script.parent, env)
        return code, out + err

    return run


PAGES = ["docs/tutorial.md", "docs/index.md", "docs/guide.md", "docs/verification.md",
         "docs/adding_an_architecture.md", "docs/adding_a_kernel.md", "docs/adding_a_primitive.md", "docs/adding_a_dialect.md",
         "docs/tuning.md", "docs/trainer.md", "docs/cards.md", "docs/lora.md", "docs/same_bits.md",
         "docs/your_own_loop.md", "docs/how_a_linear_is_sharded.md"]  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory, pages_server):
    """Return a function that runs the Python blocks of a page in an empty folder, once: (exit status, output, folder)."""

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp("page")
        return *pages_server(script_of_a_page(name, folder)), folder

    return run


def script_of_a_page(name, folder):
    """Write all blocks of a page into one script, in order: a later block may use names of an earlier one."""
    text = page(name)
    lines = [""] * text.count("\n")  # so that a traceback shows the line of the page
    for start, block in blocks("python", text):
        lines[start : start + block.count("\n")] = block.splitlines()
    assert any(lines), f"{name} has no Python block"
    script = (folder / Path(name).name).with_suffix(".py")
    script.write_text("\n".join(lines), encoding="utf-8")
    return script


def command(words, folder, server):
    """Run a command line of slapo-zoo in a folder; return its output. It has to succeed."""
    script = folder / "command.py"
    start = "import os\nos.environ['COLUMNS'] = '200'\nfrom slapo_zoo.cli.main import main\n"
    script.write_text(f"{start}if __name__ == '__main__':\n    main({words!r})\n")
    code, said = server(script)
    assert code == 0, f"{words}: {said}"
    return said


@pytest.mark.parametrize("name", PAGES)  # the README's run below, with its commands
def test_python_blocks_of_the_listed_docs_pages_run_without_error(name, ran):
    code, said, _ = ran(name)
    assert code == 0, said


def test_ci_run_commands_named_in_the_readme_exist():
    spec = importlib.util.spec_from_file_location("ci_run", ROOT / "ci" / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    named = {words[2] for words in commands(README) if words[:2] == ["python3", "ci/run.py"]}
    assert {"demo", "test"} <= named, "the README shows the two commands that do all the set-up"
    assert named <= set(run.COMMANDS)


SLAPO_ZOO_LINES = [words[1:] for words in commands(README) if words[0] == "slapo-zoo"]


@pytest.mark.parametrize("words", SLAPO_ZOO_LINES, ids=" ".join)
def test_slapo_zoo_commands_in_the_readme_exist_with_their_options(words, tmp_path, pages_server):
    """The subcommand has a help page, and it lists every option that the README uses."""
    said = command([words[0], "--help"], tmp_path, pages_server)
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert option in said, f"slapo-zoo {words[0]} has no {option}"


SLOW_PAGES = [pytest.param(name, marks=pytest.mark.slow) for name in ("index.md", "tuning.md")]


@pytest.mark.parametrize("name", ["cards.md", *SLOW_PAGES])
def test_slapo_zoo_commands_on_docs_pages_run_without_error(name, tmp_path, pages_server):
    text = page(f"docs/{name}")
    if name == "index.md":  # its first block makes the checkpoint
        _, first = next(blocks("python", text))
        assert execute(["-c", first], tmp_path).returncode == 0
    lines = list(commands(text))
    assert lines
    for program, *words in lines:
        assert program == "slapo-zoo"
        command(words, tmp_path, pages_server)


@pytest.mark.slow
def test_commands_on_the_training_page_run_without_error(tmp_path):
    """Run the page: its Python makes model and data, its YAML is the configuration, its commands train."""
    whole = page("docs/training.md")
    ((_, first),) = blocks("python", whole)
    ((_, text),) = blocks("yaml", whole)
    result = execute(["-c", first], tmp_path)
    assert result.returncode == 0, result.stderr
    (tmp_path / "run.yaml").write_text(text)
    said = []
    for _, *words in commands(whole):
        result = execute(["-m", "slapo_zoo.cli.main", *words], tmp_path)
        assert result.returncode == 0, f"{words}: {result.stderr}"
        said.append(result.stdout)
    assert "task classify: 180 rows of up to 128 tokens, 20 to evaluate on" in said[0]
    assert "checkpoint: 40 of 50 steps are done" in said[1]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [*range(1, 51)]
    assert log[-1]["eval_accuracy"] == 1.0


@pytest.mark.parametrize("most", [1, pytest.param(99, marks=pytest.mark.slow)])
def test_readme_code_blocks_and_commands_run_in_an_empty_folder_without_error(
    most, ran, pages_server
):
    """Run the README's commands, in order, where its Python blocks ran; other tests run the commands of a checkout."""
    code, said, folder = ran("README.md")
    assert code == 0, said
    for words in SLAPO_ZOO_LINES[:most]:
        command(words, folder, pages_server)


def test_readme_has_at_most_1600_words():
    assert len(README.split()) <= 1600


def test_committed_svg_pictures_equal_those_drawn_by_the_code():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "ci" / "pictures.py")
    drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    found = dict(drawn.pictures())
    assert {path.name for path in drawn.FOLDER.glob("*.svg")} == set(found)
    for name, content in found.items():
        kept = (drawn.FOLDER / name).read_text(encoding="utf-8")
        assert kept == content, f"{name}: run python3 ci/run.py pictures"


MARKED_OUT = {"slow", "grid", "gpu", "soak"}  # marks that `python3 ci/run.py test` leaves out


def named_tests(file):
    """Test functions of a file --> the marks that keep them, as a whole, out of the default run."""
    (path,) = (ROOT / "tests").rglob(file)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]  # fmt: skip
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {
        f.name: {
            ast.unparse(mark).rpartition(".")[2] for mark in f.decorator_list
        } & MARKED_OUT
        for f in functions
    }  # fmt: skip


def test_tests_named_on_the_engines_page_exist_and_run_by_default():
    """Each line of the table of engines names tests; all exist and run by default."""
    lines = page("docs/engines.md").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ")]
    rows = [cells for cells in rows if len(cells) == 4 and "test_" in cells[3]]
    assert len(rows) > 15
    for *_, named in rows:
        for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", named):
            assert named_tests(file).get(name) == set(), f"{file}::{name}"


def test_tests_named_by_the_docs_pages_exist():
    for text in (README, page("docs/engines.md"), page("docs/families.md")):
        for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", text):
            assert name in named_tests(file), f"{file}::{name}"


def test_internal_links_of_the_docs_pages_resolve():
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README):
        assert (ROOT / target).exists(), f"README.md points at {target}, which is not there"


def test_error_messages_on_the_troubleshooting_page_occur_in_the_code():
    """Each message that the page quotes, and that people search for, occurs in the code."""
    messages = re.findall(r"^\| `([^`]+)` \|", page("docs/troubleshooting.md"), re.MULTILINE)
    assert len(messages) > 10
    files = (ROOT / "slapo_zoo").rglob("*.py")
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert [text for text in messages if text not in code] == []


def test_docs_page_on_step_times_shows_the_committed_measurements():
    spec = importlib.util.spec_from_file_location("step_page", ROOT / "ci" / "step_page.py")
    steps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    found = json.loads(steps.MEASURED.read_text(encoding="utf-8"))
    text = steps.PAGE.read_text(encoding="utf-8")
    assert steps.rendered(text, found) == text, "run: python3 ci/step_page.py"
    found["steps"][0]["plain / ours"] = 99.99
    assert "99.99" in steps.rendered(text, found)
