"""A look at a response's bytes, for what the relay counts of the many that are alike.

Most responses of a stream are one small token event. To count its tokens costs a parser's objects more than
all else that is done with it. What is not just that is for the parser: `plain_tokens` says so.
"""

import re

TOKEN_TAG = b"\x1a"
"""Of `GenerateResponse.token`: field 3, length-delimited."""

_ID = (
    rb"\x12(?:\x02\x08[\x00-\x7f]|\x03\x08[\x80-\xff][\x00-\x7f]|\x04\x08[\x80-\xff]{2}[\x00-\x7f]"
    rb"|\x05\x08[\x80-\xff]{3}[\x00-\x7f]|\x06\x08[\x80-\xff]{4}[\x00-\x7f])"
)
"""TokenOutput.tokens, field 2: a `TokenInfo` with an id, field 1, of up to five bytes, and nothing else."""

_beginning = re.compile(
    rb"\x1a[\x00-\x7f](?:\x08[\x00-\x7f])?"  # the event; TokenOutput.output_index, field 1
    rb"((?:" + _ID + rb")*)"
    rb"(?:\x1a[\x00-\x7f])?",  # TokenOutput.text, field 3
    re.DOTALL,
).match
_ids = re.compile(_ID, re.DOTALL).findall

_TWO_IDS_BYTES = 8
"""Of the shortest two ids; the longest one has as many."""


def plain_tokens(data: bytes, at: int) -> int:
    """Tokens in a serialised `GenerateResponse` that is one token event from `at` to its end.

    -1 where it may be something else: another field, one of 128 bytes and more, another order of fields.

    >>> from slagate.proto import openengine_pb2 as oe
    >>> response = oe.GenerateResponse(token={"tokens": [{"token_id": 7}, {"token_id": 300}]})
    >>> plain_tokens(response.SerializeToString(), 0)
    2
    >>> response.usage.cached_prompt_tokens = 3
    >>> plain_tokens(response.SerializeToString(), 0)
    -1
    """
    found = _beginning(data, at)
    if found is None or data[at + 1] != len(data) - at - 2:
        return -1
    ids_at, ids_end = found.span(1)
    end = found.end()
    if end == ids_end:
        if end != len(data):
            return -1
    # What is not ASCII may be no UTF-8, which is for the parser to refuse.
    elif data[end - 1] != len(data) - end or not data[end:].isascii():
        return -1
    n_bytes = ids_end - ids_at
    if n_bytes < _TWO_IDS_BYTES:
        return 1 if n_bytes else 0
    return len(_ids(data, ids_at, ids_end))
