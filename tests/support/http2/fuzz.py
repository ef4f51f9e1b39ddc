"""What is wrong with bytes that a peer sends: recorded conversations with a few things spoilt."""

import asyncio
import random

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frames(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        found.append(data[at:end])
        at = end
    return found


def random_frame(rng: random.Random) -> bytes:
    payload = rng.randbytes(rng.choice((0, 4, 5, 8, 40)))
    kind, flags = rng.randrange(12), rng.choice((0, 1, 4, 5, 8, 0x20))
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags, 0, 0, 0, rng.randrange(8)))
    return head + payload


def spoilt(data: bytes, rng: random.Random) -> bytes:
    """The same with a few things wrong, of frames or of bytes."""
    parts = frames(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(parts))
        frame = bytearray(parts[at])
        if not frame:
            continue
        match rng.randrange(11):
            case 0:
                parts.pop(at) if len(parts) > 1 else None
            case 1:
                parts.insert(rng.randrange(len(parts) + 1), bytes(frame))
            case 2:
                other = rng.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                frame[3:4] = bytes((rng.randrange(14),))  # the type
                parts[at] = bytes(frame)
            case 4:
                frame[4:5] = bytes((rng.randrange(256),))  # the flags
                parts[at] = bytes(frame)
            case 5:
                frame[5:9] = rng.choice((0, 1, 2, 3, 9, 99, 1 << 31)).to_bytes(4, "big")
                parts[at] = bytes(frame)
            case 6:
                for _ in range(rng.choice((1, 3))):
                    frame[rng.randrange(len(frame))] = rng.randrange(256)
                parts[at] = bytes(frame)
            case 7:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                parts[at] = bytes(frame)
            case 8:
                parts[at] = bytes(frame[: rng.randrange(len(frame) + 1)])
            case 9:
                # All that comes behind it is gone, maybe within it.
                parts[at:] = [bytes(frame[: rng.randrange(len(frame) + 1)])]
            case _:
                parts.insert(at, random_frame(rng))
    return b"".join(parts) or b"\0"


def spoilt_client(said: bytes, rng: random.Random) -> bytes:
    """Of a client: behind its preface, mostly."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(200))
    return PREFACE + spoilt(said[len(PREFACE) :], rng)


def spoilt_server(said: bytes, rng: random.Random) -> bytes:
    """Of a server: behind its first settings, mostly."""
    if rng.random() < 0.1:
        return spoilt(said, rng)
    first_bytes = len(frames(said)[0])
    return said[:first_bytes] + spoilt(said[first_bytes:], rng)


class Replay(asyncio.Protocol):
    """Says these bytes in pieces, whatever it is told."""

    def __init__(self, data: bytes, rng: random.Random, first_bytes: int = 0) -> None:
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 4, 30))))
        ends = [first_bytes, *(cut for cut in cuts if cut > first_bytes), len(data)]
        starts = [0, *ends[:-1]]
        self._pieces = [data[start:end] for start, end in zip(starts, ends, strict=True)]
        self._says_goodbye = rng.random() < 0.5

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        loop = asyncio.get_running_loop()
        for at, piece in enumerate(self._pieces):
            loop.call_later(0.001 * at, transport.write, piece)
        if self._says_goodbye:
            loop.call_later(0.001 * len(self._pieces), transport.close)
