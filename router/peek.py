"""A look at a response's bytes, for what the relay counts of the many that are alike.

Most responses of a stream are one small token event. To count its tokens costs a parser's objects more than
all else that is done with it. What is not just that is for the parser: `plain_tokens` says so.
"""

TOKEN_TAG = b"\x1a"
"""Of `GenerateResponse.token`: field 3, length-delimited."""

_TOKEN = 0x1A
_OUTPUT_INDEX = 0x08  # TokenOutput.output_index, field 1
_TOKENS = 0x12  # TokenOutput.tokens, field 2
_TEXT = 0x1A  # TokenOutput.text, field 3
_TOKEN_ID = 0x08  # TokenInfo.token_id, field 1
_LONG = 0x80  # this byte of a varint is not its last


def plain_tokens(data: bytes, at: int) -> int:
    """Tokens in a serialised `GenerateResponse` that is one token event from `at` to its end.

    -1 where it may be something else: another field, or one of 128 bytes and more.

    >>> from slagate.proto import openengine_pb2 as oe
    >>> response = oe.GenerateResponse(token={"tokens": [{"token_id": 7}, {"token_id": 300}]})
    >>> plain_tokens(response.SerializeToString(), 0)
    2
    >>> response.usage.cached_prompt_tokens = 3
    >>> plain_tokens(response.SerializeToString(), 0)
    -1
    """
    end = len(data)
    if end < at + 2 or data[at] != _TOKEN or data[at + 1] >= _LONG or data[at + 1] != end - at - 2:
        return -1
    at += 2
    n_tokens = 0
    # A field takes two bytes or more, so that the second one is there.
    while at < end - 1:
        tag, value = data[at], data[at + 1]
        if value >= _LONG:
            return -1
        at += 2
        if tag == _TOKENS:
            if not _is_bare_id(data, at, at + value):
                return -1
            n_tokens += 1
            at += value
        elif tag == _TEXT:
            # What is not ASCII may be no UTF-8, which is for the parser to refuse.
            if not data[at : at + value].isascii():
                return -1
            at += value
        elif tag != _OUTPUT_INDEX:
            return -1
    return n_tokens if at == end else -1


def _is_bare_id(data: bytes, at: int, end: int) -> bool:
    """Whether a `TokenInfo` is nothing but an id, in one varint of up to five bytes."""
    if not at + 2 <= end <= min(at + 6, len(data)) or data[at] != _TOKEN_ID:
        return False
    return data[end - 1] < _LONG and (end == at + 2 or min(data[at + 1 : end - 1]) >= _LONG)
