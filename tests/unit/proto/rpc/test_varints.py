"""Varints, against protobuf's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.varints import varint, varints

numbers = st.one_of(
    st.integers(0, 2**32 - 1),
    st.builds(
        lambda bits, less: (1 << bits) - less,
        st.sampled_from([7, 14, 21, 28, 32]),
        st.integers(1, 2),
    ),
    st.sampled_from([0, 1 << 7, 1 << 14, 1 << 21, 1 << 28]),
)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 16383, 16384, 1 << 35])
def test_of_one_number(value: int) -> None:
    encoded = oe.KvEventBatch(sequence_number=value or 1).SerializeToString()[1:]
    assert varint(value or 1) == encoded
    assert varint(0) == b"\0"


@given(st.lists(numbers))
def test_of_many_numbers(values: list[int]) -> None:
    packed = varints(np.array(values, dtype=np.uint32))
    assert packed.data == b"".join(map(varint, values))
    assert packed.n_bytes.tolist() == [len(varint(value)) for value in values]
