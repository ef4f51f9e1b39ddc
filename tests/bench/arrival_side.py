"""The processes of `bench.arrivals`: arrivals through the dispatcher of the tree that is on the path.

python arrival_side.py now|before N_WORKERS N_TOKENS alike|mixed
    for each line on stdin a round, as a line of JSON: seconds of each arrival by the clock and of the CPU

It runs with the tree of now, and with that of `arrivals.BEFORE`, whose modules and names are others. So it
imports by name what has moved, and takes the busy fleet from the `bench.decisions` of its tree.
"""

import gc
import importlib
import json
import sys
import time
from functools import partial
from itertools import cycle, islice
from typing import Any

from bench import decisions
from support.builders import MODEL

ARRIVALS = 300
"""Of one round."""

FLEET: dict[str, Any] = {"objectives": {"chat": {"ttft_ms": 4000, "itl_ms": 60, "priority": 1}}}
SCHEDULING = {"scheduling": {"spill": "any", "admission": "on"}}
TTFT_MS = 3000.0
"""The target of each request itself; that of its tokens is its class's. All are met."""

TREES: dict[str, dict[str, str]] = {
    "now": {
        "Dispatcher": "slagate.router.scheduling.dispatcher",
        "RoutingRequest": "slagate.router.scheduling.score",
        "Sla": "slagate.router.request.sla",
    },
    "before": {
        "Dispatcher": "slagate.router.dispatch",
        "Ask": "slagate.router.score",
        "Sla": "slagate.router.sla",
    },
}


def main(tree: str, n_workers: int, n_tokens: int, kinds: str) -> None:
    """Answer rounds until stdin ends."""
    found = [getattr(importlib.import_module(of), name) for name, of in TREES[tree].items()]
    dispatcher_type, request_type, sla_type = found
    more = FLEET | (SCHEDULING if tree == "now" else {})
    decisions.fleet = partial(decisions.fleet, **more)
    scene = decisions.busy_fleet(n_workers, n_tokens)
    if kinds == "mixed":
        decisions.mix_kinds(scene)
    dispatcher = dispatcher_type(scene.fleet, rng=scene.rng)
    ask = request_type(MODEL, n_tokens, sla_type(ttft_ms=TTFT_MS, objective="chat"))

    def arrive(prompt: Any) -> Any:
        with dispatcher.submit(ask, prompt) as pending:
            assert pending.outcome is not None, "it waits"
            pending.outcome.release()
            return pending.outcome.decision

    # As the gateway does once it serves.
    gc.collect()
    gc.freeze()
    prompts = cycle(scene.prompts)
    for prompt in islice(prompts, ARRIVALS):
        decision = arrive(prompt)
        assert tree == "before" or decision.is_met
    for _ in sys.stdin:
        seconds, cpu_s = [], []
        for prompt in islice(prompts, ARRIVALS):
            began_cpu_s, began_s = time.thread_time(), time.perf_counter()
            arrive(prompt)
            seconds.append(time.perf_counter() - began_s)
            cpu_s.append(time.thread_time() - began_cpu_s)
        print(json.dumps([seconds, cpu_s]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
