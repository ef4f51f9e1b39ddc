"""That `docs/cases.md` is true: every case is there, and in every file it names."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
IDS = [
    *(f"CFG-{n:02}" for n in range(1, 12)),
    *(f"KV-{n:02}" for n in range(1, 20)),
    *(f"SCORE-{n:02}" for n in range(1, 12)),
    *(f"STREAM-{n:02}" for n in range(1, 10)),
    *(f"MEM-{n:02}" for n in range(1, 11)),
    *(f"OPS-{n:02}" for n in range(1, 8)),
    *(f"ENGINE-{n:02}" for n in range(1, 11)),
    "PEER-02",
]
NOT_OURS = {"STREAM-04", "MEM-03"}
"""About something that slagate does not have; the page says what."""


def test_every_case_is_on_the_page_and_in_the_tests_it_names() -> None:
    page = REPOSITORY / "docs" / "cases.md"
    found: dict[str, list[Path]] = {}
    for row in re.findall(r"^\| ([A-Z]+-\d+) \|.*$", page.read_text(), re.MULTILINE):
        (line,) = re.findall(rf"^\| {row} \|.*$", page.read_text(), re.MULTILINE)
        found[row] = [page.parent / target for target in re.findall(r"\]\(([^)]+)\)", line)]
    assert list(found) == IDS
    for name, files in found.items():
        assert bool(files) == (name not in NOT_OURS), name
        for file in files:
            text = file.read_text()
            assert name in text or name.lower().replace("-", "_") in text, (name, file)
