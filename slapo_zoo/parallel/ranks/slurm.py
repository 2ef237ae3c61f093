"""Translation of srun's environment variables into those of torchrun."""

import os
import re
from collections.abc import Mapping

NAMES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


def slurm_environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return {RANK, WORLD_SIZE, ...: value} for a process that srun started; {} for any other process.

    If MASTER_ADDR or MASTER_PORT is not set, the result has both: the first host of the step, and a port computed
    from the job id. In that case a batch script, or a step of one task (`srun --pty`), gives {}.
    Source: https://slurm.schedmd.com/srun.html, output environment variables.
    """
    if not env.keys() >= set(NAMES.values()):
        return {}
    found = {name: env[slurm_name] for name, slurm_name in NAMES.items()}
    if not {"MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
        if found["WORLD_SIZE"] == "1" or not hosts:
            return {}
        port = 10000 + int(env.get("SLURM_JOB_ID", "0")) % 20000
        found |= {"MASTER_ADDR": first_host(hosts), "MASTER_PORT": str(port)}
    if tasks := env.get("SLURM_STEP_TASKS_PER_NODE"):
        each = tasks_per_node(tasks)
        node = int(env.get("SLURM_NODEID", "0"))
        found["LOCAL_WORLD_SIZE"] = str(each[min(node, len(each) - 1)])
    return found


def is_first() -> bool:
    """Return whether this process prints for all ranks: it is rank 0 of its launcher, or has no launcher."""
    return os.environ.get("RANK", "0") == os.environ.get("SLURM_PROCID", "0") == "0"


def first_host(hosts: str) -> str:
    """Return the first host of SLURM's host list.

    rewrite:  gpu[003-005,9],login  -->  gpu003
    """
    prefix, bracket, rest = re.split(r",(?![^\[]*\])", hosts)[0].partition("[")
    inside, _, suffix = rest.partition("]")
    return prefix + re.split("[-,]", inside)[0] + suffix if bracket else prefix


def tasks_per_node(tasks: str) -> list[int]:
    """Return the number of tasks of each node of a SLURM step.

    rewrite:  8(x2),4  -->  [8, 8, 4]
    """
    found: list[int] = []
    for part in tasks.split(","):
        count, _, times = part.partition("(x")
        found += [int(count)] * int(times.rstrip(")") or 1)
    return found
