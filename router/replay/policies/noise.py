"""Predictions that are off by chance, as those of a gateway are whose profile is of another machine.

Times only: what is cached, and how many requests and tokens a worker has, a gateway knows by counting.
"""

import math
import random
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from msgspec import structs
from typing_extensions import override

from slagate.pools.estimator.estimator import FrozenEstimator
from slagate.pools.fleet.pool import PoolSnapshot
from slagate.pools.grid.grid import Stage, StageGrid
from slagate.pools.inflight.rows import Floats, Ints, Rows
from slagate.proto import gateway_pb2 as gw
from slagate.router.scheduling.policy import NO_CONFIG, Choose, Decision
from slagate.router.scheduling.score import RoutingRequest


class NoisyChoice:
    """A `choose` that decides as another one, from predicted seconds with lognormal factors of median 1.

    For a request each pool has one factor of the prompt's own prefill, which is one prediction for equal
    workers, and each row one of its queue and one of its ITL. A request that is decided again has the same
    ones, and so it has under every policy.
    """

    def __init__(self, choose: Choose, sigma: float, seed: int) -> None:
        self._choose = choose
        self._sigma = sigma
        self._seed = seed

    def __call__(
        self,
        ask: RoutingRequest,
        stages: Mapping[Stage, StageGrid],
        pools: Mapping[str, PoolSnapshot],
        *,
        rng: random.Random,
        config: gw.GatewayConfig = NO_CONFIG,
    ) -> Decision:
        """A decision for these stages, from pool snapshots by name."""
        noisy = _NoisyPools(pools, partial(self._disturbed, ask))
        return self._choose(ask, stages, noisy, rng=rng, config=config)

    def _disturbed(self, ask: RoutingRequest, pool: PoolSnapshot) -> PoolSnapshot:
        sla, rows, estimator = ask.sla, pool.rows, pool.estimator
        # Of a conversation, prompts differ in length.
        key = f"{self._seed} {pool.name} {sla.objective} {sla.session_id} {ask.isl_tokens}"
        drawn = random.Random(key)

        def factors(n: int) -> Floats:
            return np.array([math.exp(drawn.gauss(0.0, self._sigma)) for _ in range(n)], np.float64)

        own = _NoisyEstimator(
            estimator.profile,
            estimator.profile_source,
            estimator.coefficients,
            estimator.ttft_basis,
            estimator.itl_basis,
            estimator.learnt,
            estimator.ttft_calibration,
            estimator.itl_calibration,
            prefill_factor=float(factors(1)[0]),
            itl_factors=factors(len(rows)),
        )
        return structs.replace(
            pool,
            estimator=own,
            rows=_NoisyRows(**structs.asdict(rows), load_factors=factors(len(rows))),
        )


class _NoisyPools(dict[str, PoolSnapshot]):
    """Snapshots made when they are needed, as those that they are of."""

    def __init__(
        self, pools: Mapping[str, PoolSnapshot], disturbed: Callable[[PoolSnapshot], PoolSnapshot]
    ) -> None:
        super().__init__()
        self._pools = pools
        self._disturbed = disturbed

    def __missing__(self, name: str) -> PoolSnapshot:
        noisy = self[name] = self._disturbed(self._pools[name])
        return noisy


class _NoisyRows(Rows, frozen=True, gc=False, eq=False):
    """Rows with what is predicted of their queues."""

    load_factors: Floats  # f64[n_rows]

    @override
    @property
    def load_s(self) -> Floats:
        load_s: Floats = super().load_s * self.load_factors
        return load_s


class _NoisyEstimator(FrozenEstimator, frozen=True, gc=False, kw_only=True, eq=False):
    """What is predicted of the rows of one pool for one request."""

    prefill_factor: float
    itl_factors: Floats  # f64[n_rows]

    @override
    def work_s(self, new_tokens: float, cached_tokens: float) -> float:
        return self._speed.prefill_s(new_tokens, cached_tokens) * self.prefill_factor

    @override
    def work_many(self, new_tokens: Floats, cached_tokens: Floats) -> Floats:
        return self._speed.prefill_many(new_tokens, cached_tokens) * self.prefill_factor

    @override
    def itl_of_batches(self, batch_size: Ints, context_tokens: Floats) -> Floats:
        seconds = self._speed.itl_of_batches(batch_size, context_tokens)
        seconds *= self.coefficients.itl_scale
        seconds *= self.itl_factors
        return seconds
