"""NIXL transfers between processes that are killed, frozen and replaced at random.

`python -m support.kv.transport_chaos N_TRANSFERS [SEED]`, in tests/, is a longer run than the one among
the tests.
"""

import random
import sys
from collections import Counter
from dataclasses import dataclass, field

from slagate.workers.runtime.clock import monotonic_s
from support.kv.processes import There, blocks_of, call, digest, export, is_whole, pause, wait_for

LIMIT_S = 0.5
MARGIN_S = 4.0
"""What a busy machine may add before an end counts as late."""

SHORT_FREEZE_S = 0.1
LONG_FREEZE_S = 1.5 * LIMIT_S
STALL_S = LIMIT_S / 4
MAX_OPEN = 12
EVENT_RATIO = 0.06


@dataclass(eq=False)
class Transfer:
    """A session and the pull of it."""

    session: int
    n_blocks: int
    owner: There
    puller: There
    pull: int
    late_s: float


@dataclass
class Outcome:
    """How the transfers ended; `wrong` says what should not have been."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Chaos:
    """Two prefill and two decode processes, and what is going on between them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._n_started = 0
        sides = [self._start() for _ in range(4)]
        for side in sides:
            side.wait_ready()
        self.owners, self.pullers = sides[:2], sides[2:]
        self._open: list[Transfer] = []
        self._frozen: dict[There, float] = {}  # Until when.
        # Within the life of one pull: a freeze of either side may be the reason that it was late.
        self._last_thaw_s: dict[There, float] = {}
        self._dead: set[There] = set()
        self._looked_s = self._stalled_s = monotonic_s()
        self._uncollected: dict[int, There] = {}
        self.outcome = Outcome()

    def run(self, n_transfers: int) -> None:
        """Make that many transfers, then let everything come to rest and look at what is left."""
        for session in range(n_transfers):
            if self._rng.random() < EVENT_RATIO:
                self._event()
            while len(self._open) >= MAX_OPEN or not self._begin(session):
                self._advance()
                pause(0.002)
            self._advance()
        while self._open or self._frozen:
            self._advance()
            pause(0.002)
        for session, owner in self._uncollected.items():
            if owner not in self._dead:
                call(owner, "release", session=session)
        for side in [*self.owners, *self.pullers]:
            wait_for(side, "acks", lambda answer: not answer["sessions"])
            wait_for(side, "state", is_whole)

    def close(self) -> None:
        """End the processes, in good order where a test got that far."""
        for side in [*self.owners, *self.pullers]:
            if side in self._frozen or self._open:
                side.kill()
            elif side.finish() != 0:
                self.outcome.wrong.append("a survivor ended with an error")

    def _start(self) -> There:
        self._n_started += 1
        return There(f"chaos{self._n_started}", pull_limit_s=LIMIT_S, n_slots=256)

    def _event(self) -> None:
        sides = self._rng.choice([self.owners, self.pullers])
        index = self._rng.randrange(len(sides))
        side = sides[index]
        what = self._rng.choice(["kill", "short freeze", "short freeze", "long freeze"])
        if what == "kill":
            side.kill()
            self._dead.add(side)
            self._frozen.pop(side, None)
            sides[index] = self._start()
        elif side not in self._frozen and side.is_ready():
            side.freeze()
            for_s = SHORT_FREEZE_S if what == "short freeze" else LONG_FREEZE_S
            self._frozen[side] = monotonic_s() + for_s
        else:
            return
        self.outcome.ends[what] += 1

    def _begin(self, session: int) -> bool:
        """Start a transfer; False when nobody can export now."""
        owners = [side for side in self.owners if side not in self._frozen and side.is_ready()]
        pullers = [side for side in self.pullers if side.is_ready()]
        if not owners or not pullers:
            return False
        owner, puller = self._rng.choice(owners), self._rng.choice(pullers)
        n_blocks = self._rng.randint(1, 8)
        descriptor = export(owner, session, n_blocks=n_blocks)
        if self._rng.random() < 0.1 and owner not in self._frozen:
            # Just before the pull, so that the pull is what hangs.
            owner.freeze()
            self._frozen[owner] = monotonic_s() + self._rng.choice([SHORT_FREEZE_S, LONG_FREEZE_S])
        late_s = monotonic_s() + LIMIT_S + MARGIN_S + LONG_FREEZE_S
        pull = puller.begin("pull", descriptor=descriptor)
        self._open.append(Transfer(session, n_blocks, owner, puller, pull, late_s))
        self._uncollected[session] = owner
        return True

    def _advance(self) -> None:
        now_s = monotonic_s()
        if now_s - self._looked_s > STALL_S:
            # Nothing here waits for so long: the machine was busy elsewhere, for the others as well.
            self._stalled_s = now_s
            self.outcome.ends["stall"] += 1
        self._looked_s = now_s
        for side, until_s in list(self._frozen.items()):
            if until_s <= now_s:
                del self._frozen[side]
                side.thaw()
                self._last_thaw_s[side] = monotonic_s()
        for transfer in list(self._open):
            if transfer.puller in self._dead:
                self._ended(transfer, "puller killed")
            elif transfer.puller.answered(transfer.pull):
                self._judge(transfer)
            elif now_s > transfer.late_s:
                self.outcome.wrong.append(f"session {transfer.session} did not end in time")
                self._ended(transfer, "late")
        for owner in self.owners:
            if owner not in self._frozen and owner.is_ready():
                for session in call(owner, "acks")["sessions"]:
                    self._uncollected.pop(session, None)

    def _judge(self, transfer: Transfer) -> None:
        answer = transfer.puller.end(transfer.pull)
        error, text = answer["error"], answer["text"]
        began_s = transfer.late_s - LIMIT_S - MARGIN_S - LONG_FREEZE_S
        either = (transfer.owner, transfer.puller)
        froze = self._stalled_s >= began_s or any(
            side in self._frozen or self._last_thaw_s.get(side, 0.0) >= began_s for side in either
        )
        if not error:
            right = text == digest(blocks_of(transfer.session, transfer.n_blocks))
        elif error == "KvPeerGone":
            right = transfer.owner in self._dead
        elif error == "KvTimeout":
            # The pool may still be full of what was frozen before.
            right = froze or transfer.owner in self._dead or "the pool was full" in text
        else:
            right = False
        if not right:
            self.outcome.wrong.append(f"session {transfer.session}: {error} {text}")
        self._ended(transfer, error or "arrived")

    def _ended(self, transfer: Transfer, how: str) -> None:
        self.outcome.ends[how] += 1
        self._open.remove(transfer)


def chaos(seed: int, n_transfers: int) -> Outcome:
    """A run and what came of it. Raises `AssertionError` when something is missing at the end."""
    run = Chaos(random.Random(seed))
    try:
        run.run(n_transfers)
    finally:
        run.close()
    return run.outcome


if __name__ == "__main__":
    _seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    _began_s = monotonic_s()
    _outcome = chaos(_seed, int(sys.argv[1]))
    print(f"seed {_seed}, {monotonic_s() - _began_s:.0f} s: {dict(_outcome.ends)}")
    sys.exit("\n".join(_outcome.wrong))
