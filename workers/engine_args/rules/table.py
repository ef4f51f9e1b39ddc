"""The codes of all findings about engine arguments, and the rules that look for those from E2 on.

E1 what is written, E2 a role of a disaggregated deployment, E3 the two roles of a pairing, E4 parallelism
and sizes, E5 CUDA graphs, E6 the KV cache, E7 speculative decoding, E8 back-ends and experts.
docs/engines.md has the table.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import resources

from slagate.workers.engine_args.rules import cache, decoding, disagg, pair, sizes, together
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.row import check_rows
from slagate.workers.findings import Finding

CODES: Mapping[str, str] = json.loads(
    (resources.files("slagate.workers.engine_args.rules") / "codes.json").read_text()
)
"""The title of each code."""

_ROWS = disagg.ROWS + sizes.ROWS + cache.ROWS + decoding.ROWS + together.ROWS

_RULES: tuple[Callable[[EngineCase], Iterator[Finding]], ...] = (
    disagg.check_transfer_buffer,
    sizes.check_expert_parallelism,
    sizes.check_cuda_graphs,
    cache.check_cache_type,
    decoding.check_draft_schedule,
    decoding.check_draft_trees,
    decoding.check_drafter,
    together.check_connector,
)

PAIR_RULES: tuple[Callable[[EngineCase, EngineCase], Iterator[Finding]], ...] = (
    pair.check_equal,
    pair.check_limits,
    pair.check_drafting,
)


def check_rules(case: EngineCase) -> list[Finding]:
    """The findings of all rules about one engine, by their codes."""
    found = [*check_rows(_ROWS, case), *(one for rule in _RULES for one in rule(case))]
    return sorted(found, key=lambda finding: finding.code)
