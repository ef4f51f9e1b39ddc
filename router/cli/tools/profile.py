"""`slagate profile`: makes timing profiles, from a database or of a live worker."""

import json
import random
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from slagate.pools.estimator.estimator import NOMINAL_KV_BYTES_PER_TOKEN
from slagate.proto import openengine_pb2 as oe
from slagate.router.cli.command import (
    check_writable,
    ending_on_usage_error,
    errors,
    fail,
    run_to_exit,
    seconds,
    server,
    whole_numbers,
)
from slagate.router.cli.tls import Insecure, TlsCa, TlsKey, TlsName, TlsOwnCert, dial_tls
from slagate.router.client import engine_at
from slagate.router.output import INTERRUPTED
from slagate.router.profiles.build import AiConfigurator, profile_content
from slagate.router.profiles.measure import (
    Bench,
    DecodeRow,
    MeasurePlan,
    PrefillRow,
    capacity,
    measure_decode,
    measure_prefill,
    measured_content,
)
from slagate.workers.profiles.profile import load_profile
from slagate.workers.runtime.listen import unless_stopped
from slagate.workers.runtime.usage import ProfileError, UsageError
from slagate.workers.tls.files import TlsFiles

profile = typer.Typer(no_args_is_help=True, help="Timing profiles of models on GPUs.")

PROMPTS = "64,128,256,512,1024,2048,4096,8192,16384,32768"
CACHED = "0,2048,8192"
BATCHES = "1,2,4,8,16,32,64,128"
CONTEXTS = "512,2048,8192,32768"


def _numbers(about: str) -> Any:
    return typer.Option(metavar="N,N,...", help=about)


Out = Annotated[Path, typer.Option(help="The profile file.")]
KvCapacity = Annotated[
    int | None, typer.Option(min=1, help="KV cache in tokens; default: what the worker says.")
]
KvBytes = Annotated[
    int | None,
    typer.Option(min=1, help=f"KV cache of a token; default: {NOMINAL_KV_BYTES_PER_TOKEN}."),
]


@profile.command()
def build(
    *,
    model: Annotated[str, typer.Option(help="Hugging Face id, as Qwen/Qwen3-32B-FP8.")],
    system: Annotated[str, typer.Option(help="GPU system of the database, as h200_sxm.")],
    tp: Annotated[str, typer.Option(metavar="N,N,...", help="Tensor parallel sizes.")],
    out: Out,
    engine_version: Annotated[
        str | None, typer.Option(help="TensorRT-LLM version; default: the newest there is.")
    ] = None,
) -> None:
    """Make a profile from AIConfigurator's TensorRT-LLM database (extra `aiconfigurator`)."""
    sizes = whole_numbers("--tp", tp, least=1)
    with ending_on_usage_error():
        timings = AiConfigurator(model, system, engine_version)
        content = profile_content(
            model, system, sizes, timings, on_size=lambda size: errors.print(f"slagate: tp {size}")
        )
    _write(out, content)


@profile.command()
def measure(
    *,
    target: Annotated[str, server("An agg worker, or a prefill worker.")],
    out: Out,
    decode: Annotated[str | None, server("With a prefill worker: the decode worker.")] = None,
    prompts: Annotated[str, _numbers("Prompt sizes, tokens.")] = PROMPTS,
    cached: Annotated[str, _numbers("Tokens in the cache before those of the prompt.")] = CACHED,
    batches: Annotated[str, _numbers("Batch sizes.")] = BATCHES,
    contexts: Annotated[str, _numbers("Contexts, tokens.")] = CONTEXTS,
    repeats: Annotated[int, typer.Option(min=1, help="Of each row; the median counts.")] = 3,
    steps: Annotated[int, typer.Option(min=16, help="Output tokens of a decode row.")] = 64,
    system: Annotated[str, typer.Option(help="The GPU system, for the file.")] = "measured",
    kv_capacity: KvCapacity = None,
    kv_bytes: KvBytes = None,
    timeout: Annotated[float, seconds("Seconds of one request.", least=1.0)] = 600.0,
    tls_ca: TlsCa = None,
    tls_cert: TlsOwnCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = "",
    insecure: Insecure = False,
) -> None:
    """Measure a live worker that has nothing else to do; takes minutes on a real one."""
    tls = dial_tls(tls_ca, tls_cert, tls_key, tls_name, insecure=insecure)
    plan = MeasurePlan(
        new_tokens=whole_numbers("--prompts", prompts, least=1),
        cached_tokens=whole_numbers("--cached", cached, least=0),
        batches=whole_numbers("--batches", batches, least=1),
        contexts=whole_numbers("--contexts", contexts, least=1),
        repeats=repeats,
        steps=steps,
    )
    if kv_bytes is None:
        kv_bytes = NOMINAL_KV_BYTES_PER_TOKEN
        errors.print(f"slagate: without --kv-bytes, {kv_bytes} bytes a token is a guess")
    about = {"system": system, "kv_bytes_per_token": kv_bytes}
    measuring = partial(
        _measure, target, decode, plan, tls=tls, kv_capacity=kv_capacity, timeout_s=timeout
    )
    run_to_exit(lambda: _measure_into(out, measuring, about))


@dataclass
class _Found:
    """What was measured so far, and what the workers say of themselves as `measured_content` names it."""

    prefill: list[PrefillRow] = field(default_factory=list)
    decode: list[DecodeRow] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


async def _measure_into(
    out: Path, measuring: Callable[[_Found], Awaitable[bool]], about: dict[str, Any]
) -> int:
    """Measure and write the profile; the exit status. SIGINT and SIGTERM end the measuring early."""
    check_writable("--out", out)
    found = _Found()
    whole = bool(await unless_stopped(lambda: measuring(found)))
    if whole or found.prefill:
        content = measured_content(
            found.prefill, found.decode, **found.about, **about, is_whole=whole
        )
        _write(out, content, is_whole=whole)
    return 0 if whole else INTERRUPTED


async def _measure(
    target: str,
    decode: str | None,
    plan: MeasurePlan,
    found: _Found,
    *,
    tls: TlsFiles | None,
    kv_capacity: int | None,
    timeout_s: float,
) -> bool:
    """Measure into `found`; True once all of it is there."""

    def on_row(line: str) -> None:
        errors.print(f"slagate: {line}")

    # Another seed each time, as a worker still has the prompts of the run before in its cache.
    rng = random.Random(uuid.uuid4().int)
    async with AsyncExitStack() as stack:
        worker = second = await stack.enter_async_context(engine_at(target, tls))
        info = decoder = await worker.server_info()
        if decode is not None:
            second = await stack.enter_async_context(engine_at(decode, tls))
            decoder = await second.server_info()
        _check_roles(info, decoder, decode)
        model = info.supported_models[0]
        limit = capacity(decoder, await second.model_info(model), kv_capacity)
        found.about = {
            "model": model,
            "engine": f"{info.engine_name} {info.engine_version}",
            "source": f"measured with slagate profile measure, {plan.repeats} times each, medians",
            "tp": info.parallelism.tensor_parallel_size or 1,
            "kv_capacity_tokens": limit.kv_tokens,
        }
        bench = Bench(worker, model, decode=None if decode is None else second, timeout_s=timeout_s)
        await measure_prefill(bench, plan, limit, rng=rng, on_row=on_row, into=found.prefill)
        max_batch = decoder.capacity.max_running_requests or max(plan.batches)
        await measure_decode(
            bench, plan, limit, max_batch=max_batch, rng=rng, on_row=on_row, into=found.decode
        )
    return True


def _check_roles(server: oe.ServerInfo, decoder: oe.ServerInfo, decode: str | None) -> None:
    prefills = server.engine_role == oe.ENGINE_ROLE_PREFILL
    if decode is None and server.engine_role != oe.ENGINE_ROLE_AGGREGATED:
        raise UsageError("--target is no agg worker: give a prefill worker, and --decode with it")
    if decode is not None and not (prefills and decoder.engine_role == oe.ENGINE_ROLE_DECODE):
        raise UsageError("--decode must be a decode worker, with a prefill worker as --target")


def _write(out: Path, content: dict[str, object], *, is_whole: bool = True) -> None:
    """Write a profile. One that is not whole and cannot be used goes into `.partial` beside it."""
    text = json.dumps(content, separators=(",", ":")) + "\n"
    try:
        with TemporaryDirectory() as folder:
            draft = Path(folder, "profile.json")
            draft.write_text(text, encoding="utf-8")
            try:
                load_profile(draft)
            except ProfileError as error:
                if is_whole:
                    fail(f"{out} was not written: {error}")
                out = out.with_name(f"{out.name}.partial")
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")
    if not is_whole:
        errors.print(f"slagate: interrupted; the rows measured so far are in {out}")
