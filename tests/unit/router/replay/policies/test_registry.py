"""The table of policies, and what is refused of their parameters."""

from math import prod

import pytest

from slagate.router.replay.policies.choose import PeerChoice
from slagate.router.replay.policies.registry import NAMES, PEERS, make, parameters_of
from slagate.router.scheduling.policy import choose, choose_by_load
from slagate.workers.runtime.usage import UsageError


def test_all_policies_of_the_comparison() -> None:
    peers = "round_robin static_grid dynamo_kv lmetric smg_wait llmd_headroom mooncake polyserve"
    assert ("slagate", "prefix", "least_loaded", *peers.split()) == NAMES


def test_the_gateways_own_are_its_settings() -> None:
    assert make("slagate", {}) == ("slagate", choose)
    assert make("prefix", {}) == ("slagate", choose_by_load)
    assert make("least_loaded", {}) == ("least_loaded", choose_by_load)


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_parameters_are_as_published_unless_given(name: str) -> None:
    router = make(name, {})
    assert router.policy == "slagate"
    assert isinstance(router.choose, PeerChoice)
    known = parameters_of(name)
    given = {key: each.tried[0] for key, each in known.items()}
    assert isinstance(make(name, given).choose, PeerChoice)
    for key, each in known.items():
        assert each.default in each.tried, (name, key)
    if known:
        assert prod(len(each.tried) for each in known.values()) >= 20, "too few for a search"


def test_each_router_has_a_policy_of_its_own() -> None:
    first, second = (make("smg_wait", {}).choose for _ in range(2))
    assert isinstance(first, PeerChoice)
    assert isinstance(second, PeerChoice)
    assert first is not second


@pytest.mark.parametrize(
    ("policy", "parameters", "message"),
    [
        ("mooncak", {}, 'policy: "mooncak" is not known, did you mean "mooncake"?'),
        ("x", {}, 'policy: "x" is not known, known are slagate, prefix, least_loaded, round_robin'),
        (
            "mooncake",
            {"ttft_limits": 1},
            'parameters.mooncake: "ttft_limits" is not known, did you mean "ttft_limit"?',
        ),
        ("mooncake", {"x": 1}, 'parameters.mooncake: "x" is not known, known are ttft_limit, itl'),
        ("prefix", {"x": 1}, "parameters.prefix.x: prefix has no parameters"),
        ("lmetric", {"x": 1}, "parameters.lmetric.x: lmetric has no parameters"),
        ("mooncake", {"ttft_limit": -1}, "mooncake.ttft_limit: must be a number from 0 on, got -1"),
        ("mooncake", {"ttft_limit": True}, "ttft_limit: must be a number from 0 on, got True"),
        ("mooncake", {"ttft_limit": float("nan")}, "must be a number from 0 on, got nan"),
        ("mooncake", {"ttft_limit": "1"}, "must be a number from 0 on, got '1'"),
        ("smg_wait", {"max_waiting": 8.5}, "max_waiting: must be a whole number, got 8.5"),
        ("polyserve", {"late": "most"}, 'late: must be "refuse" or "least", got \'most\''),
        ("polyserve", {"late": 1}, 'late: must be "refuse" or "least", got 1'),
    ],
)
def test_what_is_refused(policy: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(policy, parameters)
    assert message in str(caught.value)
