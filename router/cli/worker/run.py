"""`slagate worker`: one worker process, and the group of commands about one."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from slagate.proto.rpc.address import Address
from slagate.router.cli.command import (
    LogLevel,
    check_apart,
    fail,
    finite,
    host_port,
    options_given,
    run_to_exit,
    seconds,
    start_log,
)
from slagate.router.cli.tls import Insecure, TlsCert, TlsClientCa, TlsKey, listener_tls
from slagate.router.cli.worker import engine_args as engine_options
from slagate.router.cli.worker.check import check
from slagate.router.cli.worker.convert import convert
from slagate.router.cli.worker.engine_args import (
    AllowUnknownEngineArgs,
    EngineVersion,
    ExtraEngineArgs,
    OverrideEngineArgs,
    PrintEngineArgs,
    Transport,
    check_transport,
    engine_version_of,
    read_engine_args,
    show_engine_args,
)
from slagate.router.cli.worker.options import (
    AllowLogitsProcessor,
    LogitsProcessorOption,
    check_engine,
    check_package,
    option,
    options_of,
    read_logits_processors,
    trtllm_drain_s,
    with_trtllm_options,
)
from slagate.workers.engine_args.build import KV_EVENTS
from slagate.workers.engine_args.rules.case import IntendedUse
from slagate.workers.runtime.listen import ignore_hangups
from slagate.workers.serving import sim as run
from slagate.workers.serving import sim_worker
from slagate.workers.serving import trtllm as trtllm_run

worker = typer.Typer(help="Run one worker until SIGTERM, or look at what one would run.")


worker.command("check")(check)
worker.command()(convert)


def _run_worker(
    context: typer.Context,
    *,
    role: Annotated[
        str | None, typer.Option(help="prefill, decode, agg, or encode (trtllm). Required.")
    ] = None,
    # A group listens unless it is asked for one of its commands, so this is checked below.
    listen: Annotated[
        Address | None, host_port("For the gateway: OpenEngine over gRPC. Required.")
    ] = None,
    engine: Annotated[str, typer.Option(help="sim or trtllm.")] = "sim",
    profile: Annotated[
        str, typer.Option(help="Timing profile: a packaged name, or a file.")
    ] = "llama-3.1-8b-h100",
    tp: Annotated[int, engine_options.TP] = 1,
    model: Annotated[str | None, engine_options.MODEL] = None,
    time_scale: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Engine times are multiplied by this.")
    ] = 1.0,
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, max=100_000_000, help="KV blocks; default: the profile's capacity."),
    ] = None,
    kv_block_bytes: Annotated[
        int, typer.Option(min=16, max=1 << 28, help="Real bytes of a simulated KV block.")
    ] = 4096,
    max_batch_size: Annotated[int, engine_options.MAX_BATCH_SIZE] = 256,
    max_seq_len: Annotated[int, engine_options.MAX_SEQ_LEN] = 131_072,
    attention_dp: Annotated[bool, engine_options.ATTENTION_DP] = False,
    kv_host_blocks: Annotated[
        int,
        typer.Option(
            min=0, max=100_000_000, help="KV blocks in host memory, for what the device evicts."
        ),
    ] = 0,
    kv_events: Annotated[int, engine_options.KV_EVENTS] = KV_EVENTS,
    stream_interval: Annotated[int, engine_options.STREAM_INTERVAL] = 1,
    transport: Transport = "auto",
    kv_transfer_timeout: Annotated[
        float,
        seconds("Seconds that fetching one handoff may take.", least=0.1),
    ] = sim_worker.KV_TRANSFER_TIMEOUT_S,
    handoff_timeout: Annotated[
        float,
        seconds("Seconds that a handoff is kept for decode.", least=0.1),
    ] = sim_worker.HANDOFF_TIMEOUT_S,
    handoff_key_file: Annotated[
        Path | None,
        typer.Option(help="Secret shared by all workers; handoffs are signed and checked with it."),
    ] = None,
    api: Annotated[
        str,
        typer.Option(help="TensorRT-LLM API that the simulated engine has: 1.2, 1.3rc or main."),
    ] = "main",
    extra_engine_args: ExtraEngineArgs = None,
    override_engine_args: OverrideEngineArgs = None,
    allow_unknown_engine_args: AllowUnknownEngineArgs = False,
    engine_version: EngineVersion = None,
    print_engine_args: PrintEngineArgs = False,
    logits_processor: LogitsProcessorOption = None,
    allow_logits_processor: AllowLogitsProcessor = None,
    drain: Annotated[
        float,
        seconds("Seconds for running requests and parked handoffs after SIGTERM."),
    ] = 10.0,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    metrics_listen: Annotated[
        Address | None, host_port("For /metrics, /healthz and /readyz over HTTP.")
    ] = None,
    log_level: LogLevel = "info",
    trtllm: dict[str, Any],
) -> None:
    """Run one worker until SIGTERM."""
    given = options_given(context)
    if context.invoked_subcommand is not None:
        if given:
            fail(f"{option(given[0])}: options come after {context.invoked_subcommand!r}")
        return
    check_engine(engine, given)
    if engine == "trtllm" and not print_engine_args:
        check_package()  # before anything else: without it no option helps
    if role is None:
        fail("--role is missing: prefill, decode, agg or encode")
    args = None
    if engine == "trtllm":
        args = read_engine_args(
            role,
            {name: context.params[name] for name in given},
            extra=extra_engine_args,
            override=override_engine_args,
            allow_unknown=allow_unknown_engine_args,
            wanted=IntendedUse(
                engine_version=engine_version_of(engine_version), environ=os.environ
            ),
        )
        if print_engine_args:
            show_engine_args(args)
            raise typer.Exit
    if listen is None:
        fail("--listen is missing: HOST:PORT")
    check_apart({"listen": listen, "metrics-listen": metrics_listen})
    ignore_hangups()  # until there is something to read again
    tls = listener_tls(tls_cert, tls_key, tls_client_ca, insecure=insecure)
    start_log(log_level)
    logits = read_logits_processors(logits_processor, allow_logits_processor)
    if args is not None:
        trtllm_options = options_of(
            args,
            trtllm,
            handoff_key_file=handoff_key_file,
            log_level=log_level,
            logits=logits,
        )
        run_to_exit(
            lambda: trtllm_run.run_trtllm_worker(
                trtllm_options,
                listen,
                drain_s=drain if "drain" in given else trtllm_drain_s(role),
                tls=tls,
                metrics_listen=metrics_listen,
            )
        )
    check_transport(transport)
    options = sim_worker.SimOptions(
        role=role,
        profile=profile,
        tp=tp,
        model=model,
        time_scale=time_scale,
        kv_blocks=kv_blocks,
        kv_block_bytes=kv_block_bytes,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        attention_dp=attention_dp,
        kv_host_blocks=kv_host_blocks,
        kv_events=kv_events,
        stream_interval=stream_interval,
        transport=transport,
        kv_transfer_timeout_s=kv_transfer_timeout,
        handoff_timeout_s=handoff_timeout,
        handoff_key_file=handoff_key_file,
        api=api,
        logits=logits,
    )
    run_to_exit(
        lambda: run.run_sim_worker(
            options, listen, drain_s=drain, tls=tls, metrics_listen=metrics_listen
        )
    )


worker.callback(invoke_without_command=True)(with_trtllm_options(_run_worker))
