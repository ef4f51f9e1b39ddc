"""A request's way through the code, in Python calls and changes of module: it gets no longer unnoticed."""

from slagate.workers.runtime.virtual_loop import run
from support.gateway.call_counts import Count, count_calls

NEWEST = {
    "to_first_token": Count(321, 204),
    "further_token": Count(19, 9),
    "to_end": Count(146, 107),
}
"""What was counted last. Before names, HTTP/2 and the request's way were rebuilt: 448 and 326 to the first
token, 37 and 26 for a further one, 169 and 121 from the last one to the end."""

MARGIN = 0.05


def test_a_request_passes_as_many_functions_as_it_did() -> None:
    counts = run(count_calls)._asdict()
    for part, newest in NEWEST.items():
        for counted, figure in zip(counts[part], newest, strict=True):
            # Fewer by more are a figure that is not the newest any more.
            assert abs(counted - figure) <= MARGIN * figure, (part, counts[part], newest)
