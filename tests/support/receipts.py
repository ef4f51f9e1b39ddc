"""Receipts as the trailing metadata carries them."""

from slagate.proto import gateway_pb2 as gw
from support.foreign_client import Answer

ASK = [("slagate-receipt", "1")]
"""Request metadata that asks for one."""


def receipt_of(answer: Answer) -> gw.Receipt:
    """The receipt of an answer; fails when it has none."""
    trailer = answer.trailers["slagate-receipt-bin"]
    assert isinstance(trailer, bytes)
    return gw.Receipt.FromString(trailer)
