"""A gateway that drains under a steady load of grpcio clients: none of them sees an error."""

from pathlib import Path

import anyio
import grpc
import pytest
import uvloop

from slagate.router.app import _drain
from support.builders import request
from support.gateway.grpc_gateway import Order, aio_worker, until, whole
from support.http2.grpc_clients import Connect, aio_client, rest, sync_client
from support.limits import HANG_S

N_AT_ONCE = 8
POLICIES = {"pick_first": (), "round_robin": (("grpc.lb_policy_name", "round_robin"),)}


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("connect", [sync_client, aio_client])
def test_ops_a_drain_costs_no_client_an_error(
    connect: Connect, options: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    async def main() -> None:
        folders = [tmp_path / name for name in ("a", "b")]
        for folder in folders:
            folder.mkdir()
        ended: list[grpc.StatusCode] = []
        with anyio.fail_after(HANG_S):
            async with (
                whole(folders[0], aio_worker) as leaves,
                whole(folders[1], aio_worker) as stays,
                connect(f"ipv4:{leaves.address},{stays.address}", *options) as client,
            ):
                is_over = False

                async def load() -> None:
                    while not is_over:
                        order = Order(n_messages=len(ended) % 5)
                        data = request().SerializeToString()
                        call = client.generate(data, metadata=order.metadata)
                        messages = await rest(call)
                        code, details, _ = await call.end()
                        assert code is grpc.StatusCode.OK, (code, details, len(ended))
                        assert len(messages) == order.n_messages + 1
                        ended.append(code)

                async with anyio.create_task_group() as tasks:
                    for _ in range(N_AT_ONCE):
                        tasks.start_soon(load)
                    await until(lambda: len(leaves.worker.requests) > 200)
                    await _drain(leaves.front, leaves.app.gateway, HANG_S)
                    assert not leaves.front.clients
                    n_before = len(ended)
                    await until(lambda: len(ended) > n_before + 200)
                    is_over = True
                await stays.free()
                done = leaves.outcomes()["completed"] + stays.outcomes()["completed"]
                assert done == len(ended)

    anyio.run(main, backend_options={"loop_factory": uvloop.new_event_loop})
