import os
from pathlib import Path

from slagate.router.reload.reload import FleetSource


def test_a_file_put_in_place_of_another_is_seen_though_size_and_time_are_the_same(
    tmp_path: Path,
) -> None:
    """An editor's save, or a volume that is switched over, with the times kept."""
    path, other = tmp_path / "fleet.json", tmp_path / "new.json"
    path.write_text("{}")
    other.write_text("[]")
    source = FleetSource(path, lenient=False, pools=None, workers={})
    before, found = source.stamp(), path.stat()
    assert source.stamp() == before
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert source.stamp() != before


def test_each_file_counts_and_one_that_is_not_there_has_a_stamp_of_its_own(tmp_path: Path) -> None:
    path, pools = tmp_path / "fleet.json", tmp_path / "pools.json"
    path.write_text("{}")
    source = FleetSource(path, lenient=False, pools=pools, workers={})
    stamps = [source.stamp()]
    pools.write_text("{}")
    stamps.append(source.stamp())
    found = pools.stat()
    pools.write_text("{ }")
    os.utime(pools, ns=(found.st_atime_ns, found.st_mtime_ns))
    stamps.append(source.stamp())
    os.utime(path, ns=(0, 0))
    stamps.append(source.stamp())
    assert [stamps.count(each) for each in stamps] == [1, 1, 1, 1]
