"""Write environment variables as a shell script, an sbatch script, YAML or a Dockerfile."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from enum import StrEnum

from jaxoverlap.hardware.cluster import Cluster


class Environment(StrEnum):
    """A form in which environment variables are written."""

    ENV = "env"
    SLURM = "slurm"
    K8S = "k8s"
    DOCKERFILE = "dockerfile"


ENVIRONMENT_HELP = (
    "env: a file for a shell to source. slurm: an sbatch script. k8s: the `env:` of a container. "
    "dockerfile: ENV lines of an image."
)


def written(variables: Mapping[str, str], form: Environment, cluster: Cluster | None = None) -> str:
    """Write environment variables.

    Args:
        variables: values by name.
        form: the form to write.
        cluster: gives an sbatch script its nodes, tasks and GPUs; None: the user fills them in.
    """
    if form is Environment.SLURM:
        return _slurm(variables, cluster)
    if form is Environment.K8S:
        entries = [f"  - name: {n}\n    value: {json.dumps(v)}\n" for n, v in variables.items()]
        return "env:\n" + "".join(entries)
    if form is Environment.DOCKERFILE:
        # Docker expands $ in ENV; JSON's escapes of quotes and backslashes are Docker's too.
        escaped = {n: json.dumps(v).replace("$", "\\$") for n, v in variables.items()}
        return "".join(f"ENV {name}={value}\n" for name, value in escaped.items())
    return _exports(variables)


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _slurm(variables: Mapping[str, str], cluster: Cluster | None) -> str:
    nodes, tasks, gpus = ("HOSTS", "PROCESSES_PER_HOST", "GPUS_PER_HOST")
    if cluster is not None:
        nodes, tasks = str(cluster.num_hosts), str(cluster.processes_per_host)
        gpus = str(cluster.gpus_per_host)
    return (
        "#!/bin/bash\n"
        f"#SBATCH --nodes={nodes}\n"
        f"#SBATCH --ntasks-per-node={tasks}\n"
        f"#SBATCH --gpus-per-node={gpus}\n"
        f"{_exports(variables)}"
        "# The script calls jax.distributed.initialize(), which reads SLURM's variables.\n"
        "srun --kill-on-bad-exit=1 python train.py\n"
    )
