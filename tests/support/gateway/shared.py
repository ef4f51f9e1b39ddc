"""Several processes of one gateway inside one: each with a fleet of its own over shared counts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from slagate.pools.fleet.fleet import Fleet, prepare
from slagate.pools.fleet_file.load import FleetConfig
from slagate.pools.inflight.shared_counts import SharedCounts, create
from slagate.pools.inflight.shared_table import SharedTable
from slagate.router.multiprocess.peers import PeerProcesses
from support.builders import MODEL, model_info


class Opened:
    """A file of counts. Called with a number it is opened as by that process; None: as by the parent."""

    def __init__(self, folder: Path, n_processes: int) -> None:
        self._path = folder / "counts"
        self._n_processes = n_processes
        self._counts: list[SharedCounts] = []
        create(self._path, n_processes)

    def __call__(self, number: int | None) -> SharedCounts:
        made = SharedCounts(self._path, number, n_processes=self._n_processes)
        self._counts.append(made)
        return made

    def close(self) -> None:
        for each in self._counts:
            each.close()


def peers_of(
    counts: SharedCounts,
    *,
    wake: Callable[[int], None] = lambda _: None,
    now_s: Callable[[], float] = lambda: 0.0,
    admin_path: Callable[[int], Path] = lambda _: Path("/nowhere"),
) -> PeerProcesses:
    """The other processes, as the one that opened the counts sees them."""
    return PeerProcesses(counts, wake=wake, now_s=now_s, admin_path=admin_path)


def shared_fleet(counts: SharedCounts, config: FleetConfig) -> Fleet:
    """The fleet of one process, every worker ready."""
    load_table = partial(SharedTable, shared=counts)
    made = Fleet(prepare(config), load_table=load_table, now_s=lambda: 0.0)
    all_ready(made)
    return made


def all_ready(fleet: Fleet) -> None:
    for each in fleet.members():
        if not each.models:
            each.set_models({MODEL: model_info()})
            each.probe_ok()
