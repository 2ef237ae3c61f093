"""Coverage of schedule="auto": every model type of `transformers`, tiny, on every layout: `ci/run.py coverage`."""

import importlib
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from slapo_zoo.cli.arguments import AsJson
from slapo_zoo.cli.readable_errors import readable_errors, stdout_for_json
from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.verify.case import Case, Trial
from slapo_zoo.verify.derive import Search, cut_table, derive, problem_of
from slapo_zoo.verify.tiny_case import tiny_case
from slapo_zoo.zoo.outline import Outline
from slapo_zoo.zoo.table import families, table_for
from slapo_zoo.zoo.tiny_config import Sizes

HEADS = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "SequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "tp2": ((2, 1, 1), {}),
    "pp2": ((1, 2, 1), {}),
    "tp2 pp2": ((2, 2, 1), {}),
    "tp2 sp": ((2, 1, 1), {"sequence_parallel": True}),
    "cp2": ((1, 1, 1), {"cp": 2}),
}
SLOW_IMPORTS = (
    "torch._dynamo", "torch.distributed.pipelining", "torch._subclasses.fake_tensor",
    "transformers.modeling_utils", "transformers.models.llama.modeling_llama",
    "transformers.models.bart.modeling_bart", "slapo_zoo.pipeline.stage",
)  # fmt: skip
EQUAL, REFUSED = "equal", "refused"
MARKS = {EQUAL: "yes", "": "unmeasured"}


@dataclass
class Outcome:
    """Result of trying one model type.

    Args:
        model_type: name of the type in `transformers`.
        cls: name of the class that was tried.
        problem: why plain `transformers` does not train a tiny model of the type, or "".
        layouts: name of a layout --> "equal", or "refused: why".
        share: share of the parameters that tp=2 shards, 0 to 1.
    """

    model_type: str
    cls: str
    problem: str = ""
    layouts: dict[str, str] = field(default_factory=dict)
    share: float = 0.0


def model_types() -> dict[str, list[str]]:
    """Return {model type: names of its classes with a loss, in the order of HEADS}."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for mapping in HEADS.values():
        for name, cls in getattr(modeling_auto, mapping).items():
            found.setdefault(name, []).append(cls if isinstance(cls, str) else cls[0])
    return found


def default_config(model_type: str, cls: Any) -> Any:
    """Return the default config of a model type, or of its text part if the class takes that."""
    from transformers import CONFIG_MAPPING

    config, wanted = CONFIG_MAPPING[model_type](), cls.config_class
    if wanted is not None and not isinstance(config, wanted):
        text = config.get_text_config()
        config = text if isinstance(text, wanted) else wanted()
    config.num_labels = 3
    return config


def outcome_of(model_type: str, names: list[str], layouts: list[str]) -> Outcome:
    """Try the classes `names` of a type until plain `transformers` trains one; then try every layout with that class."""
    import transformers

    found = Outcome(model_type, names[0])
    for name in names:
        found.cls, cls = name, getattr(transformers, name)
        with tempfile.TemporaryDirectory(prefix="slapo_zoo-coverage-") as scratch:
            try:
                config = default_config(model_type, cls)
                case = tiny_case(config, cls, Path(scratch), Sizes())
                found.problem = "" if "loss" in case.truth.outputs else "no loss"
            except Exception as error:
                found.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
                continue
            if not found.problem:
                _try_layouts(found, case, config, layouts)
                break
    return found


def _try_layouts(found: Outcome, case: Case, given: Any, layouts: list[str]) -> None:
    config = case.config
    for layout in layouts:
        sizes, knobs = LAYOUTS[layout]
        try:
            if "cp" in knobs:
                problem = _probe(given, case.cls, sizes)
            elif config.model_type in families():
                problem = problem_of(Trial(case, sizes, "zoo", knobs))
                found.share = found.share or _share_of_zoo(case)
            else:
                proof, problem = Search(config, case, sizes, knobs).run(), ""
                found.share = found.share or (proof.share if sizes[0] > 1 else 0.0)
        except Exception as error:
            problem = str(error).strip().splitlines()[0]
        found.layouts[layout] = f"{REFUSED}: {problem}" if problem else EQUAL


def _probe(config: Any, cls: Any, sizes: tuple[int, int, int]) -> str:
    """Probe whether cp can shard the tokens of a class; return "", or raise the error of a class whose tokens it
    cannot.
    """
    if config.model_type in families():
        cut_table(config, cls, table_for(config.model_type))
    else:
        derive(config, cls, sizes, cp=2)
    return ""


def _share_of_zoo(case: Case) -> float:
    outline = Outline(case.config, case.cls, Mesh(2), torch.float32)
    divided = sum(math.prod(spec.shape) for spec in outline.specs if spec.placement)
    return round(divided / sum(math.prod(spec.shape) for spec in outline.specs), 3)


def cover(
    names: list[str],
    file: Path,
    timeout_s: int,
    layouts: list[str],
    done: Callable[[Outcome], None],
) -> Iterator[Outcome]:
    """Yield the outcome of every named type, and of those in the file; each is tried in a process of its own.

    Args:
        names: model types; none: all that are not in the file.
        file: JSON lines of outcomes, to which new ones are added.
        timeout_s: seconds for each type.
        layouts: names in LAYOUTS.
        done: called with each new outcome.
    """
    hf.register_models()
    _make_once()
    kept = read_outcomes(file)
    types = model_types()
    for name in names or [name for name in types if name not in kept]:
        classes = types[name]
        kept[name] = _apart(name, classes, timeout_s, layouts)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(kept[name])) + "\n")
        done(kept[name])
    yield from kept.values()


def _make_once() -> None:
    """Import slow modules and save a model once before processes are forked, so that each type does not do it again."""
    import transformers

    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    model = transformers.BertModel(config)
    with tempfile.TemporaryDirectory(prefix="slapo_zoo-coverage-") as scratch:
        model.save_pretrained(
            scratch
        )  # transformers makes its table of conversions, accelerate imports deepspeed


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """Return {model type: its last outcome} from a file of JSON lines; {} without the file."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = (Outcome(**json.loads(line)) for line in text.splitlines())
    return {outcome.model_type: outcome for outcome in found}


def _apart(name: str, classes: list[str], timeout_s: int, layouts: list[str]) -> Outcome:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(timeout_s)
        try:
            text = json.dumps(asdict(outcome_of(name, classes, layouts)))
        except BaseException as error:
            text = json.dumps(asdict(Outcome(name, classes[0], f"{type(error).__name__}: {error}")))
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    code = -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = f"no answer in {timeout_s} s" if code == signal.SIGALRM else f"its process ended by signal {code}"  # fmt: skip
    stopped = dict.fromkeys(layouts, f"{REFUSED}: {said}")
    return Outcome(**json.loads(text)) if text else Outcome(name, classes[0], "", stopped)


def cut_page(outcomes: list[Outcome]) -> str:
    """Return the text of docs/coverage_cp.md: types whose tokens cp can shard, and why it cannot for the others."""
    tried = sorted((o for o in outcomes if not o.problem and "cp2" in o.layouts), key=lambda o: o.model_type)  # fmt: skip
    equal = [o for o in tried if o.layouts["cp2"] == EQUAL]
    reasons = [f"- `{o.model_type}` ({o.cls}): {_short(o.layouts['cp2'], 300)}" for o in tried if o not in equal]  # fmt: skip
    untried = sorted(model_types().keys() - {o.model_type for o in outcomes})
    lines = [
        "# Coverage of cp", "",
        "Which model types have tokens that can be cut over two ranks of cp, by the leak probe: a tiny model of the type, outputs, the positions "
        "that each changed token reaches, loss, every gradient and dropout compared with the plain model. Made by "
        "`ci/run.py coverage NAMES --layout cp2 --page docs/coverage_cp.md`.", "",
        "| tried | equal | refused |", "|--:|--:|--:|",
        f"| {len(tried)} | {len(equal)} ({len(equal) / max(len(tried), 1):.1%}) | {len(tried) - len(equal)} |", "",
        "The same probe runs at the load of a class that no table names, so a type that differs from the plain model is refused, not trained.", "",
        "## Equal", "", ", ".join(f"`{o.model_type}` ({o.cls})" for o in equal), "",
        "## What is refused, and why", "", *reasons,
    ]  # fmt: skip
    if untried:
        lines += ["", "## Not tried", "", ", ".join(f"`{name}`" for name in untried)]
    return "\n".join(lines) + "\n"


def page(outcomes: list[Outcome]) -> str:
    """Return the text of docs/coverage.md."""
    import transformers

    trained = [o for o in outcomes if not o.problem]
    shown = [layout for layout in LAYOUTS if layout != "cp2"]  # cp2 has a page of its own
    tried = {layout: [o for o in trained if layout in o.layouts] for layout in shown}
    counts = {
        layout: _counted(sum(o.layouts[layout] == EQUAL for o in some), len(some), len(trained))
        for layout, some in tried.items()
    }
    shared = [o for o in trained if o.layouts.get("tp2") == EQUAL and o.share]
    untried = sorted(model_types().keys() - {o.model_type for o in outcomes})
    enough = sum(o.share >= 0.45 for o in shared)
    lines = [
        "# Coverage", "",
        f"Every model type of `transformers` {transformers.__version__} that `AutoModelFor{{{', '.join(HEADS)}}}` knows, made tiny and",
        'trained with `schedule="auto"` on emulated ranks; outputs, loss and every gradient are compared with the plain model, '
        "with dropout (where the default config has some) every gradient with that of one rank. "
        "Made by `ci/run.py coverage`.", "",
        f"Plain `transformers` trains {len(trained)} of {len(outcomes)} types from the tiny config. Of those:", "",
        "| layout | equal | share |", "|:--|--:|--:|",
        *(f"| {layout} | {found} |" for layout, found in counts.items()), "",
        f"tp=2 divides at least 45 % of the parameters of {enough} of the {len(shared)} types that are equal at tp2 and whose share was noted. What is not "
        "equal is refused with its reason: nothing that differs from the plain model is used.", "",
        "| type | class | divided | tp2 | pp2 | tp2 pp2 | tp2 sp |", "|:--|:--|--:|:--|:--|:--|:--|",
    ]  # fmt: skip
    for o in sorted(trained, key=lambda o: o.model_type):
        marks = [MARKS.get(o.layouts.get(layout, ""), "no") for layout in shown]
        lines.append(
            f"| {o.model_type} | {o.cls} | {f'{o.share:.0%}' if o.share else 'unnoted'} | {' | '.join(marks)} |"
        )
    lines += ["", "## What is refused, and why", ""]
    for o in sorted(trained, key=lambda o: o.model_type):
        refused = {layout: text for layout, text in o.layouts.items() if text != EQUAL}
        why = {layout: text for layout, text in refused.items() if layout != "tp2 sp"}
        if why:
            reason = _short(next(iter(why.values())))
            lines.append(f"- `{o.model_type}` ({', '.join(why)}): {reason}")
    lines += ["", "## What plain `transformers` does not train from the tiny config", ""]
    lines += [
        f"- `{o.model_type}`: {_short(o.problem)}"
        for o in sorted(outcomes, key=lambda o: o.model_type)
        if o.problem
    ]
    if untried:
        lines += ["", "## Not tried", "", ", ".join(f"`{name}`" for name in untried)]
    return "\n".join(lines) + "\n"


def _counted(equal: int, tried: int, trained: int) -> str:
    """Return the table cells "N of M | share"; "N of M tried" if not all types were tried, "unmeasured" if none was."""
    if tried == trained:
        return f"{equal} of {tried} | {equal / max(tried, 1):.1%}"
    return f"{equal} of {tried} tried | " if tried else "unmeasured | "


def _short(text: str, most: int = 160) -> str:
    text = text.removeprefix(f"{REFUSED}: ").rpartition("is right; the last one: ")[2]
    text = text.rpartition(" over cp: ")[2]
    return text.replace("|", "/").replace("<", "").replace(">", "")[:most]


def coverage(
    names: Annotated[list[str] | None, typer.Argument(help="Model types; none: all that are not in the file yet.")] = None,
    file: Annotated[Path, typer.Option(help="Outcomes so far, as JSON lines.")] = Path("coverage.jsonl"),
    write: Annotated[Path | None, typer.Option("--page", help="Write docs/coverage.md there.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="tp2, pp2, 'tp2 pp2', 'tp2 sp', cp2; none: all but cp2.")] = None,
    timeout: Annotated[int, typer.Option(help="Seconds per type.")] = 240,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Try every model type, tiny, on tp2, pp2, tp2 with pp2, and tp2 with sequence parallelism."""

    def tell(outcome: Outcome) -> None:
        typer.echo(f"{outcome.model_type}: {outcome.problem or outcome.layouts}")

    with stdout_for_json(as_json):
        found = list(cover(names or [], file, timeout, layout or list(LAYOUTS)[:-1], tell))
    if write is not None:
        made = cut_page if layout == ["cp2"] else page
        write.write_text(made(found), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps([asdict(outcome) for outcome in found], indent=1))


if __name__ == "__main__":
    with readable_errors():
        typer.run(coverage)
