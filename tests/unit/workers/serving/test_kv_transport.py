"""Which transport is opened, and what of the environment is told and set."""

import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slagate.workers.kv_transfer.nixl.ucx import (
    PROGRESS_DELAY_US,
    Nixl,
    has_gpu,
    make_agent,
    set_defaults,
    ucx_warnings,
)
from slagate.workers.kv_transfer.transport import KvTransport, KvUnavailable
from slagate.workers.serving.sim import open_transport
from support.limits import HANG_S


def test_nixl_is_installed_where_there_is_a_wheel_of_it() -> None:
    """Otherwise all that is said about it here would pass without being looked at."""
    if sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}:
        assert find_spec("nixl_cu13") is not None, "make dev installs it"


def opened(wanted: str) -> tuple[KvTransport, str]:
    transport, why = open_transport(
        wanted, worker_name="w", loopback=True, block_bytes=64, pull_limit_s=HANG_S
    )
    assert transport is not None
    return transport, why


def test_auto_is_nixl_where_it_works() -> None:
    transport, why = opened("auto")
    assert (transport.name, why, transport.problem()) == ("NIXL", "", "")
    transport.close()


def test_shared_memory_can_be_asked_for() -> None:
    transport, why = opened("shm")
    assert (transport.name, why) == ("SHM", "shared memory was asked for")
    transport.close()


def test_without_nixl_auto_is_shared_memory_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", None)
    transport, why = opened("auto")
    assert transport.name == "SHM"
    assert "nixl_cu13 cannot be imported" in why
    transport.close()
    with pytest.raises(KvUnavailable, match="cannot be imported"):
        opened("nixl")


def test_a_nixl_of_another_shape_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its start raises: not the limit of the start is the reason, but what was raised."""
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", SimpleNamespace())
    transport, why = opened("auto")
    assert transport.name == "SHM"
    assert "nixlBind" in why
    transport.close()
    with pytest.raises(KvUnavailable, match="nixlBind"):
        opened("nixl")


def test_without_memory_for_the_pool_auto_is_shared_memory() -> None:
    options: dict[str, Any] = {"worker_name": "w", "loopback": True, "pull_limit_s": HANG_S}
    huge: dict[str, Any] = {"block_bytes": 1 << 40, "n_slots": 1 << 40}
    transport, why = open_transport("auto", **options, **huge)
    assert transport is not None
    assert transport.name == "SHM"
    assert "no memory for a pool" in why
    transport.close()
    with pytest.raises(KvUnavailable, match="no memory"):
        open_transport("nixl", **options, **huge)


def test_a_self_check_that_finds_no_room_falls_back_too() -> None:
    """A block of it has 8 bytes."""
    sizes = {"block_bytes": 4, "pull_limit_s": HANG_S}
    transport, why = open_transport("auto", worker_name="w", loopback=True, **sizes)  # type: ignore[arg-type]
    assert transport is not None
    assert (transport.name, "do not fit into slots of 4" in why) == ("SHM", True)
    transport.close()
    with pytest.raises(KvUnavailable, match="do not fit"):
        open_transport("nixl", worker_name="w", loopback=True, **sizes)  # type: ignore[arg-type]


OPEN = """
import logging
from slagate.workers.serving.sim import open_transport
logging.basicConfig(format="%(message)s")
transport, why = open_transport("auto", worker_name="w", loopback=True, block_bytes=64, pull_limit_s=5.0)
transport.close()
print(transport.name, "|", why)
"""


def test_an_environment_that_breaks_nixl_is_told_and_survived() -> None:
    """ENGINE-09, with shared memory alone instead of plain TCP alone."""
    process = subprocess.run(
        [sys.executable, "-c", OPEN],
        env={"UCX_TLS": "posix", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    name, why = process.stdout.strip().split(" | ")
    assert (name, why.split(":")[0]) == ("SHM", "NIXL agent cannot start")
    assert "UCX_TLS=posix has no tcp" in process.stderr


@pytest.mark.parametrize(
    ("ucx_tls", "gpu", "missing"),
    [
        (None, True, []),
        ("all", True, []),
        ("tcp,cma", False, []),
        ("tcp,cma", True, ["cuda_copy"]),
        ("tcp", False, ["cma"]),
        ("tcp", True, ["cma", "cuda_copy"]),
        ("sm,self", False, ["tcp"]),
        ("posix,cma,cuda_copy", True, ["tcp"]),
        ("rc_x,sm,cuda", True, []),
        ("tcp:aux, sm", False, []),
        ("^tcp", False, ["tcp"]),
        ("^cma", False, ["cma"]),
        ("^sm,posix", False, ["cma"]),
        ("^cuda", True, ["cuda_copy"]),
        ("^ib,posix", True, []),
        ("", False, ["tcp", "cma"]),
    ],
)
def test_each_transport_that_the_operator_left_out_is_named(
    ucx_tls: str | None,
    gpu: bool,  # noqa: FBT001
    missing: list[str],
) -> None:
    """ENGINE-09."""
    environ = {} if ucx_tls is None else {"UCX_TLS": ucx_tls}
    warnings = ucx_warnings(environ, gpu=gpu)
    assert [text.split(" has no ")[1].split(":")[0] for text in warnings] == missing


def test_what_the_operator_set_stays() -> None:
    theirs = {
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "eth1",
        "UCX_LOG_LEVEL": "debug",
        "UCX_LOG_FILE": "ucx.log",
        "NIXL_LOG_LEVEL": "TRACE",
    }
    environ = dict(theirs)
    set_defaults(environ, loopback=True, gpu=True)
    assert environ == theirs


def test_defaults_fit_the_machine() -> None:
    here: dict[str, str] = {}
    set_defaults(here, loopback=True, gpu=False)
    assert (here["UCX_TLS"], here["UCX_NET_DEVICES"]) == ("tcp,cma", "lo")
    there: dict[str, str] = {}
    set_defaults(there, loopback=False, gpu=True)
    assert there["UCX_TLS"] == "tcp,cma,cuda_copy"
    assert "UCX_NET_DEVICES" not in there


def test_a_gpu_is_seen_by_its_driver(tmp_path: Path) -> None:
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert has_gpu(tmp_path)


class FakeApi:
    """As much of NIXL's module as making an agent needs; `through` is whether it asks the bindings."""

    def __init__(self, *, through: bool, backends: tuple[str, ...] = ("UCX",)) -> None:
        self.nixlBind: Any = SimpleNamespace(nixlAgent=lambda name, config: (name, config))
        self.configs: list[dict[str, Any]] = []
        self.delays: list[int] = []
        self._through = through
        self._backends = backends

    def nixl_agent_config(self, **options: Any) -> dict[str, Any]:
        return options

    def nixl_agent(self, name: str, config: dict[str, Any]) -> Any:
        self.configs.append(config)
        if self._through:
            settings = SimpleNamespace(pthrDelay=0)
            self.nixlBind.nixlAgent(name, settings)
            self.delays.append(settings.pthrDelay)
        return SimpleNamespace(backends=self._backends)


def made(api: FakeApi) -> bool:
    """Whether the agent makes progress by itself."""
    return make_agent(Nixl(api, api.nixlBind, ()), "a").progresses


def test_the_progress_thread_rests_between_looks() -> None:
    api = FakeApi(through=True)
    real = api.nixlBind
    assert made(api)
    assert api.delays == [PROGRESS_DELAY_US]
    assert api.nixlBind is real


def test_an_agent_made_in_another_way_gets_no_progress_thread_that_spins() -> None:
    api = FakeApi(through=False)
    assert not made(api)
    assert api.configs[-1]["enable_prog_thread"] is False


def test_an_agent_without_its_backend_is_of_no_use() -> None:
    with pytest.raises(KvUnavailable, match="no UCX backend"):
        made(FakeApi(through=True, backends=()))
