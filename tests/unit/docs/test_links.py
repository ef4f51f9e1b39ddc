"""The pages for people: their links lead somewhere, and README.md leads to all of them."""

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGES = {
    str(path.relative_to(REPOSITORY)): path
    for path in (
        REPOSITORY / "README.md",
        REPOSITORY / "ARCHITECTURE.md",
        REPOSITORY / "tests" / "README.md",
        *sorted((REPOSITORY / "docs").rglob("*.md")),
    )
}


def links_of(page: str) -> list[str]:
    """Targets of the links of a page that lead to other files, without what is in code blocks."""
    prose = re.sub(r"^```.*?^```", "", PAGES[page].read_text(), flags=re.MULTILINE | re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


def anchors_of(text: str) -> set[str]:
    """The anchors that a forge gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    for target in links_of(page):
        name, _, anchor = target.partition("#")
        file = (PAGES[page].parent / name) if name else PAGES[page]
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file.read_text()), target


def test_readme_links_every_page() -> None:
    linked = {target.partition("#")[0] for target in links_of("README.md")}
    wanted = {page for page in PAGES if not page.startswith("docs/decisions/")} - {"README.md"}
    assert wanted <= linked, wanted - linked
    assert "docs/decisions" in linked


def names_in(file: Path) -> set[str]:
    """Every function and class that a module defines, at any depth."""
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, definitions)}


def test_the_path_of_a_request_names_what_is_in_its_files() -> None:
    """`file.py` (`name`, `name`) in ARCHITECTURE.md."""
    text = PAGES["ARCHITECTURE.md"].read_text()
    named = re.findall(r"`([\w/]+\.py)`\s+\((`[^)]*)\)", text)
    assert len(named) > 30
    for path, names in named:
        wanted = set(re.findall(r"`(\w+)`", names))
        assert wanted <= names_in(REPOSITORY / path), (path, wanted)


def test_the_tests_that_show_the_invariants_exist() -> None:
    text = PAGES["ARCHITECTURE.md"].read_text()
    rows = re.findall(r"^\| (I\d) \| .* \| `([\w/]+\.py)` \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [f"I{n}" for n in range(1, 10)]
    assert [path for _, path in rows if not (REPOSITORY / "tests" / path).exists()] == []


def test_the_glossary_names_files_and_words_that_exist() -> None:
    text = PAGES["docs/glossary.md"].read_text()
    rows = re.findall(r"^\| ([^|]+) \| .* \| `([\w/.]+)`(?: \(`(\w+)`\))? \|$", text, re.MULTILINE)
    assert len(rows) > 50
    for term, path, name in rows:
        assert (REPOSITORY / path).exists(), term
        assert not name or name in (REPOSITORY / path).read_text(), (term, name)
