"""Complete the arguments of `from_pretrained` by those that a schedule card (a published schedule) recommends."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slapo_zoo.hf import models as hf
from slapo_zoo.parallel.mesh import Mesh
from slapo_zoo.parallel.ranks.agreement import together
from slapo_zoo.parallel.ranks.killed_rank import rank_guard
from slapo_zoo.parallel.rng.seeds import get_logger
from slapo_zoo.zoo.argument_values import changed_config, local_folder, make_mesh, pick_device
from slapo_zoo.zoo.cards.plans import Plan, measured_knobs, plans_of
from slapo_zoo.zoo.cards.resolve_card import load_card
from slapo_zoo.zoo.hf_arguments import HubArguments, renamed
from slapo_zoo.zoo.options import MESH, LoaderOptions, unknown_knob
from slapo_zoo.zoo.schedule_source import kind_of
from slapo_zoo.zoo.tuned import CARDS, machine_name, model_name, shape_name

# groups of arguments: if the user gives one of a group, the card's plan sets none of the group
TOGETHER = (
    ("checkpoint_ratio", "checkpoint_policy", "activation_memory"), ("pipeline_order", "stages_per_rank"),
    ("dp_shard", "zero_stage"), ("precision", "dtype", "torch_dtype"),
)  # fmt: skip
SHAPES_PROGRAM = ("checkpoint_ratio", "checkpoint_policy", "sequence_parallel", "kernels")
OPTIONS = tuple(field.name for field in dataclasses.fields(LoaderOptions))
WHERE = "from_pretrained"


def with_options(
    load: Callable[..., Any], like: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a function that only declares arguments (no body): a call of it becomes a call of `load`.

    rewrite:  declared(cls, name, tp=2, revision="x")  -->  load(LoaderOptions(tp=2), name=name, revision="x")

    If `schedule=` names a schedule card (published schedule), an argument left out gets the value it recommends.

    Args:
        load: called with a LoaderOptions and, by name, all arguments for which LoaderOptions has no field.
        like: None if the function's own signature declares all arguments; or a class method, from whose signature the
            arguments that are fields of LoaderOptions are appended to the function's own, in the same order.
    """

    def decorate(declared: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(declared)
        if like is not None:
            own = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            options = inspect.signature(like.__func__).parameters
            own += [options[name] for name in options if name in OPTIONS]
            signature = signature.replace(parameters=own)

        @functools.wraps(declared)
        def call(*args: Any, **given: Any) -> Any:
            asked = _bound(declared.__name__, signature, args, given)
            schedule = asked.arguments.get("schedule", "zoo")
            if isinstance(schedule, str | Path) and kind_of(schedule) == "card":
                with rank_guard(WHERE):
                    asked.arguments |= defaults(asked.arguments)
            asked.apply_defaults()
            _cls, *others = (name for name in asked.arguments if name not in OPTIONS)
            options = LoaderOptions(**{name: asked.arguments[name] for name in OPTIONS})
            return load(options, **{name: asked.arguments[name] for name in others})

        call.__dict__["__signature__"] = signature
        return call

    return decorate


def _bound(
    where: str, signature: inspect.Signature, args: Sequence[Any], given: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return a call's `args` and `given` keywords bound to a signature; SlapoError for an unknown argument, with the
    nearest known name. `where` names the called function in the error.
    """
    try:
        return signature.bind(*args, **given)
    except TypeError as error:
        unknown = next(iter(given.keys() - signature.parameters.keys()), "")
        if unknown:
            raise unknown_knob(where, unknown, signature.parameters) from None
        raise TypeError(f"{where}(): {error}") from None


def defaults(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that a schedule card recommends and the user did not give. A collective
    call. A card may have plans: such arguments for some kinds and numbers of devices. `asked` are the user's arguments,
    with `schedule` the card. The result is {} if no plan fits model, devices and arguments.
    """
    name = str(asked["schedule"])
    if name.endswith(".json") or asked.get("trust_remote_code"):
        return {}  # plain directives, or a `schedule.py`: no plans
    mesh = make_mesh(dp=None)
    read = together(mesh, "card", lambda: _read(name) if mesh.rank == 0 else ({}, False))
    tuning, is_own = read[0]  # rank 0 reads for all
    device = pick_device(asked.get("device"))
    plans, tuned = plans_of(tuning), tuning.get(machine_name(device), {})
    near = [plan for plan in plans if _suits(plan, device, mesh.world_size)]
    if not near and not tuned:
        _say(mesh, plans, f"here are {mesh.world_size} ranks on {machine_name(device)}")
        return {}
    config = _config(asked)
    knobs, source = measured_knobs(tuned, model_name(config), mesh.world_size), "measured"
    if knobs is None:
        fits = next((plan for plan in near if plan.model == shape_name(config)), None)
        if fits is None:
            _say(mesh, plans, f"the model is {shape_name(config)}")
            return {}
        knobs, source = fits.knobs, f"simulated for {fits.name}, {fits.rows} rows a step"
    given = asked | asked.get("config_changes", {})
    other = [n for n in MESH if given.get(n) not in (None, knobs.get(n, 1))]  # no plan names cp
    if other or (given.get("target") or "torch") != "torch":
        _say(
            mesh,
            plans,
            f"{other[0] if other else 'target'}={given[(other or ['target'])[0]]!r} was asked for",
        )
        return {}
    left = {n for group in TOGETHER if given.keys() & set(group) for n in group} | given.keys()
    left |= set() if is_own else set(SHAPES_PROGRAM)  # these are part of its directives
    found = {n: value for n, value in knobs.items() if n not in left or n in ("tp", "pp", "dp")}
    if mesh.rank == 0:
        text = ", ".join(f"{n}={value!r}" for n, value in found.items())
        get_logger("slapo_zoo").info("the card's plan (%s) is taken: %s", source, text)
    # a card of this package has the directives of one mesh; the family's table gives those of any
    return found | ({"schedule": "zoo"} if is_own else {})


def _read(name: str) -> tuple[dict[str, Any], bool]:
    """Read the schedule card `name` (a published schedule: folder or Hub id). Return ({device name: loader arguments
    measured as fastest, "simulated": those simulated as fastest}, whether this package's own card for the model type
    makes the same changes to a model).
    """
    card = load_card(name)
    own = CARDS / card.program.model_type  # published with this package
    is_own = own.is_dir() and load_card(str(own)).program == card.program
    return dict(card.tuning), is_own


def _suits(plan: Plan, device: torch.device, ranks: int) -> bool:
    if plan.gpus != ranks:
        return False
    if device.type != "cuda":
        return plan.device == device.type
    has_room = torch.cuda.get_device_properties(device).total_memory >= plan.memory_gib * 2**30
    return has_room and plan.device in machine_name(device).lower()


def _config(asked: Mapping[str, Any]) -> Any:
    if "config" in asked:
        return asked["config"]
    hf.register_models()
    changes = dict(asked.get("config_changes", {}))
    hub = HubArguments.taken(changes)
    renamed(changes, asked.get("attention"), asked.get("dtype"))
    name, allow_pickle = str(asked["name_or_path"]), bool(asked.get("allow_pickle"))
    folder = local_folder(name, asked.get("revision"), allow_pickle, hub)
    return changed_config(folder, changes, hub)


def _say(mesh: Mesh, plans: list[Plan], why: str) -> None:
    if plans and mesh.rank == 0:
        there = ", ".join(f"{plan.size} on {plan.name}" for plan in plans)
        get_logger("slapo_zoo").info("none of the card's plans is taken (%s): %s", there, why)
