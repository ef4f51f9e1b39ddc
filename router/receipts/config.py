"""The configuration that decisions were made under: the fleet file, and uncorrected predictions."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from slagate.pools.estimator.accuracy import BASES, MAX_LOG, Calibration
from slagate.pools.estimator.estimator import Coefficients, FrozenEstimator
from slagate.pools.fleet.fleet import Prepared, prepare
from slagate.pools.fleet_file.load import FleetConfig, parse_config
from slagate.pools.grid.errors import ConfigError
from slagate.pools.grid.grid import Stage, StageGrid
from slagate.proto import gateway_pb2 as gw


class UnusableReceipt(ValueError):
    """A receipt or configuration that cannot be used; the message starts with the field."""


def config_message(prepared: Prepared, *, policy: str) -> gw.GatewayConfig:
    """A configuration and the policy's name as a message; its `version` is the digest of the rest."""
    message = gw.GatewayConfig(
        fleet=prepared.config.text,
        estimators=[
            gw.EstimatorTable(pool=name, table=_json(estimator.frozen.table_json()))
            for name, estimator in sorted(prepared.estimators.items())
        ],
        policy=policy,
    )
    message.version = _digest(message)
    return message


class RecordedConfig(NamedTuple):
    """A configuration read back from its message, as far as it takes to make decisions again."""

    version: str
    config: FleetConfig
    grids: Mapping[Stage, StageGrid]
    estimators: Mapping[str, FrozenEstimator]  # by pool, uncorrected
    policy: str

    def estimator(self, look: gw.PoolLook) -> FrozenEstimator:
        """A pool's estimator as it was then. Raises `ValueError` naming the field that is wrong."""
        told = look.coefficients
        corrected = Coefficients(told.prefill_scale, told.prefill_offset_s, told.itl_scale)
        bases = {name: getattr(look, name) for name in ("ttft_basis", "itl_basis")}
        for name, basis in bases.items():
            if basis not in BASES:
                raise ValueError(f"{name}: must be one of {', '.join(BASES)}")
        lines = {
            name: _calibration(name, getattr(look, name))
            for name in ("ttft_calibration", "itl_calibration")
            if look.HasField(name)
        }
        try:
            return replace(self.estimators[look.name], coefficients=corrected, **bases, **lines)
        except ValueError as error:
            raise ValueError(f"coefficients: {error}") from error


def _calibration(name: str, told: gw.Calibration) -> Calibration:
    for field in Calibration._fields:
        least = 0.0 if field in ("slope", "spread") else -MAX_LOG
        most = 1.0 if field == "slope" else MAX_LOG
        if not least <= getattr(told, field) <= most:
            raise ValueError(f"{name}.{field}: must be between {least:g} and {most:g}")
    return Calibration(told.offset, told.slope, told.spread, told.low, told.high)


def read_config(message: gw.GatewayConfig) -> RecordedConfig:
    """Read and check what `config_message` wrote. Raises `UnusableReceipt`."""
    if message.version != _digest(message):
        raise UnusableReceipt("config.version: is not the digest of the rest")
    try:
        config = parse_config(json.loads(message.fleet), source="config.fleet")
    except (ConfigError, ValueError) as error:
        raise UnusableReceipt(f"config.fleet: {error}") from error
    grids = {Stage(name): grid for name, grid in config.stages.items()}
    estimators = {}
    for at, each in enumerate(message.estimators):
        try:
            table = json.loads(each.table)
            if not isinstance(table, dict):
                raise ValueError(f"must be an object, got {each.table[:40]!r}")
            estimators[each.pool] = FrozenEstimator.from_json(table, Coefficients())
        except ValueError as error:
            raise UnusableReceipt(f"config.estimators[{at}].table: {error}") from error
    for name in (name for grid in grids.values() for name in grid.pool_names):
        if name not in estimators:
            raise UnusableReceipt(f"config.estimators: there is none for pool {name!r}")
    return RecordedConfig(message.version, config, grids, estimators, message.policy)


def prepared_of(message: gw.GatewayConfig) -> Prepared:
    """Prepare the configuration in a message to be put in force, with no need of its files.

    Its warnings and ignored keys are those of a file with this content. Raises `UnusableReceipt`.
    """
    read = read_config(message)
    profiles = {
        name: estimator.profile
        for name, estimator in read.estimators.items()
        if estimator.profile is not None
    }
    prepared = prepare(dataclasses.replace(read.config, profiles=profiles))
    if config_message(prepared, policy=message.policy).version != message.version:
        raise UnusableReceipt("config: comes out otherwise than it was read")
    return prepared


def _digest(message: gw.GatewayConfig) -> str:
    content = [
        message.fleet,
        [[each.pool, each.table] for each in message.estimators],
        message.policy,
    ]
    return hashlib.sha256(_json(content).encode()).hexdigest()[:16]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
