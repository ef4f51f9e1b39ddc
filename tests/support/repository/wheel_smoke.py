"""Builds the wheel, installs it in a fresh virtual environment and runs the demo from there.

    python tests/support/repository/wheel_smoke.py

An editable install finds every file of the repository, a wheel only what pyproject.toml lists; this
is the one check that sees a forgotten file before a user does. Needs a package index for the
dependencies. Leaves nothing behind.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = ("configs", "proto", "workers", "pools", "router")

# A net under a hang, not a limit on the work: every step is expected to end far sooner.
STEP_LIMIT_S = 600


def run(command: list[str | Path], cwd: Path, *, status: int = 0) -> str:
    """Output of a command; exits with its output unless it ends with `status`.

    The command leads a process group, so that a hang takes the processes it started down with it.
    """
    inherited = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}  # the caller's packages must not help
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key not in inherited},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    shown = " ".join(map(str, command))
    try:
        output, _ = process.communicate(timeout=STEP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise SystemExit(f"no end after {STEP_LIMIT_S} s: {shown}\n{output}") from None
    if process.returncode != status:
        raise SystemExit(f"exit code {process.returncode}: {shown}\n{output}")
    return output


def known_files() -> list[str]:
    """Paths in the working tree that git tracks or would track, relative to the repository."""
    listed = run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], REPOSITORY
    )
    return [path for path in listed.split("\0") if path and (REPOSITORY / path).is_file()]


def copy_tree(files: list[str], target: Path) -> None:
    """Copies the known files only: a build ships whatever else lies in the folders."""
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / path, target / path)


def build_wheel(source: Path, target: Path) -> Path:
    run([sys.executable, "-m", "build", "--wheel", "--outdir", target, source], source)
    (wheel,) = target.glob("*.whl")
    return wheel


def check_contents(wheel: Path, files: list[str]) -> int:
    """Number of files shipped; exits unless they are exactly the known files of the packages."""
    wanted = {f"slagate/{path}" for path in files if path.split("/")[0] in PACKAGES}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    problems = [f"not in the wheel: {name}" for name in sorted(wanted - shipped)]
    problems += [f"only in the wheel: {name}" for name in sorted(shipped - wanted)]
    if problems:
        raise SystemExit("\n".join([*problems, "see [tool.hatch.build] in pyproject.toml"]))
    return len(shipped)


def install(wheel: Path, environment: Path) -> Path:
    """The folder of the commands of a new virtual environment that holds the wheel."""
    run([sys.executable, "-m", "venv", environment], environment.parent)
    commands = environment / "bin"
    run([commands / "python", "-m", "pip", "install", "--quiet", wheel], environment.parent)
    return commands


def check_rooms(commands: Path, empty: Path, files: list[str]) -> int:
    """Imports a module of each folder of code and reads a file of data; how many folders there are."""
    modules: dict[str, str] = {}
    for path in sorted(files):
        folder, _, name = path.rpartition("/")
        is_code = folder.split("/")[0] in PACKAGES and name.endswith(".py") and "_pb2" not in name
        # A folder's own page comes first: any other module of it is better.
        if is_code and (name != "__init__.py" or folder not in modules):
            modules[folder] = path.removesuffix(".py").replace("/", ".")
    lines = [f"import slagate.{module}".removesuffix(".__init__") for module in modules.values()]
    lines += ["from importlib.resources import files", "files('slagate.configs')"]
    lines[-1] += ".joinpath('kubernetes', 'gateway.yaml').read_text()"
    run([commands / "python", "-I", "-c", "\n".join(lines)], empty)
    return len(modules)


def check_commands(commands: Path, empty: Path) -> None:
    """Runs what needs no gateway, with the data of the package and with no extra installed."""
    slagate = commands / "slagate"
    for words in ("--help", "reload --help", "profile --help"):
        run([slagate, *words.split()], empty)
    json.loads(run([slagate, "grid", "schema"], empty))
    where = "import slagate.configs as c; print(*c.__path__)"
    configs = Path(run([commands / "python", "-c", where], empty).strip())
    fleet = configs / "grids" / "two-workers.json"
    run([slagate, "grid", "lint", fleet], empty)
    run([slagate, "grid", "show", fleet], empty)
    refused = run([slagate, "grid", "show", fleet, "--svg", "x"], empty, status=2)
    if "slagate[plots]" not in refused:
        raise SystemExit(f"without matplotlib, grid show --svg does not name its extra:\n{refused}")


def check_demo(commands: Path, empty: Path) -> None:
    """Runs the demo in an empty folder outside the repository and reads the report it leaves."""
    run([commands / "slagate", "demo", "--requests", "5"], empty)
    path = empty / "build" / "demo.json"
    if not path.is_file():
        raise SystemExit("slagate demo left no build/demo.json in its working folder")
    report = json.loads(path.read_text())
    if report.get("failed") != 0:
        raise SystemExit(f"build/demo.json: failed is {report.get('failed')!r}, not 0")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="slagate-wheel-") as scratch:
        source, dist, empty = (Path(scratch) / name for name in ("source", "dist", "empty"))
        empty.mkdir()
        files = known_files()
        copy_tree(files, source)
        wheel = build_wheel(source, dist)
        print(f"wheel: built {wheel.name}", flush=True)
        print(f"wheel: {check_contents(wheel, files)} files, none forgotten", flush=True)
        commands = install(wheel, Path(scratch) / "venv")
        print("wheel: installed in a fresh environment", flush=True)
        print(
            f"wheel: a module of each of {check_rooms(commands, empty, files)} folders opens",
            flush=True,
        )
        check_commands(commands, empty)
        print("wheel: the commands work without a gateway and without extras", flush=True)
        check_demo(commands, empty)
        print("wheel: slagate demo --requests 5 works", flush=True)


if __name__ == "__main__":
    main()
