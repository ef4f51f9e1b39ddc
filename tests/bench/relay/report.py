"""What the rows say: medians, spreads, ratios, and which bounds are missed."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]

RATIO_BOUNDS = {"W1": 1.8, "W1h": 1.6, "W2p": 1.0, "W2s": 1.4, "W3": 5.0}
"""Of CPU of the relay with a fixed choice to that of nginx."""

AIO_BOUND = 15.0
"""W1: of CPU of grpc.aio to that of the relay with a fixed choice, at least."""

ROUTING_BOUNDS_US = {"W1": 60.0, "W3": 150.0}
"""Of routing, a request, on top of a fixed choice."""

NOISE_RATIO = 1.05
"""Routing adds nothing to a message: no more than this to the CPU of one."""

ADDED_BOUND = 2.0
"""W1h: of the latency that the relay adds at the median to what nginx adds."""


def summary(rows: Rows) -> dict[str, Any]:
    """Of one workload: CPU by variant, its ratio to that of nginx, and added latency."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    cpu_us = {name: _values(rows, name, "cpu_us") for name in variants if name != "direct"}
    found: dict[str, Any] = {"cpu_us": {name: _spread(values) for name, values in cpu_us.items()}}
    found["idle_us"] = {name: _values(rows, name, "idle_us") for name in cpu_us}
    if "nginx" in cpu_us:
        found["ratio_to_nginx"] = {
            name: {
                "of_medians": _ratio(statistics.median(us), statistics.median(cpu_us["nginx"])),
                "rounds": [_ratio(a, b) for a, b in zip(us, cpu_us["nginx"], strict=True)],
            }
            for name, us in cpu_us.items()
        }
    latency = {
        name: statistics.median(row["total_ms"]["p50"] for row in rows if row["variant"] == name)
        for name in variants
    }
    found["p50_ms"] = {name: round(value, 4) for name, value in latency.items()}
    if "direct" in latency:
        found["added_p50_ms"] = {
            name: round(value - latency["direct"], 4)
            for name, value in latency.items()
            if name != "direct"
        }
    return found


def lines(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    """A workload's summary for people."""
    for variant, p50_ms in one["p50_ms"].items():
        line = f"{name:4} {variant:9} p50 {p50_ms:9.3f} ms"
        if variant in one["cpu_us"]:
            cpu_us = one["cpu_us"][variant]
            spread = f"{cpu_us['least']:.1f}-{cpu_us['greatest']:.1f}"
            line += f", {cpu_us['median']:8.2f} us ({spread}) a {one['per']}"
        if variant in one.get("ratio_to_nginx", {}):
            line += f", {one['ratio_to_nginx'][variant]['of_medians']:.2f} x nginx"
        yield line


def checks(workloads: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each bound that the run has the figures for."""
    return [
        {"what": what, "found": round(found, 3), "bound": bound, "holds": found <= bound}
        for name, one in workloads.items()
        for what, found, bound in _checks(name, one)
    ]


def _checks(name: str, one: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    cpu_us = {variant: values["median"] for variant, values in one["cpu_us"].items()}
    if "fixed" not in cpu_us:
        return
    fixed_us = cpu_us["fixed"]
    if "nginx" in cpu_us:
        yield f"{name}: CPU, fixed choice to nginx", fixed_us / cpu_us["nginx"], RATIO_BOUNDS[name]
    if "aio" in cpu_us and name == "W1":
        yield f"{name}: CPU, fixed choice to grpc.aio", fixed_us / cpu_us["aio"], 1 / AIO_BOUND
    if "full" in cpu_us and name in ROUTING_BOUNDS_US:
        bound_us = ROUTING_BOUNDS_US[name]
        yield f"{name}: routing on top, us a request", cpu_us["full"] - fixed_us, bound_us
    if "full" in cpu_us and name in ("W2p", "W2s"):
        net_us = {each: cpu_us[each] - statistics.median(one["idle_us"][each]) for each in cpu_us}
        ratio = net_us["full"] / net_us["fixed"]
        yield f"{name}: CPU, routing to fixed choice, without what is idle", ratio, NOISE_RATIO
    added_ms = one.get("added_p50_ms", {})
    if name == "W1h" and "nginx" in added_ms:
        ratio = added_ms["fixed"] / added_ms["nginx"]
        yield f"{name}: added latency, fixed choice to nginx", ratio, ADDED_BOUND


def _values(rows: Rows, variant: str, key: str) -> list[float]:
    of_variant = [row for row in rows if row["variant"] == variant]
    return [row[key] for row in sorted(of_variant, key=lambda row: row["round"])]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 3),
        "least": min(values),
        "greatest": max(values),
        "rounds": list(values),
    }


def _ratio(measured: float, reference: float) -> float:
    return round(measured / reference, 3)
