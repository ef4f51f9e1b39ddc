import doctest
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(("slagate", *path.relative_to(REPOSITORY).with_suffix("").parts))
    for package in ("proto", "workers", "pools", "router")
    for path in (REPOSITORY / package).rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


def test_the_modules_with_examples_are_found() -> None:
    assert {
        "slagate.router.request.sla",
        "slagate.router.cli.client",
        "slagate.proto.rpc.address",
    } <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
