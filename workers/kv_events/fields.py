"""Readers of the parts of a TensorRT-LLM KV event. Each checks what it reads: versions differ."""

import re
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from typing import Any, NoReturn, TypeGuard

from slagate.workers.kv_events.wire import token_field, token_fields

MAX_TEXT_BYTES = 4096
"""Of a cache salt, adapter name or multimodal key: clients choose them, and each block repeats them."""

MAX_KEYS_BYTES = 65_536
"""Of all extra keys of a block, so that a block always fits a message."""

TURN_WORK = 32_768
"""Work of one turn of the loop, in tokens of stored blocks: a few milliseconds, so that neither a full
buffer of events nor a long prompt holds up the tokens of requests."""

_EVENT_WORK = 32
BLOCK_WORK = 32
HASH_WORK = 8

_WORD_BITS = 64
_WORD = (1 << _WORD_BITS) - 1
_DECIMAL = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII | re.IGNORECASE)
_token_id = itemgetter("token_id")
_extra_id = itemgetter("token_extra_id")


class UnusableError(Exception):
    """An event, or a part, cannot be used; the argument names its count in `Normaliser.counts`."""


def unusable(counter: str = "decode_errors") -> NoReturn:
    """Raise `UnusableError`, to be counted under this name in `Normaliser.counts`."""
    raise UnusableError(counter)


def work_of(event: object) -> int:
    """The work of reading and publishing any event, in units of one token of a stored block."""
    data = event.get("data") if isinstance(event, dict) else None
    if not isinstance(data, dict):
        return _EVENT_WORK
    hashes, blocks = data.get("block_hashes"), data.get("blocks")
    n_hashes = len(hashes) if isinstance(hashes, list) else 0
    work = _EVENT_WORK + HASH_WORK * n_hashes
    for block in blocks if isinstance(blocks, list) else ():
        tokens = block.get("tokens") if isinstance(block, dict) else None
        work += BLOCK_WORK + (len(tokens) if isinstance(tokens, list) else 0)
    return work


def list_of(value: object) -> list[Any]:
    """The value, which must be a list. Like all readers here, it raises `UnusableError` for others."""
    if not isinstance(value, list):
        unusable()
    return value


def hash_of(value: object) -> int:
    """A hash as an unsigned 64-bit number; some versions write it signed, or as text.

    Of a SHA-256 in hexadecimal (`v2_sha256`) it is the first 8 bytes: what `v2_sha256_64` gives.
    """
    if type(value) is int and 0 <= value <= _WORD:
        return value  # as nearly all are
    if type(value) is str:
        if _DECIMAL.fullmatch(value):
            value = int(value)
        elif _DIGEST.fullmatch(value):
            value = int(value[:16], 16)
    if not _is_word(value):
        unusable()
    return value & _WORD


def _is_word(value: object) -> TypeGuard[int]:
    """Whether it is an integer, not a bool, of at most 64 bits, signed or unsigned."""
    return type(value) is int and -(1 << _WORD_BITS - 1) <= value < 1 << _WORD_BITS


def text_of(value: object) -> str:
    """The value as a string for a message; None becomes the empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        unusable()
    if len(value.encode(errors="replace")) > MAX_TEXT_BYTES or not _is_unicode(value):
        unusable("dropped_events")
    return value


def _is_unicode(text: str) -> bool:
    # Half of a surrogate pair, as JSON may carry it, has no UTF-8 form.
    return not any("\ud800" <= char <= "\udfff" for char in text)


def content_of(tokens: list[Any], mm_keys: object) -> tuple[bytes, tuple[str, ...]]:
    """The tokens of a full block as `token_field` encodes them, and its extra keys."""
    try:
        ids = list(map(_token_id, tokens))
    except (TypeError, KeyError):
        unusable()
    return content_of_ids(ids, mm_keys, _extra_keys(tokens))


def plain_contents(blocks: list[Any], block_tokens: int) -> list[bytes]:
    """`content_of` for an event's leading full blocks at once; [] where any token is not as most are."""
    try:
        chains = [block["tokens"] for block in blocks]
        if chains and len(chains[-1]) < block_tokens:
            del chains[-1]
        tokens = list(chain.from_iterable(chains))
        ids = list(map(_token_id, tokens))
        is_plain = {*map(type, ids)} == {int} and not any(map(_extra_id, tokens))
        if is_plain and {*map(type, chains)} == {list} and {*map(len, chains)} == {block_tokens}:
            return token_fields(ids, block_tokens)
    except (TypeError, KeyError, OverflowError):
        pass  # for `content_of` to say what it is
    return []


def content_of_ids(
    ids: list[Any], mm_keys: object, more_keys: Iterable[str]
) -> tuple[bytes, tuple[str, ...]]:
    """The token ids of a full block as `token_field` encodes them, and its extra keys with `more_keys`.

    The V2 cache manager writes the digest of a picture in place of the picture's first token. The digest
    becomes a key, and the token 0.
    """
    digests: list[str] = []
    if set(map(type, ids)) != {int}:
        digests = _take_digests(ids)
    try:
        field = token_field(ids)
    except ValueError:
        unusable("dropped_events")
    keys = [] if mm_keys is None else [name for key in list_of(mm_keys) for name in _mm_key(key)]
    keys += digests
    keys += more_keys
    if sum(map(len, keys)) > MAX_KEYS_BYTES:
        unusable("dropped_events")
    return field, tuple(keys)


def _take_digests(ids: list[Any]) -> list[str]:
    """Replace digests among token ids by 0. A key for each, spelled in lower case."""
    keys = []
    for at, one in enumerate(ids):
        if isinstance(one, str) and _DIGEST.fullmatch(one):
            ids[at] = 0
            keys.append(f"mm_token={one.lower()}@{at}")
        elif type(one) is not int:
            unusable("dropped_events")
    return keys


def _extra_keys(tokens: list[dict[str, Any]]) -> list[str]:
    """Keys for virtual tokens (prompt tables), which share token ids and differ only in their extra id."""
    try:
        if not any(map(_extra_id, tokens)):
            return []
    except KeyError:
        pass  # some tokens have no extra id
    extras = [(token.get("token_extra_id"), at) for at, token in enumerate(tokens)]
    if not all(extra is None or _is_word(extra) for extra, _ in extras):
        unusable("dropped_events")
    return [f"token_extra={extra}@{at}" for extra, at in extras if extra]


def _mm_key(key: object) -> list[str]:
    """`mm=<hash>@<offset>`, and `mm_uuid=<uuid>@<offset>` where the engine has the caller's own name.

    The hash must be a SHA-256. Where the caller gave a name, the V1 cache manager writes that in its place,
    and two pictures of one name would look alike.
    """
    if not isinstance(key, dict) or not _is_word(key.get("start_offset")):
        unusable("dropped_events")
    uuid, offset, name = text_of(key.get("uuid")), key["start_offset"], key.get("hash")
    if not isinstance(name, str) or not _DIGEST.fullmatch(name):
        unusable("dropped_events")
    made = [f"mm={name.lower()}@{offset}"]
    return [*made, f"mm_uuid={uuid}@{offset}"] if uuid else made
