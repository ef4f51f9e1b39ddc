"""Every transfer ends once, rightly and in time, and leaves nothing behind, whatever happens meanwhile."""

from support.kv.transport_chaos import chaos

N_TRANSFERS = 200
SEED = 1


def test_transfers_survive_kills_and_freezes() -> None:
    """DISAGG-08, DISAGG-09: between processes that are killed, frozen and replaced at random."""
    outcome = chaos(SEED, N_TRANSFERS)
    assert outcome.wrong == [], f"seed {SEED}: {outcome}"
    assert outcome.ends["arrived"] > N_TRANSFERS / 2
