"""Generates the Python code of every proto/*.proto, or checks that the committed code is fresh.

    python tests/support/repository/protogen.py            rewrite proto/*_pb2*
    python tests/support/repository/protogen.py --check    exit 1 and name each file that differs

protoc sees the folder proto/ under the virtual path slagate/proto, so that the generated imports
read `from slagate.proto import ...` and need no editing afterwards
(docs/decisions/0002-generated-protobuf.md).
"""

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PROTO_DIR = REPOSITORY / "proto"

# Generated code refuses a runtime older than its generator, and worker images bring their own
# protobuf and grpcio. grpcio-tools 1.71.2 emits 5.29 code, which runs on every protobuf from 5.29
# to 7 and every grpcio from 1.71; a newer generator locks the older images out. mypy-protobuf 5.1.0
# installs beside it but crashes on its protobuf, 3.7.0 runs.
PINNED = {"grpcio-tools": "1.71.2", "mypy-protobuf": "3.7.0"}

SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def require_pinned() -> None:
    """Exits unless the generator and its stub plug-in have exactly the pinned versions."""
    for name, wanted in PINNED.items():
        found = importlib.metadata.version(name)
        if found != wanted:
            raise SystemExit(f"{name} is {found}, generation needs {wanted}: run `make dev`")


def generate_into(folder: Path) -> None:
    """Writes the generated code of every proto/*.proto into `folder`, which has to exist."""
    sources = sorted(PROTO_DIR.glob("*.proto"))
    if not sources:
        raise SystemExit(f"no .proto file in {PROTO_DIR}")
    # protoc looks its stub plug-ins up on PATH; a virtual environment need not be activated.
    bin_dir = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([bin_dir, os.environ.get("PATH", "")])}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "grpc_tools.protoc", "-Islagate/proto=proto"]
        for plugin in ("python", "grpc_python", "mypy", "mypy_grpc"):
            command.append(f"--{plugin}_out={scratch}")
        command += [str(path.relative_to(REPOSITORY)) for path in sources]
        done = subprocess.run(  # output is shown only on failure: the plug-ins list every file
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"protoc failed:\n{done.stderr}")
        for path in (Path(scratch) / "slagate" / "proto").iterdir():
            shutil.copyfile(path, folder / path.name)


def generated_files(folder: Path) -> dict[str, bytes]:
    """File name -> content of the generated code in `folder`."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name.endswith(SUFFIXES)
    }


def differences(committed: dict[str, bytes], fresh: dict[str, bytes]) -> list[str]:
    """One line for each file that is stale, missing or extra in `committed`; empty when equal."""
    lines = []
    for name in sorted(committed.keys() | fresh.keys()):
        if name not in committed:
            lines.append(f"missing: proto/{name}")
        elif name not in fresh:
            lines.append(f"extra: proto/{name}")
        elif committed[name] != fresh[name]:
            lines.append(f"stale: proto/{name}")
    return lines


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Generate the Python code of proto/*.proto.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing, exit 1 on a difference"
    )
    options = parser.parse_args(arguments)
    require_pinned()
    with tempfile.TemporaryDirectory() as scratch:
        generate_into(Path(scratch))
        fresh = generated_files(Path(scratch))
    committed = generated_files(PROTO_DIR)
    if options.check:
        lines = differences(committed, fresh)
        if lines:
            raise SystemExit("\n".join([*lines, "run `make proto` and commit the result"]))
        print(f"proto: {len(fresh)} generated files are fresh")
        return
    for name in committed.keys() - fresh.keys():
        (PROTO_DIR / name).unlink()
    for name, content in fresh.items():
        (PROTO_DIR / name).write_bytes(content)
    print(f"proto: wrote {len(fresh)} files")


if __name__ == "__main__":
    main(sys.argv[1:])
