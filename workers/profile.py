"""Timing profiles: measured prefill and inter-token seconds of a model on a GPU, as lookup tables.

Axes and values are interpolated in log space, except the cached-tokens axis, which is linear: it holds
0, and what a cached token adds is one more key to read for each new token, so the cost is linear in it
(`log(1 + x)` would book half of the first 2048 cached tokens' cost on the first 32).
Beyond a table the last two rows of that axis set the slope, never a falling one; `covers_*` says
whether a point lies inside.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ProfileError(ValueError):
    """A profile that cannot be used; the text names the file and the field."""


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


class _Line:
    """Seconds along the first axis at one value of the second: `v[i] * exp(slope[i] * (x - x[i]))`.

    Starting each segment from its own row makes the rows come back bit for bit.
    """

    __slots__ = ("_slopes", "_values_s", "_xs", "first_x", "last_x")

    def __init__(self, rows: Sequence[tuple[float, float]]) -> None:
        self.first_x, self.last_x = rows[0][0], rows[-1][0]
        self._xs = [math.log(x) for x, _ in rows]
        self._values_s = [value_s for _, value_s in rows]
        inner = [
            math.log(b / a) / (x_b - x_a)
            for (x_a, a), (x_b, b) in pairwise(zip(self._xs, self._values_s, strict=True))
        ]
        # Entry 0 serves points below the first row, the last entry those beyond the last row.
        outer = (max(0.0, inner[0]), max(0.0, inner[-1])) if inner else (0.0, 0.0)
        self._slopes = [outer[0], *inner, outer[1]]

    def at(self, log_x: float) -> float:
        """Seconds at `log_x`."""
        i = bisect_right(self._xs, log_x)
        row = i - 1 if i else 0
        return self._values_s[row] * math.exp(self._slopes[i] * (log_x - self._xs[row]))


class _Table:
    """A ragged two-axis table: lines along x, ordered by y. `ys` are already in the axis's space."""

    __slots__ = ("_lines", "_log_y", "_raw_ys", "_ys")

    def __init__(self, rows: Sequence[tuple[int, int, float]], *, log_y: bool) -> None:
        by_y: dict[int, list[tuple[float, float]]] = {}
        for x, y, ms in sorted(rows):
            by_y.setdefault(y, []).append((x, ms / 1000.0))
        self._log_y = log_y
        self._raw_ys = sorted(by_y)
        self._ys = [math.log(y) if log_y else float(y) for y in self._raw_ys]
        self._lines = [_Line(by_y[y]) for y in self._raw_ys]

    def at(self, x: float, y: float) -> float:
        """Seconds at (x >= 1, y)."""
        log_x = math.log(x)
        ys = self._ys
        if len(ys) == 1:
            return self._lines[0].at(log_x)
        if self._log_y:
            y = math.log(y)
        i = bisect_right(ys, y) - 1
        # Outside, the nearest two lines still set the slope, measured from the outermost line.
        near = max(0, i)
        low = min(near, len(ys) - 2)
        low_s, high_s = self._lines[low].at(log_x), self._lines[low + 1].at(log_x)
        near_s = low_s if near == low else high_s
        step = (y - ys[near]) / (ys[low + 1] - ys[low])
        if (i < 0 or near != low) and high_s < low_s:
            return near_s
        if self._log_y:
            return near_s * math.exp(step * math.log(high_s / low_s))
        return max(0.0, near_s + step * (high_s - low_s))

    def covers(self, x: float, y: float) -> bool:
        """Whether (x, y) lies between measured rows."""
        i = bisect_right(self._raw_ys, y) - 1
        if i < 0 or y > self._raw_ys[-1]:
            return False
        lines = self._lines[i : i + (1 if y == self._raw_ys[i] else 2)]
        return all(line.first_x <= x <= line.last_x for line in lines)


@dataclass(frozen=True, slots=True)
class TpProfile:
    """Times and KV capacity of one worker: one model, one GPU type, one tensor-parallel size."""

    model: str
    tensor_parallel_size: int
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    _prefill: _Table
    _decode: _Table

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Seconds to prefill `new_tokens` after `cached_tokens` already in the KV cache; 0 for none."""
        if new_tokens < 1:
            return 0.0
        return self._prefill.at(new_tokens, cached_tokens if cached_tokens > 0 else 0.0)

    def itl_s(self, batch_size: float, context_tokens: float) -> float:
        """Seconds of one decode iteration of `batch_size` requests of mean length `context_tokens`."""
        if batch_size < 1:
            return 0.0
        return self._decode.at(batch_size, context_tokens if context_tokens > 1 else 1.0)

    def covers_prefill(self, new_tokens: float, cached_tokens: float) -> bool:
        """Whether `prefill_s` of this point interpolates measurements, rather than extrapolates."""
        return self._prefill.covers(new_tokens, cached_tokens)

    def covers_decode(self, batch_size: float, context_tokens: float) -> bool:
        """Whether `itl_s` of this point interpolates measurements, rather than extrapolates."""
        return self._decode.covers(batch_size, context_tokens)


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
        """The profile of tensor-parallel `size`. Raises `ProfileError` listing the sizes there are."""
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
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc']) or 'file'}: {problem['msg']}"
            for problem in error.errors()
        )
        raise ProfileError(f"profile {text_name}: {problems}") from error
    return Profile(
        name=name,
        model=file.model,
        system=file.system,
        engine=file.engine,
        source=file.source,
        kv_bytes_per_token=file.kv_bytes_per_token,
        tp_sizes={size: _tp_profile(text_name, file, size) for size in sorted(file.tp)},
    )


def _tp_profile(source: str, file: _ProfileFile, size: int) -> TpProfile:
    tp = file.tp[size]
    for field, rows in (("prefill", tp.prefill), ("decode", tp.decode)):
        seen: set[tuple[int, int]] = set()
        for i, (x, y, _) in enumerate(rows):
            if (x, y) in seen:
                raise ProfileError(f"profile {source}: tp.{size}.{field}.{i}: repeats ({x}, {y})")
            if field == "decode" and y < 1:
                raise ProfileError(f"profile {source}: tp.{size}.decode.{i}: context_tokens is 0")
            seen.add((x, y))
    return TpProfile(
        model=file.model,
        tensor_parallel_size=size,
        kv_capacity_tokens=tp.kv_capacity_tokens,
        kv_bytes_per_token=file.kv_bytes_per_token,
        _prefill=_Table(tp.prefill, log_y=False),
        _decode=_Table(tp.decode, log_y=True),
    )
