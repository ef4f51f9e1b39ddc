"""What is wrong with a fleet file, as its reader is told, and the keys that most tests change."""

import pytest

from slagate.pools.fleet_file.load import parse_config
from slagate.pools.grid.errors import ConfigError

PREFILL = "prefill_pool_selection_strategy"
DECODE = "decode_pool_selection_strategy"
AGG = "agg_pool_selection_strategy"
MAPPING = "prefill_pool_mapping"


def lines(content: object) -> list[str]:
    """The problems of a file, one line each; the file must have some."""
    with pytest.raises(ConfigError) as caught:
        parse_config(content, source="fleet.json")
    assert str(caught.value).splitlines()[1:] == [f"  {p}" for p in caught.value.problems]
    return [str(problem) for problem in caught.value.problems]
