"""`MultimodalEncoder` without a GPU: one embedding handle and one hash for every image of a request."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

from slagate.workers.sim.args import LACKS, parse_args
from slagate.workers.sim.request import (
    DisaggregatedParams,
    DisaggregatedParams12,
    DisaggregatedParams13,
)

_MAX_NUM_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """An encoder's finished result; the handles are in its params."""

    prompt: Any
    disaggregated_params: DisaggregatedParams12
    finished: bool = True

    def __await__(self) -> Generator[Any, None, "EncoderOutput"]:
        # An encoder takes at least one turn of the loop.
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        yield from turn
        return self


class MultimodalEncoder12:
    """`tensorrt_llm.MultimodalEncoder` of 1.2.

    With `gives_handles` False its results carry neither handles nor hashes, as a real encoder's do for
    requests that it could not place. Raises `ValueError` naming an unknown argument.
    """

    params_type: ClassVar[type[DisaggregatedParams12]] = DisaggregatedParams12
    lacks: ClassVar[frozenset[str]] = LACKS["1.2"]

    def __init__(
        self,
        model: object,
        trust_remote_code: bool = False,  # noqa: FBT001, FBT002
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        *,
        gives_handles: bool = True,
        **kwargs: Any,
    ) -> None:
        self.args = parse_args(
            model,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            mm_encoder_only=True,
            lacks=self.lacks,
            **{"max_num_tokens": _MAX_NUM_TOKENS, **kwargs},
        )
        self._gives_handles = gives_handles
        self._n_handles = 0
        self._is_shutdown = False

    def generate(self, inputs: Any, *, use_tqdm: bool = True) -> Any:
        """Encode one request, or a list of them, and return the result or results. Blocks."""
        del use_tqdm
        if isinstance(inputs, list):
            return [self._encode(one) for one in inputs]
        return self._encode(inputs)

    def generate_async(self, inputs: Any, sampling_params: Any = None) -> EncoderOutput:
        """Encode one request; awaiting gives the result."""
        del sampling_params
        return self._encode(inputs)

    def shutdown(self) -> None:
        """Later requests raise `RuntimeError`."""
        self._is_shutdown = True

    def _encode(self, inputs: Any) -> EncoderOutput:
        if self._is_shutdown:
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, dict):
            raise TypeError(f"inputs must be a dict with images, not {type(inputs).__name__}")
        images = (inputs.get("multi_modal_data") or {}).get("image") or []
        params = self.params_type(request_type="context_only")
        if images and self._gives_handles:
            params.multimodal_embedding_handles = [self._descriptor(image) for image in images]
            params.multimodal_hashes = [_hash(image) for image in images]
        return EncoderOutput(inputs.get("prompt"), params)

    def _descriptor(self, image: Any) -> dict[str, Any]:
        """A dict in the shape of a descriptor of a tensor shared on this host, with no tensor behind it."""
        self._n_handles += 1
        return {
            "method_key": 1,
            "tensor_size": [len(_content(image)), 16],
            "storage_handle": self._n_handles.to_bytes(8, "little").hex(),
        }


class MultimodalEncoder13(MultimodalEncoder12):
    """`tensorrt_llm.MultimodalEncoder` of early 1.3 candidates."""

    params_type = DisaggregatedParams13
    lacks = LACKS["1.3rc"]


class MultimodalEncoder14(MultimodalEncoder13):
    """`tensorrt_llm.MultimodalEncoder` of the newest source."""

    params_type = DisaggregatedParams
    lacks = LACKS["1.4rc"]


def _content(image: Any) -> bytes:
    return image if isinstance(image, bytes) else repr(image).encode()


def _hash(image: Any) -> list[int]:
    """The 256-bit hash of the content as eight signed 32-bit numbers."""
    digest = blake2b(_content(image), digest_size=32).digest()
    return [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in range(0, 32, 4)]
