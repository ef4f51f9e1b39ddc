"""The double of TensorRT-LLM's `MultimodalEncoder`."""

from typing import Any

import pytest

from slagate.workers.runtime.virtual_loop import run
from slagate.workers.sim.api import VERSIONS, sim_api

every_version = pytest.mark.parametrize("api", VERSIONS)


def request(*images: bytes) -> dict[str, Any]:
    return {"prompt": "what is this", "multi_modal_data": {"image": list(images)}}


@every_version
def test_a15_results_carry_a_handle_and_a_hash_for_every_image(api: str) -> None:
    encoder = sim_api(api).MultimodalEncoder("m")
    (out,) = encoder.generate([request(b"cat", b"dog")])
    params = out.disaggregated_params
    assert type(params) is sim_api(api).DisaggregatedParams
    assert len(params.multimodal_embedding_handles) == len(params.multimodal_hashes) == 2
    for one in params.multimodal_hashes:
        assert len(one) == 8
        assert all(-(2**31) <= number < 2**31 for number in one)


def test_a15_hashes_are_of_the_content_and_handles_are_not() -> None:
    encoder = sim_api().MultimodalEncoder("m")
    first, second, other = (
        encoder.generate(request(image)).disaggregated_params for image in (b"a", b"a", b"b")
    )
    assert first.multimodal_hashes == second.multimodal_hashes != other.multimodal_hashes
    # A handle has one consumer.
    assert first.multimodal_embedding_handles != second.multimodal_embedding_handles


@every_version
def test_a15_an_encoder_may_give_no_handles(api: str) -> None:
    encoder = sim_api(api).MultimodalEncoder("m", gives_handles=False)
    for params in (
        encoder.generate(request(b"cat")).disaggregated_params,
        sim_api(api).MultimodalEncoder("m").generate(request()).disaggregated_params,
    ):
        assert params.multimodal_embedding_handles is None
        assert params.multimodal_hashes is None


@every_version
def test_a15_encoding_can_be_awaited(api: str) -> None:
    encoder = sim_api(api).MultimodalEncoder("m")

    async def scenario() -> None:
        out = await encoder.generate_async(request(b"cat"))
        assert out.finished
        assert out.disaggregated_params.multimodal_embedding_handles

    run(scenario)


@every_version
def test_the_encoder_is_an_engine_with_its_own_defaults(api: str) -> None:
    encoder = sim_api(api).MultimodalEncoder("m", max_batch_size=4)
    assert encoder.args.mm_encoder_only
    assert (encoder.args.max_num_tokens, encoder.args.max_batch_size) == (16_384, 4)
    with pytest.raises(ValueError, match="nonsense"):
        sim_api(api).MultimodalEncoder("m", nonsense=1)
    with pytest.raises(TypeError, match="images"):
        encoder.generate([[1, 2]])
    encoder.shutdown()
    with pytest.raises(RuntimeError, match="shutting down"):
        encoder.generate(request(b"cat"))
