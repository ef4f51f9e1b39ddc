"""Timing profiles: measured prefill and inter-token seconds of a model on a GPU, as lookup tables.

`table` says how they are read. The cached-tokens axis is linear: it begins at 0, and each cached token is
one more key to read for each new token, so the cost is linear in it (`log(1 + x)` would put half of the
cost of the first 2048 cached tokens on the first 32).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slagate.workers.profiles.table import Floats, Ints, TimingTable
from slagate.workers.runtime.usage import ProfileError

HOST_LINK_BYTES_PER_S = 25e9
"""Bandwidth between a GPU and its host: that of a PCIe 4 x16 link in practice."""

_FEW = 8
"""The most points for which a loop over plain floats is faster than numpy."""

_FAR_TOKENS = 2.0**32
"""More than any prompt, context or batch has: token counts on the wire are 32 bits."""


_Row = tuple[
    Annotated[int, Field(ge=1)],
    Annotated[int, Field(ge=0)],
    Annotated[float, Field(gt=0, allow_inf_nan=False)],
]


class _TpFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kv_capacity_tokens: int = Field(ge=1)
    prefill: list[_Row] = Field(min_length=1)
    decode: list[_Row] = Field(min_length=1)


class _TpJson(_TpFile):
    """The form of `TpProfile.to_json`: one size of a profile file, with what the file has for all."""

    model: str
    tensor_parallel_size: int = Field(ge=1)
    kv_bytes_per_token: int = Field(ge=1)


class _ProfileFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # Named schema in the file; pydantic keeps that attribute name for itself.
    schema_version: Literal[1] = Field(alias="schema")
    model: str = Field(min_length=1)
    system: str
    engine: str
    source: str
    prefill_columns: tuple[Literal["new_tokens"], Literal["cached_tokens"], Literal["ms"]]
    decode_columns: tuple[Literal["batch_size"], Literal["context_tokens"], Literal["itl_ms"]]
    kv_bytes_per_token: int = Field(ge=1)
    tp: dict[Annotated[int, Field(ge=1, strict=False)], _TpFile] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class TpProfile:
    """Times and KV capacity of one worker: one model, one GPU type, one tensor-parallel size."""

    model: str
    tensor_parallel_size: int
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    _prefill: TimingTable
    _decode: TimingTable

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Seconds to prefill `new_tokens` of a prompt after `cached_tokens`; 0 if none are new."""
        if new_tokens < 1:
            return 0.0
        return self._prefill.at(new_tokens, cached_tokens if cached_tokens > 0 else 0.0)

    def itl_s(self, batch_size: float, context_tokens: float) -> float:
        """Seconds of a decode step of `batch_size` requests of mean length `context_tokens`."""
        if batch_size < 1:
            return 0.0
        return self._decode.at(batch_size, context_tokens if context_tokens > 1 else 1.0)

    def prefill_many(self, new_tokens: Floats, cached_tokens: Floats) -> Floats:
        """`prefill_s` of each of n pairs, all f64[n]."""
        if len(new_tokens) <= _FEW:
            return _each(self.prefill_s, new_tokens, cached_tokens)
        seconds = self._prefill.many(np.maximum(new_tokens, 1.0), np.maximum(cached_tokens, 0.0))
        seconds *= new_tokens >= 1
        return seconds

    def itl_of_batches(self, batch_size: Ints, context_tokens: Floats) -> Floats:
        """`itl_s`, f64[n], of n batch sizes >= 1, i64[n], with mean contexts, f64[n]."""
        return self._decode.many_whole(batch_size, np.maximum(context_tokens, 1.0))

    def to_json(self) -> dict[str, object]:
        """The whole profile as JSON values, which `tp_profile_from_json` reads back."""
        return {
            "model": self.model,
            "tensor_parallel_size": self.tensor_parallel_size,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "prefill": [list(row) for row in self._prefill.rows],
            "decode": [list(row) for row in self._decode.rows],
        }


def _each(seconds: Callable[[float, float], float], x: Floats, y: Floats) -> Floats:
    points = zip(x.tolist(), y.tolist(), strict=True)
    return np.array([seconds(a, b) for a, b in points], np.float64)


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile file: where the numbers come from, and a `TpProfile` for each size measured."""

    name: str
    model: str
    system: str
    engine: str
    source: str
    kv_bytes_per_token: int
    tp_sizes: Mapping[int, TpProfile]

    def tp(self, size: int) -> TpProfile:
        """The profile of tensor-parallel `size`. Raises `ProfileError` listing the available sizes."""
        try:
            return self.tp_sizes[size]
        except KeyError:
            sizes = ", ".join(str(n) for n in sorted(self.tp_sizes))
            raise ProfileError(
                f"profile {self.name}: no tensor-parallel size {size}; available: {sizes}"
            ) from None


def available_profiles() -> tuple[str, ...]:
    """Names of the packaged profiles, sorted."""
    folder = resources.files("slagate.configs") / "profiles"
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_profile(name_or_path: str | Path) -> Profile:
    """Load a packaged profile by name, or any file by path (a `Path`, or text with `/` or `.json`).

    Raises `ProfileError` naming the file and each wrong field.
    """
    text_name = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text_name or text_name.endswith(".json"):
        name, source = Path(text_name).stem, Path(text_name)
        try:
            raw = source.read_bytes()
        except OSError as error:
            raise ProfileError(f"profile {text_name}: {error.strerror}") from error
    elif text_name in available_profiles():
        name = text_name
        folder = resources.files("slagate.configs") / "profiles"
        raw = (folder / f"{name}.json").read_bytes()
    else:
        known = ", ".join(available_profiles())
        raise ProfileError(f"profile {text_name!r} is not packaged; available: {known}")
    try:
        file = _ProfileFile.model_validate_json(raw)
    except ValidationError as error:
        raise ProfileError(f"profile {text_name}: {_problems(error)}") from error
    return Profile(
        name=name,
        model=file.model,
        system=file.system,
        engine=file.engine,
        source=file.source,
        kv_bytes_per_token=file.kv_bytes_per_token,
        tp_sizes={size: _tp_profile(text_name, file, size) for size in sorted(file.tp)},
    )


def tp_profile_from_json(value: Mapping[str, object]) -> TpProfile:
    """The profile in what `TpProfile.to_json` gave; it predicts the same numbers to the last bit.

    Raises `ProfileError` naming each wrong field.
    """
    try:
        # Through text: strict models take lists for rows only from there.
        file = _TpJson.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise ProfileError(f"profile table: {_problems(error)}") from error
    return _from_rows("profile table: ", file)


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'file'}: {problem['msg']}"
        for problem in error.errors()
    )


def _tp_profile(source: str, file: _ProfileFile, size: int) -> TpProfile:
    tp = _TpJson(
        model=file.model,
        tensor_parallel_size=size,
        kv_bytes_per_token=file.kv_bytes_per_token,
        **dict(file.tp[size]),
    )
    return _from_rows(f"profile {source}: tp.{size}.", tp)


def _from_rows(where: str, tp: _TpJson) -> TpProfile:
    for field, rows in (("prefill", tp.prefill), ("decode", tp.decode)):
        seen: set[tuple[int, int]] = set()
        for i, (x, y, _) in enumerate(rows):
            if (x, y) in seen:
                raise ProfileError(f"{where}{field}.{i}: repeats ({x}, {y})")
            if field == "decode" and y < 1:
                raise ProfileError(f"{where}decode.{i}: context_tokens is 0")
            seen.add((x, y))
    tables = TimingTable(tp.prefill, log_y=False), TimingTable(tp.decode, log_y=True)
    for field, table in zip(("prefill", "decode"), tables, strict=True):
        if not table.is_finite(_FAR_TOKENS):
            raise ProfileError(f"{where}{field}: rows too steep to go on from: no finite seconds")
    return TpProfile(
        model=tp.model,
        tensor_parallel_size=tp.tensor_parallel_size,
        kv_capacity_tokens=tp.kv_capacity_tokens,
        kv_bytes_per_token=tp.kv_bytes_per_token,
        _prefill=tables[0],
        _decode=tables[1],
    )
