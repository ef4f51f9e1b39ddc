"""Tables of decisions, pools and workers, as `explain` and `pools` print them."""

from collections.abc import Iterator

from rich.table import Table

from slagate.proto import gateway_pb2 as gw
from slagate.router.tables import print_table, stdout_console


def print_decision(decision: gw.Decision) -> None:
    """Print a table of candidates for each stage, then the decision in words."""
    console = stdout_console()
    for choice in decision.stages:
        table = _choice_table(choice, decision.isl_tokens)
        # Each rank of a worker is a row.
        names = [str(column.header) for column in table.columns]
        print_table(console, table, n_keys=names.index("rank") + 1 if "rank" in names else 1)
    console.print(decision.text, soft_wrap=True)
    for line in _misses(decision):
        console.print(line, soft_wrap=True)


def _misses(decision: gw.Decision) -> Iterator[str]:
    """A line for each target of the request that its winner is predicted to miss."""
    for choice in decision.stages:
        for target in choice.targets if choice.worker else ():
            # Without a profile nothing is predicted, and the field is 0.
            predicted_ms = getattr(choice.candidates[0], f"predicted_{target.field}")
            if target.source != "grid" and predicted_ms > target.ms:
                name = target.field.removesuffix("_ms").upper()
                yield (
                    f"{_stage(choice.stage)}: the {name} target of {target.ms:g} ms will be missed:"
                    f" {predicted_ms:.1f} ms are predicted."
                )


def _choice_table(choice: gw.StageChoice, isl_tokens: int) -> Table:
    cell = "".join(f"[{index}]" for index in choice.cell)
    title = f"{_stage(choice.stage)}: cell {cell}, pool {choice.pool}"
    scales = {look.name: look.coefficients.prefill_scale for look in choice.pools}
    rows = [_candidate_cells(each, isl_tokens, scales) for each in choice.candidates]
    hidden = {
        "pool": len(scales) < 2,
        "rank": not any(each.HasField("rank") for each in choice.candidates),
    }
    decode, prefill = choice.stage == gw.STAGE_DECODE, choice.stage == gw.STAGE_PREFILL
    hidden |= dict.fromkeys(("cached", "uncached", "queued tokens", "queue s", "TTFT ms"), decode)
    hidden |= dict.fromkeys(("context tokens", "ITL ms"), prefill)
    names = [name for name in rows[0] if not hidden.get(name)] if rows else []
    table = Table(title=title, title_justify="left")
    for name in names:
        is_text = name in ("worker", "pool", "")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "worker")
    for candidate, cells in zip(choice.candidates, rows, strict=True):
        won = candidate == choice.candidates[0] and choice.worker != ""
        if won:
            cells[""] = "chosen, as it was idle for long" if choice.starved else "chosen"
        table.add_row(*(cells[name] for name in names), style="bold" if won else None)
    return table


def _candidate_cells(
    candidate: gw.Candidate, isl_tokens: int, scales: dict[str, float]
) -> dict[str, str]:
    """The cells of a candidate's row, by column."""
    cached = candidate.device_tokens + candidate.host_tokens
    on_host = f" ({candidate.host_tokens:,} on host)" if candidate.host_tokens else ""
    queue_s = (candidate.queued_s + candidate.foreign_s) * scales[candidate.pool]
    others = f" + {candidate.foreign_requests}" if candidate.foreign_requests else ""
    return {
        "worker": candidate.worker,
        "pool": candidate.pool,
        "rank": str(candidate.rank) if candidate.HasField("rank") else "-",
        "cached": f"{cached:,}{on_host}",
        "uncached": f"{max(0, isl_tokens - cached):,}",
        "queued tokens": f"{candidate.queued_tokens:,}",
        "queue s": f"{queue_s:.4f}",
        "context tokens": f"{candidate.context_tokens:,}",
        "in flight": f"{candidate.inflight}{others}",
        "TTFT ms": _figure(candidate, "predicted_ttft_ms"),
        "ITL ms": _figure(candidate, "predicted_itl_ms"),
        "load s": f"{candidate.score_s:.4f}",
        "": candidate.excluded or ("suspect" if candidate.suspect else ""),
    }


def print_pools(pools: gw.ListPoolsResponse, workers: gw.ListWorkersResponse) -> None:
    """Print tables of pools, predictions and workers, the configuration's version, modes and warnings."""
    console = stdout_console()
    print_table(console, _pools_table(pools))
    predictions = _predictions_table(pools)
    if predictions.row_count:
        print_table(console, predictions, n_keys=2)
    print_table(console, _workers_table(workers))
    age_s = round(pools.config_age_s)
    console.print(f"configuration {pools.config_version}, in force for {age_s:,} s", soft_wrap=True)
    mode = in_force(pools.admission, pools.file_admission)
    console.print(f"admission {mode}, spill {pools.spill}, bypass {pools.bypass}", soft_wrap=True)
    for warning in pools.warnings:
        console.print(f"warning: {warning}", soft_wrap=True)


def in_force(mode: str, of_file: str) -> str:
    """A mode that is in force, with that of the fleet file where it is another one."""
    return mode if mode == of_file else f"{mode} (the fleet file says {of_file})"


def _pools_table(pools: gw.ListPoolsResponse) -> Table:
    title = (
        f"Pools (policy {pools.policy}; a stage may try {pools.max_attempts} workers;"
        f" {pools.waiting_requests} requests wait)"
    )
    table = Table(title=title, title_justify="left")
    for name in ("pool", "stage", "then tries", "estimator"):
        table.add_column(name, no_wrap=name in ("pool", "stage"))
    for name in ("ready", "in flight", "queued tokens", "requests"):
        table.add_column(name, justify="right")
    table.add_column("retries", justify="right")
    for pool in pools.pools:
        table.add_row(
            pool.name,
            _stage(pool.stage),
            ", ".join(pool.pool_order[1:]) or "-",
            pool.estimator,
            f"{pool.workers_ready}/{pool.workers}"
            + (f" (+{pool.workers_draining} draining)" if pool.workers_draining else "")
            + (f", {pool.workers_unpaired} without a partner" if pool.workers_unpaired else ""),
            str(pool.inflight),
            f"{pool.queued_tokens:,}",
            f"{pool.requests_total:,}",
            f"{pool.retries_total:,}",
        )
    return table


def _predictions_table(pools: gw.ListPoolsResponse) -> Table:
    table = Table(title="Predictions", title_justify="left")
    for name in ("pool", "latency", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "off by", "bias", "covered"):
        table.add_column(name, justify="right")
    for pool in pools.pools:
        for latency, of in (("TTFT", pool.ttft), ("ITL", pool.itl)):
            if of.pairs:
                shares = f"{of.median_error:.0%}", f"{of.bias:+.0%}", f"{of.coverage:.0%}"
                by = f"{of.basis}, calibrated" if of.HasField("spread") else of.basis
                table.add_row(pool.name, latency, by, str(of.pairs), *shares)
    return table


def _workers_table(workers: gw.ListWorkersResponse) -> Table:
    table = Table(title="Workers", title_justify="left")
    for name in ("worker", "pool", "state", "engine", "KV events"):
        table.add_column(name, no_wrap=name in ("worker", "pool"))
    for name in ("cached (predicted)", "in flight", "engine running", "engine queued", "KV blocks"):
        table.add_column(name, justify="right")
    for worker in workers.workers:
        load, prefix = worker.load, worker.prefix
        used = f"{load.used_kv_blocks:,}" if load.HasField("used_kv_blocks") else "?"
        blocks = f"{used}/{load.total_kv_blocks:,}"
        cached = f"{prefix.engine_cached_tokens:,} ({prefix.predicted_tokens:,})"
        table.add_row(
            worker.worker,
            worker.pool,
            _with_reason(worker.state, worker.reason or worker.pair_problem),
            worker.engine,
            _with_reason(worker.events_mode or "-", worker.events_reason),
            cached if worker.HasField("prefix") else "-",
            str(worker.inflight),
            str(load.running_requests) if load.HasField("running_requests") else "-",
            str(load.queued_requests) if load.HasField("queued_requests") else "-",
            blocks if load.HasField("total_kv_blocks") else "-",
        )
    return table


def _with_reason(state: str, reason: str) -> str:
    return f"{state} ({reason})" if reason else state


def _figure(candidate: gw.Candidate, field: str) -> str:
    return f"{getattr(candidate, field):.1f}" if candidate.HasField(field) else "-"  # type: ignore[arg-type]


def _stage(stage: int) -> str:
    return gw.Stage.Name(stage).removeprefix("STAGE_").lower()  # type: ignore[arg-type]
