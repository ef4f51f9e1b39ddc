"""The codes of all findings about engine arguments, and the rules that look for those from E2 on.

E1 what is written, E2 a role of a disaggregated deployment, E3 the two roles of a pairing, E4 parallelism
and sizes, E5 CUDA graphs, E6 the KV cache, E7 speculative decoding, E8 back-ends and experts.
docs/engines.md has the table. Most rules are in rules.yaml; functions are for what has to be computed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import resources

from slagate.workers.engine_args.rules import cache, decoding, disagg, pair, sizes
from slagate.workers.engine_args.rules.case import EngineCase
from slagate.workers.engine_args.rules.rule import rules
from slagate.workers.findings import Finding

CODES: Mapping[str, str] = json.loads(
    (resources.files("slagate.workers.engine_args.rules") / "codes.json").read_text()
)
"""The title of each code."""

_RULES: tuple[Callable[[EngineCase], Iterator[Finding]], ...] = (
    disagg.check_transfer_buffer,
    sizes.check_parallelism,
    sizes.check_steps,
    sizes.check_cuda_graphs,
    cache.check_types,
    cache.check_pools,
    cache.check_connector,
    decoding.check_mtp_length,
    decoding.check_draft_schedule,
    decoding.check_draft_trees,
    decoding.check_drafter,
)

PAIR_RULES: tuple[Callable[[EngineCase, EngineCase], Iterator[Finding]], ...] = (
    pair.check_equal,
    pair.check_limits,
    pair.check_drafting,
)


def check_rules(case: EngineCase) -> list[Finding]:
    """The findings of all rules about one engine, by their codes."""
    checks = (*(rule.check for rule in rules()), *_RULES)
    found = [finding for check in checks for finding in check(case)]
    return sorted(found, key=lambda finding: finding.code)
