import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slagate.pools.fleet_file.models import Objective
from slagate.pools.grid.grid import Axis, StageGrid, UnevenAxis
from slagate.router.request.errors import InvalidRequest
from slagate.router.request.metadata import (
    FAIRNESS_ID,
    ITL,
    KNOWN,
    OBJECTIVE,
    PRIORITY,
    RECEIPT,
    ROUTING_KEY,
    SESSION_ID,
    TTFT,
)
from slagate.router.request.sla import MAX_TEXT, Sla, parse_sla

TEXTS = (OBJECTIVE, FAIRNESS_ID, SESSION_ID)


def refused(*pairs: tuple[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_sla(pairs)
    return caught.value


def test_nothing_given_is_no_target_and_not_zero() -> None:
    assert parse_sla([]) == Sla(None, None, None, "", "", "", receipt=False)


def test_every_key_is_read() -> None:
    given_ = [
        (TTFT, "0"),
        (ITL, "12.5"),
        (PRIORITY, "-3"),
        (OBJECTIVE, "chat"),
        (FAIRNESS_ID, "acme"),
        (SESSION_ID, "s-1"),
        (RECEIPT, "1"),
        (ROUTING_KEY, "any"),
    ]
    assert {key for key, _ in given_} == set(KNOWN)
    assert parse_sla(given_) == Sla(0.0, 12.5, -3, "chat", "acme", "s-1", receipt=True)


def test_cfg_01_the_documented_key_works_and_a_misspelt_one_is_refused_with_the_right_one() -> None:
    assert parse_sla([("x-slo-ttft-ms", "150")]).ttft_ms == 150.0
    for wrong in ("x-slo-ttft", "x-slo-ttft_ms", "x-ttft-ms", "ttft", "x-slo-ttft-ms-bin"):
        error = refused((wrong, "150"))
        assert error.field == wrong
        assert "did you mean x-slo-t" in str(error)


def test_peer_01_other_spellings_of_a_latency_target_are_refused_not_dropped() -> None:
    for wrong in (
        "x-slo-itl-ms",
        "x-slo-e2e-ms",
        "my-tpot-ms",
        "x-itl",
        "itl-target",
        "x-ttft-target",
    ):
        assert refused((wrong, "20")).field == wrong


@pytest.mark.parametrize(
    "key", ["user-agent", "title", "x-capital-itlx", "authorization", "x-slow"]
)
def test_metadata_of_others_is_none_of_our_business(key: str) -> None:
    assert parse_sla([(key, "a"), (key, "b")]) == Sla()


def test_a_misspelt_key_of_the_protocols_reserved_prefix_is_refused_not_dropped() -> None:
    assert refused(("openengine-priorty", "5")).field == "openengine-priorty"


BAD_NUMBERS = (
    *("NaN", "nan", "inf", "+inf", "-inf", "Infinity", "fast", "true", "[]", "1e400", "-1", "-0.5"),
    *(
        "1_000",
        "0x10",
        " 5",
        "5 ",
        "5\n",
        "",
        ".",
        "e5",
        "1,5",
        "1,2",
        "\u0665",
        "\uff15",
        "\u00b2",
    ),
    *("9" * 400, "5ms", "None", "null", "1e", "--1", "+1"),
)


@pytest.mark.parametrize("key", [TTFT, ITL])
@pytest.mark.parametrize("text", BAD_NUMBERS)
def test_cfg_04_a_target_that_is_no_finite_number_is_refused_by_name(key: str, text: str) -> None:
    error = refused((key, text))
    assert error.field == key
    assert str(error).startswith(f"{key}: must be")
    assert len(str(error)) < 200


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0.0), ("5.", 5.0), (".5", 0.5), ("1e2", 100.0), ("2E-1", 0.2), ("007", 7)],
)
def test_decimal_spellings_of_a_target(text: str, value: float) -> None:
    assert parse_sla([(TTFT, text)]).ttft_ms == value


@given(st.text(max_size=20))
def test_cfg_04_any_text_is_a_finite_target_or_refused(text: str) -> None:
    try:
        value = parse_sla([(ITL, text)]).itl_ms
    except InvalidRequest:
        return
    assert value is not None
    assert math.isfinite(value)
    assert value >= 0


@pytest.mark.parametrize(
    "text", ["2147483648", "-2147483649", "1.0", "1e3", "", " 1", "high", "\u0661"]
)
def test_a_priority_that_is_no_int32_is_refused(text: str) -> None:
    assert refused((PRIORITY, text)).field == PRIORITY


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1, 0])
def test_the_ends_of_the_priority_range_are_inside(value: int) -> None:
    assert parse_sla([(PRIORITY, str(value))]).priority == value


@pytest.mark.parametrize("key", [*KNOWN, "openengine-routing-key"])
def test_secmm_02_a_repeated_key_is_refused_never_first_wins(key: str) -> None:
    error = refused((key, "1"), (key, "1"))
    assert error.field == key
    assert "more than once" in str(error)


@pytest.mark.parametrize("key", KNOWN)
def test_secmm_02_an_empty_value_is_refused(key: str) -> None:
    assert refused((key, "")).field == key


@pytest.mark.parametrize("key", [TTFT, ITL, PRIORITY, RECEIPT])
def test_secmm_02_joined_values_are_refused(key: str) -> None:
    for text in ("1,1", "a:1,b:2", "1, 1", "1\n1"):
        assert refused((key, text)).field == key


@pytest.mark.parametrize("key", TEXTS)
def test_secmm_02_a_line_end_or_control_character_inside_a_text_is_refused(key: str) -> None:
    for text in ("a\nb", "\n", "a\r\nx-slo-ttft-ms: 1", "a\x00b"):
        assert refused((key, text)).field == key


@pytest.mark.parametrize("key", KNOWN)
def test_a_binary_value_is_refused(key: str) -> None:
    assert refused((key, b"1")).field == key


@pytest.mark.parametrize("key", TEXTS)
def test_a_text_is_bounded(key: str) -> None:
    parse_sla([(key, "x" * MAX_TEXT)])
    assert refused((key, "x" * (MAX_TEXT + 1))).field == key


@pytest.mark.parametrize("text", ["true", "yes", "2", "01"])
def test_the_receipt_flag_is_zero_or_one(text: str) -> None:
    assert refused((RECEIPT, text)).field == RECEIPT
    assert not parse_sla([(RECEIPT, "0")]).receipt


def test_a_client_does_not_choose_the_data_parallel_rank() -> None:
    assert refused(("openengine-target-dp-rank", "0")).field == "openengine-target-dp-rank"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("slagate-reciept", RECEIPT),
        ("slagate-receipts", RECEIPT),
        ("x-gateway-inference-fairness", FAIRNESS_ID),
        ("x-gateway-inference-objectives", OBJECTIVE),
        ("x-dynamo-session", SESSION_ID),
        ("x-dynamo-session_id", SESSION_ID),
    ],
)
def test_a_misspelt_key_of_any_prefix_that_is_read_is_refused_with_the_right_one(
    wrong: str, right: str
) -> None:
    error = refused((wrong, "1"))
    assert error.field == wrong
    assert f"did you mean {right}?" in str(error)


def test_other_keys_of_the_platforms_whose_prefixes_these_are_pass() -> None:
    assert parse_sla([("x-gateway-model-name", "a"), ("x-dynamo-worker", "b")]) == Sla()


def test_where_there_are_no_receipts_asking_for_one_is_refused_and_declining_is_not() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_sla([(RECEIPT, "1")], receipts=False)
    assert caught.value.field == RECEIPT
    assert not parse_sla([(RECEIPT, "0")], receipts=False).receipt
    assert parse_sla([], receipts=False) == Sla()
    with pytest.raises(InvalidRequest, match="must be 0 or 1"):
        parse_sla([(RECEIPT, "yes")], receipts=False)


def grid_of(axis: Axis | UnevenAxis) -> StageGrid:
    n_cells = axis.resolution
    return StageGrid(
        axes=(Axis("isl", 0, 1000, 1), axis),
        cells=((0,),) * n_cells,
        pool_names=("p",),
        priorities=(0,),
    )


TTFT_AXES = [Axis("ttft_ms", 100, 900, 2), UnevenAxis("ttft_ms", (100, 500, 600))]


@pytest.mark.parametrize("axis", TTFT_AXES)
def test_a_target_of_0_is_judged_by_the_upper_edge_of_the_tightest_cell(
    axis: Axis | UnevenAxis,
) -> None:
    decode = grid_of(Axis("itl_ms", 5, 45, 4))
    sla = Sla(0.0, 0.0).with_edges([grid_of(axis), decode])
    assert (sla.ttft_ms, sla.itl_ms, sla.as_fast) == (500.0, 15.0, ("ttft_ms", "itl_ms"))
    one = Sla(0.0, 12.0).with_edges([grid_of(axis), decode])
    assert (one.ttft_ms, one.itl_ms, one.as_fast) == (500.0, 12.0, ("ttft_ms",))


def test_a_target_of_0_of_a_class_is_the_same() -> None:
    objectives = {"chat": Objective(ttft_ms=0, itl_ms=30)}
    sla = Sla(objective="chat").with_defaults(objectives).with_edges([grid_of(TTFT_AXES[0])])
    assert (sla.ttft_ms, sla.as_fast, sla.by_objective) == (
        500,
        ("ttft_ms",),
        ("ttft_ms", "itl_ms"),
    )


def test_a_target_of_0_on_an_axis_that_no_grid_has_promises_nothing() -> None:
    sla = Sla(200.0, 0.0).with_edges([grid_of(TTFT_AXES[0])])
    assert (sla.ttft_ms, sla.itl_ms, sla.as_fast) == (200.0, None, ("itl_ms",))


def test_the_tightest_cell_is_the_one_in_which_0_falls() -> None:
    """Bounds of a grid may be below 0, as Dynamo's may."""
    assert Sla(0.0).with_edges([grid_of(Axis("ttft_ms", -100, 300, 4))]).ttft_ms == 100.0
    assert Sla(0.0).with_edges([grid_of(UnevenAxis("ttft_ms", (-9, 0, 50)))]).ttft_ms == 50.0
