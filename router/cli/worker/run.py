"""`slagate worker`: the group, and its two commands that run one worker, `sim` and `trtllm`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from slagate.proto.rpc.address import Address
from slagate.router.cli.command import (
    LogLevel,
    check_apart,
    ending_on_usage_error,
    fail,
    finite,
    host_port,
    run_to_exit,
    seconds,
    start_log,
)
from slagate.router.cli.tls import Insecure, TlsCert, TlsClientCa, TlsKey, listener_tls
from slagate.router.cli.worker import engine_args as options
from slagate.router.cli.worker.check import check
from slagate.router.cli.worker.convert import convert
from slagate.router.cli.worker.facts import facts
from slagate.router.cli.worker.launch import LaunchCommand
from slagate.router.cli.worker.self_check import check_and_show
from slagate.workers.engine_args.build import KV_EVENTS, EngineArgs
from slagate.workers.engine_args.check import JUDGED_BY_ENGINE
from slagate.workers.engine_args.rules.case import IntendedUse
from slagate.workers.logits.processors import LogitsProcessors, requested_of
from slagate.workers.runtime.listen import ignore_hangups
from slagate.workers.serving.sim import (
    HANDOFF_TIMEOUT_S,
    KV_TRANSFER_TIMEOUT_S,
    SimOptions,
    run_sim_worker,
)
from slagate.workers.serving.start import (
    PROGRESS_S,
    SHUTDOWN_LIMIT_S,
    WARM_UP_LIMIT_S,
    TrtllmOptions,
)
from slagate.workers.serving.trtllm import run_trtllm_worker
from slagate.workers.trtllm.package import check_installed
from slagate.workers.trtllm.watch import WatchTimes

DRAIN_S = 10.0
PREFILL_DRAIN_S = 30.0
"""Default of TensorRT-LLM's prefill workers, whose memory decode workers read to fetch handoffs."""

MAX_KV_BLOCKS = 100_000_000

_WATCH = WatchTimes()


class _WorkerCommands(TyperGroup):
    """A group that answers an option before the command's name with where options go."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ctx.help_option_names:
            option = args[0].partition("=")[0]
            fail(
                f"{option}: options come after the engine, which is a command:"
                " slagate worker sim OPTIONS, or slagate worker trtllm OPTIONS"
            )
        return super().parse_args(ctx, args)


worker = typer.Typer(
    cls=_WorkerCommands,
    no_args_is_help=True,
    help="Run one worker until SIGTERM, or look at what one would run.",
)

HandoffKeyFile = Annotated[
    Path | None,
    typer.Option(help="Secret shared by all workers; handoffs are signed and checked with it."),
]
LogitsProcessor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=JSON]",
        help="Process the logits of every request with this, and these parameters; repeatable.",
    ),
]
AllowLogitsProcessor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="Requests may ask for this one in extra.logits_processors; repeatable."
    ),
]
MetricsListen = Annotated[
    Address | None, host_port("For /metrics, /healthz and /readyz over HTTP.")
]
DRAIN = "Seconds for running requests and parked handoffs after SIGTERM"
KvBlocks = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_KV_BLOCKS, help="KV blocks; default: the profile's capacity."),
]
EndId = Annotated[
    int | None, typer.Option(min=0, max=1 << 31, help="End of text; default: the tokenizer's.")
]
PrintEngineArgs = Annotated[
    bool,
    typer.Option(
        "--print-engine-args",
        help="Show what the engine would get, and where each value came from; nothing is started.",
    ),
]
SelfCheck = Annotated[
    bool,
    typer.Option(
        "--self-check",
        help="Start the engine, try it without serving, print a table; status 1 where something failed.",
    ),
]
WarmUpTimeout = Annotated[float, seconds("Seconds for the first request of each rank.", least=0.1)]
StartProgress = Annotated[
    float, seconds("Seconds between log lines while the engine starts.", least=0.1)
]
HealthCheckInterval = Annotated[
    float, seconds("Seconds between checks that the engine is alive; 0: none.")
]
HealthCheckTimeout = Annotated[
    float, seconds("Seconds after which a check that got no answer failed.", least=0.1)
]
ShutdownTimeout = Annotated[float, seconds("Seconds for the engine to end by itself.", least=0.1)]


Profile = Annotated[str, typer.Option(help="Timing profile: a packaged name, or a file.")]
SimModel = Annotated[str | None, typer.Option(help="Served name; default: the profile's.")]
TimeScale = Annotated[
    float, typer.Option(min=0.0, callback=finite, help="Engine times are multiplied by this.")
]
KvBlockBytes = Annotated[int, typer.Option(min=16, max=1 << 28, help="Real bytes of a KV block.")]
KvHostBlocks = Annotated[
    int,
    typer.Option(
        min=0, max=MAX_KV_BLOCKS, help="KV blocks in host memory, for what the device evicts."
    ),
]
KvTransferTimeout = Annotated[
    float, seconds("Seconds that fetching one handoff may take.", least=0.1)
]
HandoffTimeout = Annotated[float, seconds("Seconds that a handoff is kept for decode.", least=0.1)]
Api = Annotated[str, typer.Option(help="TensorRT-LLM's API: 1.1, 1.2, 1.3rc or 1.4rc.")]


@worker.command()
def sim(
    *,
    role: Annotated[str, typer.Option(help="prefill, decode or agg.")],
    listen: Annotated[Address, host_port("For the gateway: OpenEngine over gRPC.")],
    profile: Profile = "llama-3.1-8b-h100",
    tp: Annotated[int, options.TP] = 1,
    model: SimModel = None,
    time_scale: TimeScale = 1.0,
    kv_blocks: KvBlocks = None,
    kv_block_bytes: KvBlockBytes = 4096,
    max_batch_size: Annotated[int, options.MAX_BATCH_SIZE] = 256,
    max_seq_len: Annotated[int, options.MAX_SEQ_LEN] = 131_072,
    attention_dp: Annotated[bool, options.ATTENTION_DP] = False,
    kv_host_blocks: KvHostBlocks = 0,
    kv_events: Annotated[int, options.KV_EVENTS] = KV_EVENTS,
    stream_interval: Annotated[int, options.STREAM_INTERVAL] = 1,
    transport: options.Transport = "auto",
    kv_transfer_timeout: KvTransferTimeout = KV_TRANSFER_TIMEOUT_S,
    handoff_timeout: HandoffTimeout = HANDOFF_TIMEOUT_S,
    handoff_key_file: HandoffKeyFile = None,
    api: Api = "1.4rc",
    logits_processor: LogitsProcessor = None,
    allow_logits_processor: AllowLogitsProcessor = None,
    drain: Annotated[float, seconds(f"{DRAIN}.")] = DRAIN_S,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    metrics_listen: MetricsListen = None,
    log_level: LogLevel = "info",
) -> None:
    """Run a worker with a simulated engine, which needs no GPU."""
    _check_listeners(listen, metrics_listen)
    tls = listener_tls(tls_cert, tls_key, tls_client_ca, insecure=insecure)
    start_log(log_level)
    setup = SimOptions(
        role=role,
        profile=profile,
        tp=tp,
        model=model,
        time_scale=time_scale,
        kv_blocks=kv_blocks,
        kv_block_bytes=kv_block_bytes,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        ranks=tp if attention_dp else None,
        kv_host_blocks=kv_host_blocks,
        kv_events=kv_events,
        stream_interval=stream_interval,
        transport=transport,
        kv_transfer_timeout_s=kv_transfer_timeout,
        handoff_timeout_s=handoff_timeout,
        handoff_key_file=handoff_key_file,
        api=api,
        logits=_logits_processors(logits_processor, allow_logits_processor),
    )
    options.check_transport(transport)
    run_to_exit(
        lambda: run_sim_worker(setup, listen, drain_s=drain, tls=tls, metrics_listen=metrics_listen)
    )


# Longer than 60 lines because typer wants each of its 40 options as a parameter.
@worker.command(cls=LaunchCommand)
def trtllm(
    context: typer.Context,
    *,
    role: Annotated[
        str | None, typer.Option(help="prefill, decode, agg or encode. Required.")
    ] = None,
    # `role` and `listen` are checked below, once the package is there and no arguments are to be printed.
    listen: Annotated[
        Address | None, host_port("For the gateway: OpenEngine over gRPC. Required.")
    ] = None,
    model: options.Model = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; default: --model.")
    ] = None,
    tp: options.Tp = None,
    pipeline_parallel_size: options.PipelineParallelSize = None,
    expert_parallel_size: options.ExpertParallelSize = None,
    attention_dp: options.AttentionDp = None,
    gpus_per_node: options.GpusPerNode = None,
    max_batch_size: options.MaxBatchSize = None,
    max_num_tokens: options.MaxNumTokens = None,
    max_seq_len: options.MaxSeqLen = None,
    kv_block_size: options.KvBlockSize = None,
    free_gpu_memory_fraction: options.FreeGpuMemoryFraction = None,
    kv_events: options.KvEvents = None,
    stream_interval: options.StreamInterval = None,
    backend: options.Backend = None,
    guided_decoding_backend: options.GuidedDecodingBackend = None,
    extra_engine_args: options.ExtraEngineArgs = None,
    override_engine_args: options.OverrideEngineArgs = None,
    allow_unknown_engine_args: options.AllowUnknownEngineArgs = False,
    engine_version: options.EngineVersion = None,
    engine_facts: options.EngineFactsFile = None,
    print_engine_args: PrintEngineArgs = False,
    self_check: SelfCheck = False,
    end_id: EndId = None,
    handoff_key_file: HandoffKeyFile = None,
    logits_processor: LogitsProcessor = None,
    allow_logits_processor: AllowLogitsProcessor = None,
    warm_up_timeout: WarmUpTimeout = WARM_UP_LIMIT_S,
    start_progress: StartProgress = PROGRESS_S,
    health_check_interval: HealthCheckInterval = _WATCH.interval_s,
    health_check_timeout: HealthCheckTimeout = _WATCH.check_limit_s,
    shutdown_timeout: ShutdownTimeout = SHUTDOWN_LIMIT_S,
    drain: Annotated[
        float | None, seconds(f"{DRAIN}; default: {DRAIN_S:g}, prefill {PREFILL_DRAIN_S:g}.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    metrics_listen: MetricsListen = None,
    log_level: LogLevel = "info",
) -> None:
    """Run a worker with the installed TensorRT-LLM."""
    if not print_engine_args:
        with ending_on_usage_error():
            check_installed()  # before anything else: without it no option helps
    if role is None:
        fail("--role is missing: prefill, decode, agg or encode")
    args = options.read_engine_args(
        role,
        context,
        extra=extra_engine_args,
        override=override_engine_args,
        wanted=IntendedUse(
            engine_version=options.engine_version_of(engine_version),
            facts=options.facts_of(engine_facts),
            allows_unknown=allow_unknown_engine_args,
            environ=os.environ,
        ),
    )
    if print_engine_args:
        options.show_engine_args(args)
        raise typer.Exit
    if not self_check:
        if listen is None:
            fail("--listen is missing: HOST:PORT")
        _check_listeners(listen, metrics_listen)
        tls = listener_tls(tls_cert, tls_key, tls_client_ca, insecure=insecure)
    start_log(log_level)
    logits = _logits_processors(logits_processor, allow_logits_processor)
    model_name = _model(args)
    trtllm_options = TrtllmOptions(
        args=args,
        served_name=served_model_name or model_name,
        end_id=end_id,
        handoff_key_file=handoff_key_file,
        log_level=log_level,
        logits=logits,
        warm_up_limit_s=warm_up_timeout,
        shutdown_limit_s=shutdown_timeout,
        progress_s=start_progress,
        watch=WatchTimes(
            interval_s=health_check_interval,
            check_limit_s=health_check_timeout,
            stuck_s=shutdown_timeout,
        ),
    )
    if self_check or listen is None:
        run_to_exit(lambda: check_and_show(trtllm_options))
    drain_s = (PREFILL_DRAIN_S if role == "prefill" else DRAIN_S) if drain is None else drain
    run_to_exit(
        lambda: run_trtllm_worker(
            trtllm_options, listen, drain_s=drain_s, tls=tls, metrics_listen=metrics_listen
        )
    )


worker.command(cls=LaunchCommand)(check)
worker.command()(convert)
worker.command()(facts)


def _check_listeners(listen: Address, metrics_listen: Address | None) -> None:
    check_apart({"listen": listen, "metrics-listen": metrics_listen})
    ignore_hangups()  # until there is something to read again


def _model(args: EngineArgs) -> str:
    """The engine's model. A missing one, or another error in the arguments, ends the command."""
    if args.values.get("model") is None:
        fail("--model is missing: a folder with the model, or its Hugging Face id")
    with ending_on_usage_error():
        args.refuse_errors(but=JUDGED_BY_ENGINE)
    return str(args.values["model"])


def _logits_processors(
    every: Sequence[str] | None, allowed: Sequence[str] | None
) -> LogitsProcessors:
    """The logits processors that these options name; a wrong option ends the command."""
    with ending_on_usage_error():
        return LogitsProcessors([requested_of(text) for text in every or ()], allowed or ())
