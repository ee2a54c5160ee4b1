"""The sources that presets cite: repository@commit, then a file, with the commit's date."""

# The date of each commit that was read.
DATES = {
    "34aed43c": "2026-07-08",
    "2e1fd5e": "2026-08-12",
    "bcbbfa57": "2026-07-24",
    "e591f30": "2026-08-22",
    "7217859": "2026-02-21",
    "5067397c": "2026-06-11",
}


def dated(source: str) -> str:
    """Return a source with the date of its commit, if it names one."""
    commit = source.partition("@")[2].partition(" ")[0]
    return f"{source} ({DATES[commit]})" if commit in DATES else source


_AXLEARN = "apple/axlearn@34aed43c axlearn/cloud/gcp/jobset_utils.py"
AXLEARN, AXLEARN_ULTRA = _AXLEARN, f"{_AXLEARN}, a3-ultra"

RECIPES = "AI-Hypercomputer/gpu-recipes@2e1fd5e training"
RECIPES_70B = f"{RECIPES}/a3ultra, Llama 3.1 70B"
RECIPES_405B = f"{RECIPES}/a3ultra, Llama 3.1 405B"
RECIPES_MEGA = "AI-Hypercomputer/gpu-recipes@2e1fd5e src/helm-charts/a3mega/nccl-tests"
RECIPES_GIB = "AI-Hypercomputer/gpu-recipes@2e1fd5e src/helm-charts/a3ultra"

TOOLBOX = "NVIDIA/JAX-Toolbox@bcbbfa57 docs/GPU_performance.md"
TOOLBOX_CI = "NVIDIA/JAX-Toolbox@bcbbfa57 .github/container/test-maxtext.sh"
TOOLBOX_SLURM = "NVIDIA/JAX-Toolbox@bcbbfa57 docs/frameworks/maxtext/example_slurm.sub"
TOOLBOX_EKS = "NVIDIA/JAX-Toolbox@bcbbfa57 .github/eks-workflow-files/jio-eks/jio-template.yaml"

MAXTEXT = "AI-Hypercomputer/maxtext@e591f30 src/maxtext/configs/gpu/a3"
MAXTEXT_LAUNCH = "AI-Hypercomputer/maxtext@e591f30 tools/orchestration/gpu_multi_process_run.sh"
MAXTEXT_THRESHOLDS = (
    ("128 MiB, 128 MiB, 64 MiB", f"{MAXTEXT}/llama_2_7b, 1 host"),
    ("1 GiB, 128 MiB, 128 MiB", f"{MAXTEXT}/llama_2_7b, 16 hosts, and llama_3.1_405b"),
)

EFA = "aws-samples/awsome-distributed-training@7217859 1.architectures/efa-cheatsheet.md"
AWS_JAX = "aws-samples/awsome-distributed-training@7217859 3.test_cases/jax/jax.sbatch"
NCCL = "NVIDIA/nccl@5067397c src/init.cc"
NCCL_COMMUNICATORS = (
    "NVIDIA's NCCL user guide, 'Using multiple NCCL communicators concurrently' (since 2.26)"
)

# Four GPT layers for h100-sxm:8x8, overlapped, jax 0.12.0.1, simulated.
REMATERIALIZATION_TRIED = (
    "tried on four GPT layers for h100-sxm:8x8, overlapped: 20.25 ms by simulation with it and "
    "without, in the same memory"
)
DOUBLE_BUFFERING_TRIED = (
    "tried on four GPT layers for h100-sxm:8x8, overlapped: 20.22 ms by simulation for 20.25, "
    "for 2% more memory"
)
