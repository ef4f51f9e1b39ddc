"""What editors make of the sources: every import of ours leads to a file of the repository.

Without any configuration, from a file outside the repository: what helps is the environment alone, as for
somebody who has just run `make dev` and selected its Python.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "workers", "pools", "router")


def rparted(module: str) -> tuple[str, str, str]:
    """`import a.b.c` finds what `from a.b import c` does."""
    return module.rpartition(".")


def our_imports() -> list[tuple[str, str]]:
    """Module and name of each import of slagate in the product's code."""
    found = set()
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slagate."):
                    found |= {(str(node.module), alias.name) for alias in node.names}
                elif isinstance(node, ast.Import):
                    dotted = [each.name for each in node.names if each.name.startswith("slagate.")]
                    found |= {(package, name) for package, _, name in map(rparted, dotted)}
    return sorted(found)


IMPORTS = our_imports()


def written(imports: list[tuple[str, str]], folder: Path) -> Path:
    """A file with an import on each line."""
    file = folder / "imports.py"
    lines = [f"from {module} import {name} as _{i}" for i, (module, name) in enumerate(imports)]
    file.write_text("\n".join(lines) + "\n")
    return file


def unresolved_by_pyright(imports: list[tuple[str, str]], folder: Path) -> list[str]:
    """What pyright says of those it cannot resolve."""
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    ended = subprocess.run(
        [*command, written(imports, folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    said = json.loads(ended.stdout)
    assert said["summary"]["filesAnalyzed"] == 1, ended.stderr
    rules = {"reportMissingImports", "reportAttributeAccessIssue"}
    return [each["message"] for each in said["generalDiagnostics"] if each.get("rule") in rules]


def unresolved_by_jedi(imports: list[tuple[str, str]], folder: Path) -> list[str]:
    """Those from which jedi's "go to definition" leads to no file of the repository."""
    file = written(imports, folder)
    script = jedi.Script(path=file, project=jedi.Project(folder, environment_path=sys.prefix))
    unresolved = []
    for line, (module, name) in enumerate(imports, 1):
        found = script.goto(line, len(f"from {module} import "), follow_imports=True)
        files = [Path(each.module_path).resolve() for each in found if each.module_path]
        if not any(path.is_relative_to(REPOSITORY) for path in files):
            unresolved.append(f"{module}.{name}")
    return unresolved


def test_there_are_as_many_imports_as_one_would_think() -> None:
    assert len(IMPORTS) > 1000


def test_pyright_resolves_every_import(tmp_path: Path) -> None:
    assert unresolved_by_pyright(IMPORTS, tmp_path) == []


def test_jedi_resolves_an_import_of_every_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of each: what jedi may not find is the module, and it reads a whole module for each name."""
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path / "cache"))
    one_of_each = list({module: (module, name) for module, name in IMPORTS}.values())
    assert unresolved_by_jedi(one_of_each, tmp_path) == []


def test_both_count_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path / "cache"))
    gone = [("slagate.router.valve", "Valve"), ("slagate.router.app", "Nothing")]
    assert len(unresolved_by_pyright(gone, tmp_path)) == 2
    assert len(unresolved_by_jedi(gone, tmp_path)) == 2
