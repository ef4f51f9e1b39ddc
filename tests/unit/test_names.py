"""Names and docstrings of the product: what a reader with grep finds, and what docstrings say."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("configs", "proto", "workers", "pools", "router")

BARE = frozenset(["end", "add", "close", "take", "begin", "over", "left", "hold", "told", "let_go"])
"""Verbs that say nothing without an object: `end_stream` is found, `end` has twenty targets."""

CLOSED = {
    "H2Connection": "a socket",
    "ConnectionPool": "its sockets",
    "WorkerClient": "its sockets",
    "ControlChannel": "a gRPC channel",
    "Front": "its clients' sockets",
    "SharedCounts": "a mapped file",
    "KvTransport": "memory that others can reach, in each transport",
    "SharedMemoryTransport": "shared memory",
    "MemoryTransport": "memory that others of its process can reach",
    "NixlTransport": "registered memory and its agent",
    "NixlAgent": "an agent of NIXL",
}
"""Classes whose `close` closes a real resource, and which."""

BANNED = re.compile(
    r"(^|_)(managers?|helpers?|utils?|commons?|base|data|info|process|handles?)(_|$)"
)
GIVEN = {
    "data_received": "asyncio's protocols",
    "data": "HTTP/2's DATA frame",
    "handle_error": "socketserver's",
    "handle_invalid_for_json_schema": "pydantic's",
    "server_info": "OpenEngine's ServerInfo",
    "model_info": "OpenEngine's ModelInfo",
    "load_info": "OpenEngine's LoadInfo",
    "token_info": "OpenEngine's TokenInfo",
    "set_server_info": "OpenEngine's ServerInfo",
    "GetServerInfo": "a method of OpenEngine",
    "GetModelInfo": "a method of OpenEngine",
    "base_pool": "a field of gateway.proto",
    "CancelHandle": "as asyncio's Handle and TimerHandle",
    "ChildProcess": "a process of the operating system",
    "ProcessSlot": "a process of the operating system",
}
"""Names with such a word that a protocol or the field gives."""

MOST_LINES = 60
LONG = {
    ("router/cli/tools/replay.py", "replay"): "the options of a command, one line each",
    ("router/cli/worker/run.py", "trtllm"): "the options of a command, one line each",
}
"""Functions of more lines, and why."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())


TREES = dict(modules())


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, node in classes():
        places[node.name].append(path)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_method_is_a_bare_verb() -> None:
    found = {
        (path, node.name, each.name)
        for path, node in classes()
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name in BARE
    }
    closing = {(name, verb) for _, name, verb in found if verb == "close"}
    assert closing == {(name, "close") for name in CLOSED}
    assert {each for each in found if each[2] != "close"} == set()


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_no_name_has_a_word_that_says_nothing() -> None:
    names = {node.name for _, node in [*classes(), *functions()]}
    names |= {Path(path).stem for path in TREES}
    assert {name for name in names if BANNED.search(snake(name))} == GIVEN.keys()


@pytest.mark.parametrize("name", ["BaseGrid", "get_info", "FleetManager", "process", "_handle"])
def test_such_a_word_is_found(name: str) -> None:
    assert BANNED.search(snake(name))


def test_no_docstring_only_points_elsewhere() -> None:
    pointers = [
        (path, node.name)
        for path, node in functions()
        if re.match(r"As `[\w.]+`", ast.get_docstring(node) or "")
    ]
    assert pointers == []


def test_long_functions_have_a_reason() -> None:
    long = {
        (path, node.name)
        for path, node in functions()
        if (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    }
    assert long == LONG.keys()
    assert len(LONG) <= 5
