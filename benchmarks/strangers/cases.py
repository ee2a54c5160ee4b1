"""List the published train steps that are tried, and their set-ups."""

from __future__ import annotations

import tomllib
from pathlib import Path

from benchmarks.strangers.stranger import Case

_PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
_OURS = ("jax[cuda12-local]", *_PROJECT["dependencies"])
_TUNIX = (*_OURS, "google-tunix==0.1.7")
# The newest sentencepiece wants a newer protobuf than kauldron allows.
_GEMMA = (*_OURS, "gemma==4.0.1", "sentencepiece<=0.2.1")
# MaxText's train step imports only these; maxtext[cuda12] would bring CUDA and 200 packages more.
_MAXTEXT = (
    *_OURS,
    *("absl-py", "aqtp", "cloud-accelerator-diagnostics", "drjax", "etils", "flax"),
    *("google-cloud-storage", "grain", "huggingface-hub", "jaxtyping", "jinja2", "omegaconf"),
    *("ml-goodput-measurement", "optax", "orbax-checkpoint", "packaging", "pathwaysutils"),
    *("pillow", "psutil", "pydantic", "pyyaml", "qwix", "requests", "sentencepiece", "sympy"),
    *("tensorboardX", "tiktoken", "tokamax", "transformers"),
)

CASES = (
    Case(
        name="tunix gemma3",
        module="tunix_sft",
        axes={"fsdp": 2, "tp": 4},
        packages=_TUNIX,
        options={"model": "gemma3", "constraints": True},
    ),
    Case(
        name="tunix qwen3, no constraints",
        module="tunix_sft",
        axes={"fsdp": 2, "tp": 4},
        packages=_TUNIX,
        options={"model": "qwen3", "constraints": False},
    ),
    Case(
        name="gemma, kauldron fsdp",
        module="gemma_kauldron",
        axes={"devices": 8},
        packages=_GEMMA,
        options={},
    ),
    Case(
        name="maxtext fsdp 2, tensor 4",
        module="maxtext_pretrain",
        axes={"fsdp": 2, "tensor": 4},
        packages=_MAXTEXT,
        bare=("maxtext==0.2.5",),
        options={},
        takes_dot_general=True,
    ),
    Case(
        name="maxtext fsdp 8",
        module="maxtext_pretrain",
        axes={"fsdp": 8},
        packages=_MAXTEXT,
        bare=("maxtext==0.2.5",),
        options={},
    ),
    Case(
        name="maxtext explicit axes",
        module="maxtext_pretrain",
        axes={"fsdp": 2, "tensor": 4},
        packages=_MAXTEXT,
        bare=("maxtext==0.2.5",),
        options={"shard_mode": "explicit"},
    ),
)
