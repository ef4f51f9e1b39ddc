"""`slagate worker check`: reports mistakes in engine arguments, without an engine.

Exit status 0: no errors; 1: errors, or with --strict warnings; 2: something cannot be read.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import typer

from slagate.router.cli.command import (
    EXIT_FINDINGS,
    FindingsAsJson,
    IgnoredCodes,
    ShownFinding,
    codes_to_ignore,
    ending_on_usage_error,
    fail,
    print_findings,
)
from slagate.router.cli.worker import engine_args as options
from slagate.workers.engine_args.build import EngineArgs, build_engine_args, check_pair
from slagate.workers.engine_args.model.merge import DEFAULT, FORCED
from slagate.workers.engine_args.rules.case import IntendedUse
from slagate.workers.engine_args.rules.table import CODES
from slagate.workers.engine_args.yaml_text import PEER
from slagate.workers.findings import Finding

PAIR = "pair"


class RoleFinding(NamedTuple):
    """A finding, the role that it is about (or `PAIR`), and the source of its value (or "")."""

    of: str
    finding: Finding
    source: str


PeerEngineArgs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Of the other role: decode's for prefill, prefill's for decode."
    ),
]
PrefixRouting = Annotated[
    bool,
    typer.Option(
        "--prefix-routing/--no-prefix-routing", help="Whether prefixes decide on workers."
    ),
]
LongestPrompt = Annotated[
    int | None, typer.Option(min=1, help="Tokens of the longest prompt; default: the context.")
]
KvBytesPerToken = Annotated[
    int | None, typer.Option(min=1, help="KV cache of one token on one rank, for estimates.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit status 1 for warnings, too.")]


def check(
    context: typer.Context,
    *,
    role: Annotated[str, typer.Option(help="agg, prefill, decode or encode.")],
    extra_engine_args: options.ExtraEngineArgs = None,
    override_engine_args: options.OverrideEngineArgs = None,
    allow_unknown_engine_args: options.AllowUnknownEngineArgs = False,
    peer_engine_args: PeerEngineArgs = None,
    prefix_routing: PrefixRouting = True,
    longest_prompt: LongestPrompt = None,
    kv_bytes_per_token: KvBytesPerToken = None,
    engine_version: options.EngineVersion = None,
    engine_facts: options.EngineFactsFile = None,
    ignore: IgnoredCodes = None,
    strict: Strict = False,
    as_json: FindingsAsJson = False,
    model: options.Model = None,
    tp: options.Tp = None,
    max_batch_size: options.MaxBatchSize = None,
    max_seq_len: options.MaxSeqLen = None,
    attention_dp: options.AttentionDp = None,
    kv_events: options.KvEvents = None,
    stream_interval: options.StreamInterval = None,
    backend: options.Backend = None,
    pipeline_parallel_size: options.PipelineParallelSize = None,
    expert_parallel_size: options.ExpertParallelSize = None,
    gpus_per_node: options.GpusPerNode = None,
    kv_block_size: options.KvBlockSize = None,
    max_num_tokens: options.MaxNumTokens = None,
    free_gpu_memory_fraction: options.FreeGpuMemoryFraction = None,
    guided_decoding_backend: options.GuidedDecodingBackend = None,
) -> None:
    """Say what is wrong with the arguments of an engine, or of a pairing; no engine is needed."""
    ignored = codes_to_ignore(ignore, CODES, page="docs/engines.md")
    wanted = IntendedUse(
        prefix_routing=prefix_routing,
        longest_prompt_tokens=longest_prompt,
        kv_bytes_per_token=kv_bytes_per_token,
        engine_version=options.engine_version_of(engine_version),
        facts=options.facts_of(engine_facts),
        allows_unknown=allow_unknown_engine_args,
        environ=os.environ,
    )
    args = options.read_engine_args(
        role,
        context,
        extra=extra_engine_args,
        override=override_engine_args,
        wanted=wanted,
    )
    if extra_engine_args is None and not {*args.sources.values()} - {DEFAULT, FORCED}:
        fail("--extra-engine-args is missing: the file, or packaged configuration, to check")
    found = _found(args, peer_engine_args, wanted)
    _print_and_exit(found, ignored, strict=strict, as_json=as_json)


def _print_and_exit(
    found: Sequence[RoleFinding], ignored: set[str], *, strict: bool, as_json: bool
) -> NoReturn:
    kept = [each for each in found if each.finding.code not in ignored]
    print_findings(map(_shown, kept), _summary(kept, len(found) - len(kept)), as_json=as_json)
    failing = {"error", "warning"} if strict else {"error"}
    failed = any(each.finding.severity in failing for each in kept)
    raise typer.Exit(EXIT_FINDINGS if failed else 0)


def _found(args: EngineArgs, peer: Path | None, wanted: IntendedUse) -> list[RoleFinding]:
    """The findings of a role's arguments and, where there is a file of the other role, of that and both."""
    found = [
        RoleFinding(args.role, finding, options.place_of(finding, args.sources))
        for finding in args.findings
    ]
    if peer is not None:
        found += _with_peer(args, peer, wanted)
    return found


def _with_peer(args: EngineArgs, peer: Path, wanted: IntendedUse) -> list[RoleFinding]:
    """The findings of the other role's file, and of the pairing."""
    role = {"prefill": "decode", "decode": "prefill"}.get(args.role)
    if role is None:
        fail(f"{PEER} is for --role prefill or decode (got {args.role!r})")
    with ending_on_usage_error():
        other = build_engine_args(
            role=role,
            cli={},
            extra=peer,
            override=None,
            wanted=wanted,
            extra_option=PEER,
        )
    of_peer = [
        RoleFinding(role, finding, options.place_of(finding, other.sources))
        for finding in other.findings
    ]
    with ending_on_usage_error():
        return of_peer + [
            RoleFinding(PAIR, finding, _places(finding, args, other))
            for finding in check_pair(args, other)
        ]


def _places(finding: Finding, *sides: EngineArgs) -> str:
    """Where each side of a pairing has the value from that the finding is about."""
    places = [(side.role, options.place_of(finding, side.sources)) for side in sides]
    return "; ".join(f"{role}: {place}" for role, place in places if place)


def _shown(found: RoleFinding) -> ShownFinding:
    of, (code, severity, key, message, advice), source = found
    is_brief, title = severity == "note", f"{severity} {code}  {of}"
    if not is_brief:
        title += f"  {key}{f' ({source})' if source else ''}"
    fields = {"of": of, "code": code, "severity": severity, "key": key, "text": message}
    fields |= {"advice": advice, "source": source}
    return ShownFinding(title, f"{key} {message}", advice, fields, is_brief)


def _summary(found: Sequence[RoleFinding], n_ignored: int) -> str:
    """How many errors, warnings and notes there are."""
    counts = Counter(each.finding.severity for each in found)
    listed = ", ".join(f"{n} {severity}{'s' * (n > 1)}" for severity, n in counts.items())
    return f"{listed or 'no findings'}{f' ({n_ignored} ignored)' if n_ignored else ''}"
