"""The arguments of an engine as rules read them, by name: as given, or else the newest version's defaults.

Names, types and defaults are those of `facts.py`, which judges by version. A value that is of another type,
or out of soft bounds, counts as not given: no rule could compute with it.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from slagate.workers.engine_args.model.facts import EngineFacts, Sections, known_versions


class Section:
    """A section of the arguments, each of which is an attribute.

    The newest version's facts have its names; another one is an `AttributeError`.
    """

    def __init__(self, facts: EngineFacts, sections: Sections, given: Mapping[str, Any]) -> None:
        self._facts = facts
        self._sections = sections
        self.given = given

    def __getattr__(self, name: str) -> Any:
        kind = self._sections.kind_of(self.given)
        if name == self._sections.tag:
            return kind
        field = next(iter(self._sections.having(name, kind).values()), None)
        if field is None:
            raise AttributeError(name)
        sections = self._facts.sections(field)
        value = field.get("default", {} if sections.kinds else None)
        for key in (*field.get("x-aliases", ()), name):
            if key in self.given:
                with suppress(ValueError):
                    value = self._facts.taken(field, self.given[key])
        if not sections.kinds or not isinstance(value, Mapping):
            return value
        # One that does not say of which kind it is counts as not given.
        return Section(self._facts, sections, value) if sections.tag in ("", *value) else None


class EngineModel(Section):
    """All arguments of the engine; some with their types, for what is computed from them."""

    tensor_parallel_size: int
    max_batch_size: int
    kv_cache_config: Section
    speculative_config: Section | None

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` are nested dicts."""
        facts = known_versions()[-1]
        super().__init__(facts, facts.sections(facts.schema), values)

    @property
    def parallelism(self) -> tuple[int, int, int, bool]:
        """TP, PP and CP size and whether attention DP is on: they decide which KV a rank has."""
        pipelines, contexts = self.pipeline_parallel_size, self.context_parallel_size
        return self.tensor_parallel_size, pipelines, contexts, self.enable_attention_dp

    @property
    def connector_name(self) -> str | None:
        """The preset of the KV connector, or the module in its place, or none; None without a connector."""
        section = self.kv_connector_config
        return section and str(section.connector or section.connector_module or "")

    @property
    def is_eagle(self) -> bool:
        """Whether Eagle3 drafts, or Eagle, which the PyTorch back-end takes for Eagle3."""
        section = self.speculative_config
        return section is not None and section.decoding_type in ("Eagle", "Eagle3")

    @property
    def step_tokens_of_a_request(self) -> int:
        """Tokens of a step for one decoding request: its own and its drafts."""
        section = self.speculative_config
        if section is None:
            return 1
        length: int = section.max_draft_len or 0
        if section.decoding_type == "MTP":
            return 1 + (length or section.num_nextn_predict_layers or 1)
        if section.decoding_type == "PARD":
            return max(1, 2 * length)  # the drafts, and masks for all but one of them
        if self.is_eagle and section.eagle_choices is not None:
            return 1 + len(section.eagle_choices)
        if self.is_eagle:
            wide = length * max(1, section.dynamic_tree_max_topK or 1)
            return 1 + (section.max_total_draft_tokens or wide)
        return 1 + length

    def up_to_blocks(self, n_tokens: int) -> int:
        """The number of tokens rounded up to whole KV blocks."""
        block: int = self.kv_cache_config.tokens_per_block
        return math.ceil(n_tokens / block) * block
