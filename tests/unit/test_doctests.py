import doctest
import importlib

import pytest

MODULES = ("slagate.router.sla", "slagate.router.client_cli", "slagate.workers.listen")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
