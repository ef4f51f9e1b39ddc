"""That the table of touch points in `docs/worker.md` is true: every test that it names is there."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
WITHOUT_TEST = ("judged by `worker check`", "not served yet", "needs a GPU: ")


def rows_of_the_table() -> list[list[str]]:
    page = (REPOSITORY / "docs" / "worker.md").read_text()
    _, _, section = page.partition("## Touch points with TensorRT-LLM\n")
    section, _, _ = section.partition("\n## ")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_every_touch_point_has_a_test_that_exists_or_says_who_judges_it() -> None:
    rows = rows_of_the_table()
    assert len(rows) > 80
    for row in rows:
        cell = row[-1]
        named = re.findall(r"`([\w/]+\.py)`((?:,? `test_\w+`)+)", cell)
        assert named or cell.startswith(WITHOUT_TEST), row
        for file, tests in named:
            text = (REPOSITORY / "tests" / file).read_text()
            for test in re.findall(r"test_\w+", tests):
                assert f"def {test}(" in text, (file, test)
