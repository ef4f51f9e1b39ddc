"""Shell scripts of `configs/`, those within manifests too: shellcheck's rules, and options that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from slagate.router.commands import cli
from support.repository.manifests import FOLDER, named, objects

SLURM = FOLDER.parent / "slurm"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def scripts() -> dict[str, str]:
    """Every script, by a name of its own."""
    found = {path.name: path.read_text() for path in sorted(SLURM.iterdir())}
    for file, name in (
        ("deepseek-r1/pools.yaml", "multinode-launch"),
        ("model-cache/pvc.yaml", "fill-models"),
    ):
        data = named(list(objects(FOLDER / file)), "ConfigMap", name)["data"]
        found |= {name: text for name, text in data.items() if name.endswith(".sh")}
    return found


@pytest.mark.parametrize("name", scripts())
def test_shellcheck_finds_nothing(name: str) -> None:
    done = subprocess.run(
        [str(SHELLCHECK), "--severity=style", "-"],
        input=scripts()[name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("name", scripts())
def test_a_script_gives_up_at_the_first_error(name: str) -> None:
    text = scripts()[name]
    assert text.startswith("#!/usr/bin/env bash\n")
    first = next(line for line in text.splitlines() if line and not line.startswith("#"))
    assert first == "set -euo pipefail"


def options_of(command: str) -> set[str]:
    """Those of a command; of `worker` those that both engines have."""
    found: Any = typer.main.get_command(cli)
    found = found.get_command(None, command)
    commands = (
        [found.commands[name] for name in ("sim", "trtllm")] if command == "worker" else [found]
    )
    return set.intersection(
        *({option for each in one.params for option in each.opts} for one in commands)
    )


def slagate_calls(text: str) -> list[tuple[str, set[str]]]:
    """Commands of ours that a script runs, with their options."""
    joined = text.replace("\\\n", " ")
    return [
        (call[1], set(re.findall(r"(?<!\S)--[a-z-]+", call[2])))
        for call in re.finditer(r"\bslagate (\w+)\b([^\n]*)", joined)
        if call[1] in ("serve", "worker", "bench")
    ]


def test_options_of_our_commands_exist() -> None:
    calls = [call for text in scripts().values() for call in slagate_calls(text)]
    assert {name for name, _ in calls} == {"serve", "worker", "bench"}
    for name, options in calls:
        assert options <= options_of(name)


def test_an_option_that_does_not_exist_is_found() -> None:
    ((name, options),) = slagate_calls("exec slagate serve --config a \\\n  --no-such b\n")
    assert (name, options) == ("serve", {"--config", "--no-such"})
    assert not options <= options_of(name)


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.name)
def test_a_job_asks_for_cpus(path: Path) -> None:
    """Slurm gives a task one CPU where nobody asks for more."""
    assert re.search(r"^#SBATCH --cpus-per-task=\d+$", path.read_text(), re.MULTILINE)


def steps(folder: Path, **environment: str) -> list[str]:
    """The options of the step that `pool.sbatch` starts, submitted from `folder`."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    done = subprocess.run(
        ["bash", str(SLURM / "pool.sbatch"), "--extra-engine-args", "prefill.yaml"],
        cwd=folder,
        env={"PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder)}
        | {"RUN_DIR": str(folder / "run"), "POOL": "p", "SLURM_NTASKS": "1"}
        | {"SLURM_CPUS_PER_TASK": "8"}
        | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_step_has_the_cpus_of_its_job(tmp_path: Path) -> None:
    given = steps(tmp_path)
    assert "--cpus-per-task=8" in given
    assert not any(option.startswith("--container") for option in given)


def test_a_container_begins_where_relative_paths_are_meant_from(tmp_path: Path) -> None:
    given = steps(tmp_path, CONTAINER_IMAGE="image.sqsh", CONTAINER_MOUNTS="/a:/a", SCRIPTS="tools")
    assert f"--container-workdir={tmp_path}" in given
    (mounts,) = (option for option in given if option.startswith("--container-mounts="))
    assert set(mounts.partition("=")[2].split(",")) == {
        "/a:/a",
        *(f"{path}:{path}" for path in (tmp_path, tmp_path / "run", tmp_path / "tools")),
    }
    assert given[given.index("bash") + 1] == f"{tmp_path}/tools/rank0.sh"
