"""Large requests, slow readers, noisy logs and hostile bytes."""

import json
import pickle
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.engine.tokens import expected, prompt
from support.gateway.foreign_client import (
    Client,
    decode_leg,
    prefill_leg,
    read,
    read_tokens,
    request,
)
from support.gateway.processes import Cluster, Pool, cluster, eventually
from support.gateway.receipts import ASK, receipt_of
from support.limits import HANG_S

# Each relayed message carries the client's id, so that a thousand of them are more than the buffer.
LONG_ID = "x" * 1000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A very fast worker with room for millions of tokens, and a gateway that lets 16 MB in."""
    room = ("--max-seq-len", "4000000", "--kv-blocks", "130000", "--time-scale", "0.001")
    folder = tmp_path_factory.mktemp("wide")
    with cluster(folder, {"a": Pool("agg", 1, room)}, "--max-request-bytes", "16000000") as running:
        yield running


def test_stream_07_a_request_of_6_mb_passes_every_hop(wide: Cluster) -> None:
    """STREAM-07: no hop has gRPC's own limit of 4 MB."""
    tokens = [(i * 48_271) % 100_000 + 20_000 for i in range(2_000_000)]
    message = request(tokens, 3)
    assert 6_000_000 <= message.ByteSize() <= 6_100_000
    with Client(wide.gateway.address) as client:
        assert client.generate(message).tokens == expected(tokens, 3)


def test_stream_07_a_request_over_the_limit_is_refused_with_both_numbers(wide: Cluster) -> None:
    message = request([100_000] * 5_400_000, 3)
    with Client(wide.gateway.address) as client:
        answer = client.generate(message)
    assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(message.ByteSize()) in answer.details
    assert "16000000" in answer.details


def test_stream_05_a_slow_reader_ends_and_others_do_not_notice(wide: Cluster) -> None:
    """STREAM-05: its buffer is bounded, its end has words, the worker is let go."""
    slow_before = wide.gateway.outcomes("slow_client")
    with Client(wide.gateway.address) as slow, Client(wide.gateway.address) as other:
        rss_bytes = wide.gateway.process.rss_bytes()
        call = slow.start(request(prompt(50), 200_000, request_id=LONG_ID))
        read_tokens(call, 1)
        for number in range(5):
            tokens = prompt(60, seed=300 + number)
            assert other.generate(request(tokens, 100)).tokens == expected(tokens, 100)
        eventually(
            lambda: wide.gateway.outcomes("slow_client") == slow_before + 1,
            "the slow stream is ended",
        )
        assert wide.gateway.process.rss_bytes() - rss_bytes < 50 << 20
        eventually(wide.gateway.is_idle, "nothing is leased")
        with Client(wide.addresses("a")[0]) as worker:
            eventually(lambda: worker.load().running_requests == 0, "the worker is let go")
        answer = read(call)
    assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "reads too slowly" in answer.details
    assert "finished" not in answer.events


def test_peer_03_healthy_requests_are_quiet(disagg: Cluster, disagg_client: Client) -> None:
    """PEER-03: at the default log level, no warning, and at most one line a request."""
    everyone = [disagg.gateway.process, *disagg.workers["p"], *disagg.workers["d"]]
    eventually(disagg.gateway.is_idle, "what other tests left is over")
    sizes = [process.stderr_size() for process in everyone]
    n_requests = 200
    calls = [
        disagg_client.start(request(prompt(20, seed=n), 3, request_id=f"quiet-{n}"))
        for n in range(n_requests)
    ]
    assert all(len(read(call).tokens) == 3 for call in calls)
    eventually(disagg.gateway.is_idle, "nothing is leased")
    for process, size in zip(everyone, sizes, strict=True):
        lines = [json.loads(line) for line in process.stderr(size).splitlines()]
        # The fleet may still be coming up around the first of them.
        # And how fast this machine is may be other than predicted.
        of_the_fleet = (
            "member.state",
            "events.mode",
            "predictions.fell_back",
            "predictions.recovered",
        )
        lines = [line for line in lines if line["event"] not in of_the_fleet]
        # The last words on other tests' requests may come now: these all have the same id, ours do not.
        each = Counter(line.get("request_id") for line in lines)
        each.pop("r-1", None)
        assert set(each.values()) <= {1}, f"{process.name}: {each.most_common(3)}"
        assert None not in each, f"{process.name}: {lines[-3:]}"
        assert {line["level"] for line in lines} <= {"INFO"}, process.name


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return (Path.mkdir, (self._marker,))


def send(address: str, data: bytes) -> None:
    """Send raw bytes and wait for the other side's end."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        except ConnectionError:
            pass  # hung up on, which is as good an answer


def test_secmm_03_pickles_are_only_bytes(disagg: Cluster, tmp_path: Path) -> None:
    """SECMM-03: to every port, as a request, and inside a handoff; then everything still serves."""
    marker = tmp_path / "marker"
    pickled = pickle.dumps(Bomb(marker))
    # Of odd length, however long the path is: its hex digits are no base64 then, which the worker refuses.
    # Bytes that its engine gets and cannot read end the engine, as they do TensorRT-LLM's.
    pickled += b"." * (len(pickled) % 2 == 0)
    pickle.loads(pickled)
    assert marker.is_dir()
    marker.rmdir()

    served = disagg.gateway
    p, d = disagg.addresses("p")[0], disagg.addresses("d")[0]
    for address in (served.address, served.admin_address, served.http_address, p, d):
        send(address, pickled)
        send(address, pickled + b"\r\n\r\n")
    with Client(served.address) as client, Client(p) as prefill, Client(d) as decode:
        for target in (client, prefill, decode):
            assert read(target.start_bytes(pickled)).code is grpc.StatusCode.INVALID_ARGUMENT
        message = request(prompt(40), 5)
        session = prefill.generate(prefill_leg(message)).session
        forged = type(session)()
        forged.CopyFrom(session)
        forged.attributes_struct["opaque_state"] = pickled.hex()
        assert decode.generate(decode_leg(message, forged)).failed
        prefill.control("Abort", kv_session=session)
        assert client.generate(message).tokens == expected(prompt(40), 5)
    assert not marker.exists()
    assert served.is_ready()
    assert len(served.workers()) == 4
    for process in (served.process, *disagg.workers["p"], *disagg.workers["d"]):
        assert process.popen.poll() is None
        assert "Traceback" not in process.stderr()


def test_the_gateways_own_limit_says_so_and_leaves_its_receipt(tmp_path: Path) -> None:
    """STREAM-01: a client without a deadline, and a worker that takes longer than is allowed."""
    slow = Pool("agg", 1, ("--time-scale", "200"))
    with (
        cluster(tmp_path, {"a": slow}, "--default-timeout", "0.5") as fleet,
        Client(fleet.gateway.address) as client,
    ):
        call = client.start(request(prompt(50)), ASK, timeout_s=None)
        answer = read(call)
        assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert answer.details == "the limit of 0.500 s has passed"
        # The worker that took too long is named.
        (attempt,) = receipt_of(answer).attempts
        assert (attempt.worker, attempt.status) == (fleet.addresses("a")[0], "CANCELLED")
        eventually(fleet.gateway.is_idle, "nothing is held")
