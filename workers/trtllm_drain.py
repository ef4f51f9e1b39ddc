"""The end of a prefill worker: not before others have fetched what it parked.

A decode worker reads the prefill worker's GPU memory while it fetches, and TensorRT-LLM has no word for
"fetched". Its iteration statistics count a request as active until then, as Dynamo's worker relies on too.
"""

import anyio

from slagate.workers.trtllm_handoffs import Handoffs
from slagate.workers.trtllm_poll import NewestRows

LOOK_S = 0.5
"""Between looks at the time limits of handoffs, where no statistics come."""


async def fetched(rows: NewestRows, handoffs: Handoffs) -> None:
    """Return when the engine counts nothing any more, or every handoff is past its time limit.

    Only statistics that came since the call count; an engine that gives none leaves the limit.
    """
    rows.of_rank.clear()
    while handoffs.n_parked and not rows.say_idle():
        with anyio.move_on_after(LOOK_S):
            await rows.changed()
