"""Write environment variables as a shell script, an sbatch script, YAML or a Dockerfile."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from jaxoverlap.hardware.cluster import Cluster, parse_cluster

ENVIRONMENT_HELP = (
    "env: a file for a shell to source. slurm: an sbatch script. k8s: the `env:` of a container. "
    "dockerfile: ENV lines of an image."
)


def xla_flags(options: Mapping[str, str]) -> str:
    """Write compiler options as a line for XLA_FLAGS, which has other names for values of enums."""
    from jaxoverlap.flags import FLAGS

    return " ".join(
        f"--{name}={FLAGS[name].in_xla_flags(value) if name in FLAGS else value}"
        for name, value in options.items()
    )


def written(variables: Mapping[str, str], form: str, cluster: str | None = None) -> str:
    """Write environment variables.

    Args:
        variables: values by name.
        form: the form to write: "env", "slurm", "k8s" or "dockerfile".
        cluster: gives an sbatch script its nodes, tasks and GPUs; None: the user fills them in.
    """
    if form == "slurm":
        return _slurm(variables, parse_cluster(cluster) if cluster else None)
    if form == "k8s":
        entries = [f"  - name: {n}\n    value: {json.dumps(v)}\n" for n, v in variables.items()]
        return "env:\n" + "".join(entries)
    if form == "dockerfile":
        # Docker expands $ in ENV; JSON's escapes of quotes and backslashes are Docker's too.
        escaped = {n: json.dumps(v).replace("$", "\\$") for n, v in variables.items()}
        return "".join(f"ENV {name}={value}\n" for name, value in escaped.items())
    return exports(variables)


def exports(variables: Mapping[str, str]) -> str:
    """Write environment variables for a shell to source."""
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
        f"{exports(variables)}"
        "# The script calls jax.distributed.initialize(), which reads SLURM's variables.\n"
        "srun --kill-on-bad-exit=1 python train.py\n"
    )
