"""What a newcomer gets wrong: each mistake is answered with what to do, the right status, no traceback.

2 is a wrong use, found before anything is done; 1 is work that failed. What needs a fleet is in
tests/e2e/test_newcomer.py, stdout and Ctrl-C in test_output.py.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from slagate.router.commands import cli
from support.gateway.processes import run_here

FLEET = "configs/grids/two-workers.json"
GRID = "configs/grids/example-disagg.json"
SERVE = f"serve --config {FLEET} --admin 127.0.0.1:0 --http 127.0.0.1:0 --worker-insecure"
WORKER = "worker sim --role agg --insecure"
NOBODY = "--insecure --target 127.0.0.1:9"

FILES: dict[str, bytes] = {
    "empty.json": b"",
    "broken.json": b'{"mode": "disagg",\n "num_prefill_pools": 1,\n}',
    "list.json": b"[1, 2]",
    "utf16.json": "{}".encode("utf-16"),
    "broken.yaml": b"a: [1",
    "typo.yaml": b"max_batch_siz: 3",
    "spec.json": b'{"prefill": {"pools": []}, "decode": {"pools": []}}',
    "short.key": b"secret",
    "no.pem": b"not a certificate",
}

MISTAKES: list[tuple[str, int, str]] = [
    # commands and options
    ("serv", 2, "No such command 'serv'. Did you mean 'serve'?"),
    ("grid lnt", 2, "No such command 'lnt'. Did you mean 'lint'?"),
    (f"{WORKER} --listn 127.0.0.1:0", 2, "No such option: --listn"),
    ("serve --listen 127.0.0.1:0", 2, "Missing option '--config'."),
    (WORKER, 2, "Missing option '--listen'."),
    ("worker sim --listen 127.0.0.1:0 --insecure", 2, "Missing option '--role'."),
    ("worker --engine sim --role agg", 2, "slagate worker sim OPTIONS, or slagate worker trtllm OPTI"),
    ("worker --role agg check", 2, "--role: options come after the engine, which is a command:"),
    (f"{WORKER} --listen 127.0.0.1:0 --role both", 2, "--role must be one of prefill, decode, agg"),
    (f"{WORKER} --listen 127.0.0.1:0 --tp 0", 2, "Invalid value for '--tp'"),
    (f"{WORKER} --listen 127.0.0.1:0 --tp 3", 2, "no tensor-parallel size 3; available: 1, 2, 4"),
    (f"{WORKER} --listen 127.0.0.1:0 --profile llama", 2, "available: llama-3.1-8b-h100, qwen3"),
    (f"{WORKER} --listen 127.0.0.1:0 --drain nan", 2, "Invalid value for '--drain'"),
    (f"{WORKER} --listen 127.0.0.1:0 --kv-block-size 64", 2, "No such option: --kv-block-size"),
    (f"{WORKER} --listen 127.0.0.1:0 --log-level loud", 2, "must be debug, info, warning or error"),
    ("worker trtllm --role agg", 2, "needs tensorrt_llm, which is not installed: pip install"),
    # addresses
    (f"{WORKER} --listen localhost", 2, "'localhost' is not host:port, as in 127.0.0.1:7000"),
    (f"{WORKER} --listen ::1:7000", 2, "'::1:7000' has an IPv6 host without brackets"),
    (f"{WORKER} --listen 127.0.0.1:70000", 2, "'127.0.0.1:70000' has no port from 0 to 65535"),
    (f"{WORKER} --listen {{taken}}", 2, "--listen: cannot listen on {taken}: Address already in use"),
    (f"{WORKER} --listen 127.0.0.1:0 --metrics-listen {{taken}}", 2, "--metrics-listen: cannot listen"),
    (f"{WORKER} --listen {{taken}} --metrics-listen {{taken}}", 2, "--metrics-listen are both {taken}"),
    (f"{SERVE} --insecure --listen {{taken}} --admin {{taken}}", 2, "--admin are both {taken}"),
    (f"{SERVE} --insecure --listen {{taken}}", 2, "--listen: cannot listen on {taken}"),
    ("pools --insecure --target localhost", 2, "Invalid value for '--target': 'localhost' is not"),
    ("pools --insecure --target http://127.0.0.1:7009", 2, "which has no scheme and no path"),
    ("explain --insecure --target 127.0.0.1:0 --isl 5", 2, "has port 0, which is for who listens"),
    ("bench --insecure --target 127.0.0.1:9 --admin localhost", 2, "Invalid value for '--admin'"),
    ("profile measure --insecure --target a:9 --decode b --out {tmp}/p", 2, "value for '--decode'"),
    (f"{SERVE} --listen 127.0.0.1:0 --insecure --pool decode=127.0.0.1", 2, "must be host:port with"),
    (f"{SERVE} --listen 127.0.0.1:0 --insecure --pool 127.0.0.1:1", 2, "must be NAME=HOST:PORT,..."),
    (f"{SERVE} --listen 127.0.0.1:0 --insecure --pool decod=a:1", 2, "is not one of the pools pre"),
    (f"pools {NOBODY}", 1, "Connection refused; it should be the gateway's admin listener"),
    (f"generate --isl 5 {NOBODY}", 1, "it should be a gateway's or a worker's listener for clients"),
    ("pools --insecure --target no.such.host.invalid:7009", 1, "cannot connect to no.such.host"),
    (f"bench {NOBODY} --wait 0.1", 1, "cannot connect to 127.0.0.1:9: Connection refused"),
    # TLS
    ("pools --target 127.0.0.1:9", 2, "to call a server, give --tls-ca"),
    (f"{SERVE} --listen 127.0.0.1:0", 2, "to listen, give --tls-cert and --tls-key"),
    ("worker sim --role agg --listen 127.0.0.1:0", 2, "or --insecure for plaintext"),
    (f"pools {NOBODY} --tls-ca {{tmp}}/no.pem", 2, "--insecure is plaintext: give no --tls-ca with it"),
    ("pools --target 127.0.0.1:9 --tls-ca {tmp}/gone.pem", 2, "gone.pem: No such file or directory"),
    ("pools --target 127.0.0.1:9 --tls-ca {tmp}/no.pem", 2, "no.pem has no certificate (PEM)"),
    (f"{WORKER[:-11]} --listen 127.0.0.1:0 --tls-cert {{tmp}}/no.pem", 2, "--tls-cert needs --tls-key"),
    (f"{WORKER} --listen 127.0.0.1:0 --handoff-key-file {{tmp}}/short.key", 2, "16 are needed"),
    # files
    ("grid lint {tmp}/gone.json", 2, "$: cannot be read: No such file or directory"),
    ("grid lint {tmp}", 2, "$: cannot be read: Is a directory"),
    ("grid lint {tmp}/empty.json", 2, "$: is empty"),
    ("grid lint {tmp}/broken.json", 2, "a comma before a closing bracket (take it out), from line 2"),
    ("grid lint {tmp}/list.json", 2, "$: must be an object (got [1, 2])"),
    ("grid lint {tmp}/utf16.json", 2, "$: cannot be read: save it as UTF-8"),
    ("grid lint {tmp}/spec.json", 2, "$: looks like a spec, of which slagate grid build makes"),
    (f"grid build {FLEET}", 2, "$: looks like a fleet file, which is what is made of a spec"),
    (f"grid lint --ignore G9 {GRID}", 2, "--ignore must be a code of docs/lint.md, such as G"),
    (f"grid select --stage agg {GRID}", 2, "--stage must be one of prefill, decode in this file"),
    ("grid show", 2, "give a CONFIG, or --target for that of a running gateway"),
    (f"grid show {GRID} --svg {{tmp}}/gone/x.svg", 2, "x.svg: cannot be written: No such file"),
    ("serve --config configs/grids/demo.json --listen 127.0.0.1:0 --admin 127.0.0.1:0"
     " --http 127.0.0.1:0 --insecure --worker-insecure", 2, "pools.decode-tp1.workers: must not be"),
    ("worker check --role agg --extra-engine-args {tmp}/broken.yaml", 2, "line 1: is not YAML"),
    ("worker check --role agg --extra-engine-args {tmp}/typo.yaml", 0, "did you mean max_batch_size?"),
    ("worker check --role agg --extra-engine-args qwen/agg", 2, "qwen3/agg"),
    ("worker check --role agg", 2, "--extra-engine-args is missing"),
    ("recompute {tmp}/gone.jsonl", 2, "gone.jsonl: No such file or directory"),
    ("recompute {tmp}/empty.json", 2, "line 1: there is none, the file is empty"),
    (f"reload {NOBODY} --config {{tmp}}/gone.json", 2, "gone.json: No such file or directory"),
    (f"admission onn {NOBODY}", 2, "MODE must be one of off, shadow, on (got 'onn')"),
    (f"admission on {NOBODY}", 1, "Connection refused; it should be the gateway's admin listener"),
    (f"admission {NOBODY}", 1, "Connection refused; it should be the gateway's admin listener"),
    ("admission on --target 127.0.0.1:9", 2, "to call a server, give --tls-ca"),
    (f"profile measure {NOBODY} --out {{tmp}}/gone/x", 2, "--out {tmp}/gone/x: cannot be written"),
    ("demo --out {tmp}/short.key/demo.json --requests 1", 2, "short.key: "),
    # requests
    (f"generate {NOBODY}", 2, "give either --tokens or --isl"),
    (f"generate {NOBODY} --tokens hello", 2, "--tokens: 'hello' is not a token id"),
    (f"generate {NOBODY} --tokens @{{tmp}}/gone", 2, "gone: No such file or directory"),
    (f"generate {NOBODY} --isl 5 --timeout nan", 2, "Invalid value for '--timeout'"),
    (f"generate {NOBODY} --isl 5 --max-tokens -1", 2, "Invalid value for '--max-tokens'"),
    (f"generate {NOBODY} --isl 5 --max-tokens {2**32}", 2, "Invalid value for '--max-tokens'"),
    (f"bench {NOBODY} --ttft-ms nan", 2, "Invalid value for '--ttft-ms'"),
    (f"generate {NOBODY} --isl 5 --ttft-ms nan", 2, "Invalid value for '--ttft-ms'"),
    (f"generate {NOBODY} --isl 5 --itl-ms -5", 2, "Invalid value for '--itl-ms'"),
    (f"explain {NOBODY} --isl 5 --priority high", 2, "Invalid value for '--priority'"),
    (f"generate {NOBODY} --isl 99999999", 2, "Invalid value for '--isl'"),
    (f"grid show {FLEET} --png {{tmp}}/x.svg", 2, "has the name of another kind of picture"),
    ("grid build {tmp}/spec.json --out {tmp}/spec.json", 2, "is the spec, which it would replace"),
    (f"bench {NOBODY} --concurrency 0", 2, "--concurrency must be whole numbers from 1 on"),
    (f"bench {NOBODY} --concurrency 8 --requests 2", 2, "are too few for 8 at once"),
    (f"bench {NOBODY} --plot x.jpg", 2, "--plot x.jpg: must end in .png or .svg"),
    (f"bench {NOBODY} --csv {{tmp}}/gone/x.csv", 2, "x.csv: cannot be written: No such file"),
    (f"bench {NOBODY} --trace {{tmp}}/empty.json", 2, "empty.json: holds no request"),
]  # fmt: skip


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(("typed", "status", "told"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_told(
    typed: str,
    status: int,
    told: str,
    taken: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(pytestconfig.rootpath)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    places = {"taken": taken, "tmp": tmp_path}
    done = run_here(*typed.format(**places).split())
    said = " ".join((done.stdout + done.stderr).split())
    assert told.format(**places) in said
    assert done.returncode == status
    assert "Traceback" not in said


def numbers(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every option of every command that is a number with a fraction."""
    for option in command.params:
        kind = getattr(option, "type_descriptor", None) or option.type
        if "float" in str(getattr(kind, "annotation", kind)).lower():
            yield path, option.opts[0]
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from numbers((*path, name), command.get_command(None, name))


NUMBERS = list(numbers((), get_command(cli)))


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "x"])
@pytest.mark.parametrize(("path", "option"), NUMBERS, ids=lambda value: "-".join([*value][:2]))
def test_what_is_no_number_is_refused_by_the_option(
    path: tuple[str, ...], option: str, text: str
) -> None:
    done = run_here(*path, option, text)
    assert done.returncode == 2
    assert f"Invalid value for '{option}'" in done.stderr


def test_there_are_numbers() -> None:
    assert len(NUMBERS) > 20
