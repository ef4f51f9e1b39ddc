"""The package `slagate` in a checkout: its five portions are the folders at the top of the repository.

Python runs them from there, so that tracebacks, breakpoints and profiles name the files that people
edit. The links beside this file are for tools that only read source: editors and type checkers look
for a folder `slagate` on the path. docs/decisions/0018-packaging.md says why.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2])]
