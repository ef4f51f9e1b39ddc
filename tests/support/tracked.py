"""What the garbage collector has to walk, and what is in memory at all."""

import gc
import sys
from collections import Counter


def tracked() -> Counter[str]:
    """Objects that a full collection walks, by type, once it has looked at them."""
    # Tuples of what is not tracked are let go of as they are met, the inner ones first.
    for _ in range(2):
        gc.collect()
    return Counter(type(each).__qualname__ for each in gc.get_objects())


def allocated() -> int:
    """Blocks of memory in use, tracked or not."""
    gc.collect()
    return sys.getallocatedblocks()
