"""What all commands share: exit codes, errors as JSON, terminals, pipes, Ctrl-C, a quick start."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import jaxoverlap
from jaxoverlap.cli import app
from jaxoverlap.cli.doctor import PluginFailures, installed, plugins
from jaxoverlap.cli.forms import written
from jaxoverlap.cli.new_target import Style
from jaxoverlap.cli.shell.errors import MEANINGS, report
from jaxoverlap.flags import preset
from jaxoverlap.plan.plan import Plan
from tests.support import build_step
from tests.support.command import python, run, run_json
from tests.support.pods import needs_plugin
from tests.support.seeds import some

ROOT = Path(__file__).parents[2]
POD = ("--pod", "h100-sxm:1x4", "--mesh", "tp=4")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


# -- start ------------------------------------------------------------------------------------------


def test_the_version_is_one():
    assert jaxoverlap.__version__ == metadata.version("jaxoverlap")
    assert run("--version").startswith(f"jaxoverlap {jaxoverlap.__version__}, jax ")


def test_a_checkout_that_is_not_installed_is_imported():
    code = """
import importlib.metadata as metadata
found = metadata.version
def version(name):
    if name == "jaxoverlap":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
import jaxoverlap
print(jaxoverlap.__version__)
from jaxoverlap.cli import main
main()
"""
    command = [sys.executable, "-c", code, "--version"]
    said = subprocess.check_output(command, env=ENVIRONMENT, cwd=ROOT, text=True)
    first, second = said.splitlines()
    assert first == "not installed" and second.startswith("jaxoverlap not installed, jax ")


def test_every_public_name_is_found_where_it_lives():
    for name in jaxoverlap.__all__:
        assert getattr(jaxoverlap, name) is not None, name
    assert set(jaxoverlap.__all__) <= set(dir(jaxoverlap))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jaxoverlap.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("-h",),
        ("explain", "-h"),
        ("explain", "nothing.py", *POD),
        ("explain", "x", "--pod", "h100:8x8", "--mesh", "data=8"),
        ("simulate", "x", "--pod", "h100-sxm:8x8", "--mesh", "data"),
    ],
)
def test_help_and_mistakes_need_no_jax(arguments: tuple[str, ...], tmp_path: Path):
    script = "import sys; from jaxoverlap.cli import main\ntry: main()\nfinally: "
    script += "print('jax' in sys.modules, file=sys.stderr)"
    done = python("-c", script, *arguments, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "False"


def test_help_is_not_cut():
    shown = run("-h")
    assert "..." not in shown.split("Commands:")[1]
    assert "compiles nothing." in shown
    for code, text in MEANINGS.items():
        assert f"{code}: {text}" in " ".join(shown.split())
    assert run("explain", "-h") == run("explain", "--help")


# -- errors -----------------------------------------------------------------------------------------


def test_a_target_may_be_a_file_and_its_error_shows_its_place(tmp_path: Path):
    (tmp_path / "helper.py").write_text("def fail(text):\n    raise ValueError(text)\n")
    mine = tmp_path / "mine.py"
    mine.write_text("from helper import fail\n\n\ndef build(mesh):\n    return fail('boom')\n")
    for named in (str(mine), f"{mine}:build"):
        shown = run("explain", named, *POD, code=4)
        assert re.search(r"Error: boom\n  at .*helper.py:2 in fail: raise ValueError", shown)
        assert "Traceback" not in shown
    assert "has no function 'other'" in run("explain", f"{mine}:other", *POD, code=2)
    (tmp_path / "bad.py").write_text("def build(:\n")
    assert re.search(
        r"SyntaxError.*\n  at .*bad.py:1", run("explain", f"{tmp_path}/bad.py", *POD, code=4)
    )


@pytest.mark.parametrize("named", ["./nothing.py", "nothing.py:build", "./folder"])
def test_a_file_that_is_missing_is_said(named: str):
    assert named.partition(":")[0] in run("explain", named, *POD, code=2)


def test_errors_are_json_where_json_was_asked_for(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("def build(mesh):\n    raise KeyError('boom')\n")
    for arguments, code, kind in (
        (("explain", str(mine), *POD, "--json"), 4, "target"),
        (("explain", "x", "--pod", "nope:8x8", "--mesh", "tp=4", "--json"), 2, "usage"),
        (("explain", "--json"), 2, "usage"),
        (("nothing", "--json"), 2, "usage"),
    ):
        done = CliRunner().invoke(app, arguments)
        error = json.loads(done.stdout)["error"]
        assert done.exit_code == error["exit_code"] == code and error["kind"] == kind
        assert error["message"]
    assert (
        "mine.py:2 in build"
        in json.loads(CliRunner().invoke(app, ["explain", str(mine), *POD, "--json"]).stdout)[
            "error"
        ]["at"]
    )


def test_each_kind_of_failure_has_its_code():
    import jax

    assert report(ValueError("x")).code == 2
    assert report(AssertionError("x")).code == 3
    assert report(jax.errors.JaxRuntimeError("INTERNAL: x")).code == 5
    partitioner = f"""INTERNAL: custom_partitioner: Traceback (most recent call last):
  File "{json.__file__}", line 8, in partition
ValueError: Query, key and value should have same sharding.

Suspected Python Code Location:
  {json.__file__}:10:4 [attention]
  /home/me/gpt.py:22:12 [Block.__call__]
  /home/me/gpt.py:44:19 [train_step]"""
    said = report(jax.errors.JaxRuntimeError(partitioner))
    assert said.message == (
        "XLA does not compile the step: ValueError: Query, key and value should have same sharding."
    )
    assert said.at == "/home/me/gpt.py:22 in Block.__call__"
    assert report(jaxoverlap.PodsUnavailableError("x")).code == 6


def test_a_chip_that_is_known_by_its_beginning_is_suggested():
    shown = run("pods", "h100:8x8", code=2)
    assert "did you mean h100-sxm" in shown and "h200" not in shown.split("Known are")[0]


# -- terminals, pipes, Ctrl-C -----------------------------------------------------------------------


def on_a_terminal(*arguments: str, columns: int) -> str:
    """Run the command with a terminal of so many columns for stdout and stderr."""
    main, side = pty.openpty()
    command = [sys.executable, "-m", "jaxoverlap", *arguments]
    environment = ENVIRONMENT | {"COLUMNS": str(columns), "TERM": "xterm"}
    child = subprocess.Popen(command, stdout=side, stderr=side, env=environment, cwd=ROOT)
    os.close(side)
    said = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # Linux's end of a terminal
            break
        if not part:
            break
        said += part
    child.wait()
    os.close(main)
    return said.decode()


def test_tables_fit_the_terminal():
    shown = on_a_terminal("pods", columns=80)
    assert "h100-sxm" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert max(map(len, run("pods").splitlines())) > 80  # in a file, as wide as it needs


@needs_plugin
@pytest.mark.pods
def test_a_terminal_shows_what_is_being_done():
    shown = on_a_terminal("explain", "tests.support.build_step", *POD, columns=80)
    assert "importing JAX" in shown and "tracing and partitioning" in shown
    assert max(map(len, (line for line in shown.splitlines() if "──" in line))) <= 80


def test_a_closed_pipe_is_no_error(tmp_path: Path):
    command = (
        f"{sys.executable} -m jaxoverlap flags gcp-a3-mega | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("141", "0")  # 0: all fitted into the pipe's buffer


def _children(process: int) -> list[int]:
    found = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, listed.read_text().split())
    return found


def _line(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return "(it has ended)"


def _runs(process: int) -> bool:
    """Return whether a process is there and is not one that has ended and was not waited for."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _interrupted_tuning(
    folder: Path, reached: Callable[[int], Any]
) -> tuple[int | None, str, str, Any]:
    """Press Ctrl-C in a tuning once `reached` of its process is true, and wait for its end.

    Returns:
        Its exit code, stdout and stderr, and what `reached` gave.
    """
    arguments = ("tune", "tests.support.build_step", *POD, "--cache", str(folder / "cache"))
    command = [sys.executable, "-m", "jaxoverlap", *arguments, "--out", str(folder / "p.json")]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
        # What a shell starts in the background ignores SIGINT, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as tuning:
        try:
            began = time.monotonic()  # on a busy machine it is minutes until a child runs
            while not (found := reached(tuning.pid)):
                assert tuning.poll() is None and time.monotonic() - began < 900
                time.sleep(0.02)
            tuning.send_signal(signal.SIGINT)
            stdout, stderr = tuning.communicate(timeout=60)  # it takes 3 s where cores are free
        finally:
            tuning.kill()  # or leaving the block waits for a tuning to end
    return tuning.returncode, stdout, stderr, found


@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("child", ["", "jaxoverlap._util.workers"])
def test_ctrl_c_ends_a_tuning_and_its_children(child: str, tmp_path: Path):
    """Whatever child is running: one that filters stderr, or one that compiles a candidate."""

    def children(tuning: int) -> list[int]:
        return [c for c in _children(tuning) if child in _line(c)]

    code, _, stderr, found = _interrupted_tuning(tmp_path, children)
    assert code == 130
    assert "interrupted" in stderr and "Traceback" not in stderr
    assert not [child for child in found if _runs(child)]
    if (out := tmp_path / "p.json").exists():  # a candidate was compiled before Ctrl-C
        Plan.read(out)  # raises if the file is not whole


@needs_plugin
@pytest.mark.pods
def test_ctrl_c_leaves_the_best_plan_so_far(tmp_path: Path):
    out = tmp_path / "p.json"
    code, printed, _, _ = _interrupted_tuning(tmp_path, lambda _: out.exists())
    assert code == 130 and "written to" not in printed
    plan = Plan.read(out)
    step, args = build_step.build(jaxoverlap.pod_mesh("h100-sxm:1x4", {"tp": 4}))
    followed = jaxoverlap.overlap(step, plan=out).lower(*args).plan
    assert followed is not None and followed.edits == plan.edits


_INTERRUPTED_WITH = """
import os, signal, sys, time
from jaxoverlap.cli.shell import interrupt

# A shell has its background jobs ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Held:
    def __del__(self):  # Python drops what is raised here, as in the garbage collector's callbacks
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

with interrupt.ends_on_interrupt("interrupted"):
    held = Held()
    del held
    while not interrupt.interrupted():
        time.sleep(0.001)
    {then}
"""


@pytest.mark.parametrize("then", ["sys.exit(1)", "raise OSError(32, 'Broken pipe')", "pass"])
def test_an_interrupted_command_s_exit_code_is_130_however_it_ends(then: str):
    program = _INTERRUPTED_WITH.format(then=then)
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("users", [None, "0"])
def test_xla_s_warnings_stay_out_unless_the_user_wants_them(users, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", users or "")
    if users is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    seen = []
    command = importlib.import_module("jaxoverlap.cli.app")
    level = "TF_CPP_MIN_LOG_LEVEL"
    monkeypatch.setattr(command, "app", lambda **_: seen.append(os.environ[level]))
    command.main()
    assert seen == [users or "2"]


# -- doctor, new-target, --as -----------------------------------------------------------------------


def test_doctor_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to='/my dir' --xla_nope=1")
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    wrong = {f["found"]: f["problem"] for f in found if f["problem"]}
    assert list(wrong) == ["--xla_nope=1"] and "rejected" in wrong["--xla_nope=1"]
    monkeypatch.setenv("XLA_FLAGS", "")
    found = run_json("doctor")
    assert {f["what"] for f in found} >= {"Python", "jax", "jaxlib", "devices", "processes"}


def test_plugins_that_clash_are_named():
    packages = {"jax": "0.12.0", "jax-cuda12-plugin": "0.12.0", "jax-cuda13-plugin": "0.11.2"}
    problems = [f.problem for f in plugins(packages) if f.problem]
    assert problems == [
        "plugins for cuda12 and cuda13 clash: uninstall those of one",
        "jax is 0.12.0: pip install 'jax-cuda13-plugin==0.12.0'",
    ]
    assert [f.problem for f in plugins({"jax": "0.12.0"})] == [""]
    assert not [f for f in plugins(installed()) if f.problem]


def test_why_a_plugin_cannot_start_is_a_line_and_no_traceback(caplog):
    log, failures = logging.Logger("plugins"), PluginFailures()
    log.addHandler(caplog.handler)
    log.addFilter(failures)
    try:
        raise RuntimeError("Unable to load cuDNN.\n  Is it installed?")
    except RuntimeError:
        log.exception("Jax plugin configuration error")
    log.error("something else")
    assert failures.found == ["Unable to load cuDNN. Is it installed?"]
    assert [record.message for record in caplog.records] == ["something else"]


@pytest.mark.rotating
@needs_plugin
@pytest.mark.pods
@pytest.mark.parametrize("style", some(1, list(Style)))
def test_a_new_target_is_explained_as_it_stands(style: str, tmp_path: Path):
    file = str(tmp_path / f"{style}_target.py")
    shown = run("new-target", file, "--style", style)
    assert f"jaxoverlap explain {file} --pod h100-sxm:8x8 --mesh data=16,model=4" in shown
    plan = run_json("explain", file, "--pod", "h100-sxm:8x8", "--mesh", "data=16,model=4")
    assert len(plan["entries"]) >= 16
    assert "exists already" in run("new-target", file, code=2)


def test_a_new_target_is_written_where_it_can_be(tmp_path: Path):
    assert "ends in .py" in run("new-target", str(tmp_path / "mine"), code=2)
    assert "there is no folder" in run("new-target", str(tmp_path / "no" / "mine.py"), code=2)
    refused = run("new-target", str(tmp_path / "mine.py"), "--style", "haiku", code=2)
    assert "'--style': 'haiku' is not one of 'plain', 'nnx', 'linen', 'equinox'" in refused


VALUES = {"XLA_FLAGS": "--xla_a=true --xla_b=x,y", "NCCL_X": 'it\'s $HOME "q"'}


def test_an_sbatch_script_has_the_clusters_sizes_and_shell_quotes():
    text = written(VALUES, "slurm", "h100-sxm:4x8/8")
    assert "--nodes=4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n" in text
    shell = text.replace("srun --kill-on-bad-exit=1 python train.py", "printenv NCCL_X XLA_FLAGS")
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [VALUES["NCCL_X"], VALUES["XLA_FLAGS"]]
    assert "--nodes=HOSTS" in written(VALUES, "slurm")


def test_a_containers_env_is_yaml_and_an_images_is_quoted():
    yaml = pytest.importorskip("yaml")
    read = yaml.safe_load(written(VALUES, "k8s"))["env"]
    assert {one["name"]: one["value"] for one in read} == VALUES
    image = written(VALUES, "dockerfile").splitlines()
    assert image[0] == 'ENV XLA_FLAGS="--xla_a=true --xla_b=x,y"'
    assert image[1] == 'ENV NCCL_X="it\'s \\$HOME \\"q\\""'


def test_presets_come_in_every_form():
    for form in ("slurm", "k8s", "dockerfile"):
        shown = run("flags", "gcp-a3-mega", "--as", form)
        assert "XLA_FLAGS" in shown
        assert all(name in shown for name in preset("gcp-a3-mega").variables)
    assert "--nodes=8" in run("flags", "h100-sxm:8x8", "--as", "slurm")


def test_a_flag_behind_a_value_with_a_space_is_checked():
    line = "--xla_dump_to='/my dir' --xla_nope=1"
    done = CliRunner().invoke(app, ["flags", "--check", line, "--json"])
    status = {f["text"]: f["status"] for f in json.loads(done.stdout)["findings"]}
    assert status == {"--xla_dump_to='/my dir'": "set", "--xla_nope=1": "rejected"}
