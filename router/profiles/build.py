"""Builds a timing profile from AIConfigurator's database of TensorRT-LLM kernels, timed on the GPU.

AIConfigurator is an optional extra and is imported only when a profile is built. Its public API is used:
`cli_estimate` in the static modes, and `estimate_kv_cache`.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from itertools import product
from typing import Any, NamedTuple

from slagate.workers.runtime.usage import UsageError

EXTRA = "aiconfigurator"

# A profile interpolates as a power law between rows, so sizes double. In the packaged profiles a row that
# is interpolated from its two neighbours is off by up to 14 % along new tokens and batches and 10 % along
# contexts, but by 3 % along cached tokens, which are linear: those quadruple. Prompts of less than 64
# tokens cost little less: 128 cost at most 16 % more. 256 is the largest batch that engines are planned
# with.
NEW_TOKENS = tuple(2**n for n in range(6, 18))
CACHED_TOKENS = (0, 2048, 8192, 32768)
BATCHES = tuple(2**n for n in range(9))
CONTEXTS = (512, 2048, 8192, 16384, 32768, 65536, 131072)

MAX_PROMPT_TOKENS = 131_072
"""The longest context that the models of the packaged profiles take."""

MAX_BATCH_TOKENS = 2**22
"""The most tokens of all contexts of a batch; beyond it, times are extrapolated."""

KV_MEMORY_RATIO = 0.9
"""The KV cache's share of the memory that is free once the model is loaded: TensorRT-LLM's default."""

_MAX_NUM_TOKENS = 8192
_MAX_BATCH_SIZE = 256


class KvCache(NamedTuple):
    """The KV cache of one worker in tokens, and the bytes of one token on one of its GPUs."""

    capacity_tokens: int
    gpu_bytes_per_token: int


def profile_content(
    model: str,
    system: str,
    tp_sizes: Sequence[int],
    timings: "AiConfigurator",
    *,
    on_size: Callable[[int], None],
) -> dict[str, object]:
    """The content of a profile file; `on_size` is called with each TP size before its rows are looked up.

    Raises `UsageError` naming the row for which AIConfigurator has no number.
    """
    sizes: dict[str, object] = {}
    kv_bytes = 0
    for tp in sorted(set(tp_sizes)):
        on_size(tp)
        prefill = [
            [new, cached, _checked(timings.prefill_ms(tp, new, cached), 4, tp, (new, cached))]
            for cached, new in product(CACHED_TOKENS, NEW_TOKENS)
            if new + cached <= MAX_PROMPT_TOKENS
        ]
        decode = [
            [batch, context, _checked(timings.itl_ms(tp, batch, context), 5, tp, (batch, context))]
            for context, batch in product(CONTEXTS, BATCHES)
            if batch * context <= MAX_BATCH_TOKENS
        ]
        kv_cache = timings.kv_cache(tp)
        # With more GPUs than KV heads some heads are on two of them: least of all at the smallest size.
        kv_bytes = kv_bytes or kv_cache.gpu_bytes_per_token * tp
        sizes[str(tp)] = {
            "kv_capacity_tokens": kv_cache.capacity_tokens,
            "prefill": prefill,
            "decode": decode,
        }
    return {
        "schema": 1,
        "model": model,
        "system": system,
        "engine": timings.engine,
        "source": timings.source,
        "prefill_columns": ["new_tokens", "cached_tokens", "ms"],
        "decode_columns": ["batch_size", "context_tokens", "itl_ms"],
        "kv_bytes_per_token": kv_bytes,
        "tp": sizes,
    }


def _checked(ms: float, digits: int, tp: int, row: tuple[int, int]) -> float:
    # A missing number would make a pool that seems to take no time.
    if not 0.0 < ms < math.inf:
        raise UsageError(f"no time for tp {tp} at {row[0]} x {row[1]} tokens (got {ms})")
    return round(ms, digits)


class AiConfigurator:
    """AIConfigurator's timings of one model on one GPU system, for an idle worker of `tp` GPUs.

    `engine_version` is TensorRT-LLM's; None: the newest that the database has for this system. Raises
    `UsageError` if AIConfigurator is not installed or does not have this model and system; the methods do
    if it does not have a number.
    """

    def __init__(self, model: str, system: str, engine_version: str | None) -> None:
        try:
            api = import_module("aiconfigurator.cli.api")
            memory = import_module("aiconfigurator.sdk.memory")
            models = import_module("aiconfigurator.sdk.models")
            database = import_module("aiconfigurator.sdk.perf_database")
        except ImportError as error:
            raise UsageError(
                f"profile build needs AIConfigurator ({error}): pip install 'slagate[{EXTRA}]',"
                " which needs Python 3.11 to 3.13"
            ) from error
        # AIConfigurator logs each request for a number.
        logging.getLogger("aiconfigurator").setLevel(logging.ERROR)
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        self._estimate: Callable[..., Any] = api.cli_estimate
        self._estimate_kv: Callable[..., Mapping[str, Any]] = memory.estimate_kv_cache
        self._model, self._system = model, system
        with _foreign_errors(f"{model} on {system}"):
            latest = engine_version or database.get_latest_database_version(
                system=system, backend="trtllm"
            )
            self._is_moe = bool(models.check_is_moe(model))
        if not latest:
            raise UsageError(f"AIConfigurator has no TensorRT-LLM database for system {system!r}")
        self._version = str(latest)
        self.engine = f"tensorrt-llm {self._version}"
        modes = "silicon database, static context and generation modes"
        self.source = f"AIConfigurator {version('aiconfigurator')}, {modes}"

    def prefill_ms(self, tp: int, new_tokens: int, cached_tokens: int) -> float:
        """Milliseconds to prefill one prompt of `new_tokens` behind `cached_tokens` in the KV cache."""
        asked = {"isl": new_tokens + cached_tokens, "prefix": cached_tokens, "osl": 1}
        with _foreign_errors(f"prefill of {new_tokens} tokens with tp {tp}"):
            return float(self._static("static_ctx", tp, batch_size=1, **asked).ttft)

    def itl_ms(self, tp: int, batch_size: int, context_tokens: int) -> float:
        """Milliseconds of one decode step of a batch, in which each request has `context_tokens`."""
        # The first of an answer's two tokens comes from the prompt, the second from one step.
        asked = {"isl": context_tokens, "osl": 2, "stride": 1}
        with _foreign_errors(f"batch {batch_size} of {context_tokens} tokens with tp {tp}"):
            return float(self._static("static_gen", tp, batch_size=batch_size, **asked).tpot)

    def kv_cache(self, tp: int) -> KvCache:
        """The KV cache of one worker."""
        with _foreign_errors(f"KV cache with tp {tp}"):
            found = self._estimate_kv(
                self._model,
                self._system,
                "trtllm",
                self._version,
                max_num_tokens=_MAX_NUM_TOKENS,
                max_batch_size=_MAX_BATCH_SIZE,
                memory_fraction_kind="of_free",
                memory_fraction_value=KV_MEMORY_RATIO,
                tp_size=tp,
                **self._experts(tp),
            )
            return KvCache(
                int(found["total_kv_size_tokens"]), int(found["kv_size_per_token_bytes"])
            )

    def _static(self, mode: str, tp: int, **asked: int) -> Any:
        return self._estimate(
            self._model,
            self._system,
            mode=mode,
            backend_version=self._version,
            database_mode="SILICON",
            tp_size=tp,
            **self._experts(tp),
            **asked,
        )

    def _experts(self, tp: int) -> dict[str, int]:
        """How the experts of a mixture-of-experts model are spread: each is on one GPU."""
        return {"moe_tp_size": 1, "moe_ep_size": tp} if self._is_moe else {}


@contextmanager
def _foreign_errors(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # AIConfigurator raises many types, assertions included; each means that it has no such number.
        raise UsageError(f"AIConfigurator has no {what}: {error}") from error
