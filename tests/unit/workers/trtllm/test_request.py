"""What a worker refuses before its engine has seen a request, and what the engine gets of the rest."""

import math
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from slagate.proto import openengine_pb2 as oe
from slagate.proto.rpc.status import Metadata
from slagate.workers.errors import RequestRefused
from slagate.workers.logits.processors import LogitsProcessors
from slagate.workers.sim import request as sim_request
from slagate.workers.trtllm.engine import Engine
from slagate.workers.trtllm.handoffs import Handoffs
from slagate.workers.trtllm.output import MAX_PROMPT_ENTRIES
from slagate.workers.trtllm.request import EngineRequest, LegParser
from slagate.workers.trtllm.sampling import MAX_STOP_TEXT_BYTES
from slagate.workers.trtllm.server_info import WorkerIdentity
from support.builders import MODEL, request, session

Code = grpc.StatusCode
VOCAB = 1000


def engine(generate_async: Any = None, **args: Any) -> Engine:
    def takes_all(inputs: Any, sampling_params: Any = None, cache_salt: Any = None) -> None:
        raise AssertionError("the engine must not see it")

    settings = {
        "tensor_parallel_size": 1,
        "max_seq_len": 500,
        "max_batch_size": 4,
        "kv_cache_config": SimpleNamespace(tokens_per_block=32),
    }
    llm = SimpleNamespace(
        args=SimpleNamespace(**settings | args),
        tokenizer=None,
        generate_async=generate_async or takes_all,
    )
    return Engine(llm, sim_request)


NO_PROCESSORS = LogitsProcessors()


def parse(
    leg: oe.GenerateRequest,
    *,
    metadata: Metadata = (),
    on: Engine | None = None,
    role: oe.EngineRole.ValueType = oe.ENGINE_ROLE_AGGREGATED,
    vocab_size: int | None = VOCAB,
) -> EngineRequest:
    identity = WorkerIdentity(role, MODEL, "i1", "0", "NIXL", 1, end_id=2, vocab_size=vocab_size)
    handoffs = Handoffs(backend="NIXL", limit_s=60)
    return LegParser(on or engine(), identity, handoffs, NO_PROCESSORS).parse_leg(leg, metadata)


def refusal(leg: oe.GenerateRequest, **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(RequestRefused) as caught:
        parse(leg, **more)
    return caught.value.status.code, caught.value.status.message


def changed(**parts: Any) -> oe.GenerateRequest:
    leg = request()
    leg.MergeFrom(oe.GenerateRequest(**parts))
    return leg


BAD_SAMPLING = [
    ("top_k", -2),
    ("top_k", -(2**31)),
    ("top_p", 0.0),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("frequency_penalty", math.inf),
    ("presence_penalty", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.nan),
    ("num_sequences", 0),
    ("num_sequences", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_engine_08_a_sampling_value_out_of_range_is_refused_by_name(
    field: str, value: float
) -> None:
    """ENGINE-08: one malformed parameter must not reach the engine that all share."""
    code, message = refusal(changed(sampling={field: value}))
    assert code is Code.INVALID_ARGUMENT
    assert message.startswith(f"sampling.{field}: ")


@pytest.mark.parametrize(
    ("field", "leg"),
    [
        ("token_ids", changed(token_ids={"ids": [VOCAB]})),
        ("token_ids", changed(token_ids={"ids": [2**32 - 1]})),
        ("token_ids", changed(token_ids={"ids": [1] * 500})),
        ("stopping.conditions", changed(stopping={"conditions": [{"stop_token_id": VOCAB}]})),
        ("stopping.conditions", changed(stopping={"conditions": [{"stop_token_id": 1}] * 10_000})),
        ("stopping.conditions", changed(stopping={"conditions": [{}]})),
        ("stopping.conditions", changed(stopping={"conditions": [{"stop_text": ""}]})),
        ("stopping.max_tokens", changed(stopping={"max_tokens": 0})),
        (
            "response.output_candidates.top_n",
            changed(response={"return_output_logprobs": True, "output_candidates": {"top_n": 21}}),
        ),
        ("sampling.num_sequences", changed(sampling={"num_sequences": 2, "temperature": 0})),
        ("sampling.num_sequences", changed(sampling={"num_sequences": 2, "top_k": 1})),
        ("extra.detokenize", changed(extra={"detokenize": "no"})),
        ("prompt", oe.GenerateRequest(request_id="r", model=MODEL, prompt="text")),
    ],
)
def test_engine_08_other_malformed_parts_are_refused_by_name(
    field: str, leg: oe.GenerateRequest
) -> None:
    """ENGINE-08, outside the sampling parameters."""
    code, message = refusal(leg)
    assert code is Code.INVALID_ARGUMENT
    assert message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("field", "leg"),
    [
        ("stopping.conditions", changed(stopping={"conditions": [{"stop_text": "x"}]})),
        ("extra.detokenize", changed(extra={"detokenize": True})),
        ("kv.bypass_prefix_cache", changed(kv={"bypass_prefix_cache": True})),
        ("guided", changed(guided={"regex": "a"})),
    ],
)
def test_what_this_worker_cannot_do_is_unimplemented(field: str, leg: oe.GenerateRequest) -> None:
    code, message = refusal(leg)
    assert code is Code.UNIMPLEMENTED
    assert message.startswith(f"{field}: ")


def test_top_k_off_as_others_say_it_is_off() -> None:
    """ENGINE-08: -1 is a common "off"; TensorRT-LLM's is 0."""
    assert parse(changed(sampling={"top_k": -1})).sampling.top_k == 0
    assert parse(changed(sampling={"top_k": 7})).sampling.top_k == 7


def test_what_is_not_set_is_as_on_tensorrt_llms_own_server() -> None:
    sampling = parse(request()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.seed, sampling.min_p, sampling.repetition_penalty) == (None, None, None)
    assert parse(changed(sampling={"temperature": 0})).sampling.temperature == 0


def test_an_unknown_vocabulary_is_the_engines_to_check() -> None:
    leg = changed(token_ids={"ids": [VOCAB]})
    assert parse(leg, vocab_size=None).tokens[-1] == VOCAB


def test_a_salt_that_would_be_ignored_is_refused() -> None:
    """Without it two tenants would share prefixes."""

    def takes_no_salt(inputs: Any, sampling_params: Any = None) -> None: ...

    leg = changed(kv={"cache_salt": "t"})
    assert parse(leg).cache_salt == "t"
    assert refusal(leg, on=engine(takes_no_salt))[0] is Code.UNIMPLEMENTED


def test_a_rank_that_an_engine_does_not_take_is_refused() -> None:
    adp = engine(tensor_parallel_size=2, enable_attention_dp=True)
    code, message = refusal(request(), metadata=[("openengine-target-dp-rank", "1")], on=adp)
    assert (code, message) == (
        Code.UNIMPLEMENTED,
        "openengine-target-dp-rank: this engine takes no rank",
    )


def test_secmm_01_a_key_of_ours_that_is_repeated_is_refused() -> None:
    """SECMM-01/02: reserved keys are never first-wins, also those nobody reads here."""
    metadata = [("x-slagate-other", "1"), ("x-slagate-other", "1")]
    code, message = refusal(request(), metadata=metadata)
    assert (code, message) == (
        Code.INVALID_ARGUMENT,
        "x-slagate-other: is given more than once",
    )


def test_decode_does_not_ask_for_the_prompts_logprobs_again() -> None:
    leg = changed(response={"return_prompt_logprobs": True, "return_output_logprobs": True})
    leg.kv.session.CopyFrom(session())
    parsed = parse(leg, role=oe.ENGINE_ROLE_DECODE)
    assert (parsed.sampling.prompt_logprobs, parsed.sampling.logprobs) == (None, 1)


@pytest.mark.parametrize("name", ["first_gen_tokens", "draft_tokens"])
def test_w05_a_handoffs_tokens_are_of_the_vocabulary(name: str) -> None:
    """The engine would look them up without a check, on the GPU."""
    leg = request()
    leg.kv.session.CopyFrom(session())
    leg.kv.session.attributes_struct[name] = [1, VOCAB]
    code, said = refusal(leg, role=oe.ENGINE_ROLE_DECODE)
    assert code is Code.INVALID_ARGUMENT
    assert f"kv.session.attributes_struct.{name}: {VOCAB} is outside the vocabulary" in said
    parse(leg, role=oe.ENGINE_ROLE_DECODE, vocab_size=None)


def with_tokenizer() -> Engine:
    def generate_async(inputs: Any, sampling_params: Any = None) -> None:
        raise AssertionError("the engine must not see it")

    made = engine(generate_async)
    made.tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()))
    made.llm.tokenizer = made.tokenizer
    return made


def stopping(*texts: str) -> oe.GenerateRequest:
    conditions = [oe.StopCondition(stop_text=text) for text in texts]
    return changed(stopping=oe.StoppingOptions(conditions=conditions))


def test_a_stop_text_has_a_limit_in_bytes() -> None:
    at = "\u00e9" * (MAX_STOP_TEXT_BYTES // 2)
    assert parse(stopping("a", at), on=with_tokenizer()).sampling.stop == ["a", at]
    code, message = refusal(stopping("a", at + "a"), on=with_tokenizer())
    assert code is Code.INVALID_ARGUMENT
    assert message.startswith("stopping.conditions: ")


def test_prompt_logprobs_over_the_limit_are_refused_before_they_are_made() -> None:
    on = engine(max_seq_len=10**6)

    def asking(n_tokens: int, top_n: int) -> oe.GenerateRequest:
        response = oe.ResponseOptions(return_prompt_logprobs=True)
        response.prompt_candidates.top_n = top_n
        return changed(token_ids=oe.TokenIds(ids=[7] * n_tokens), response=response)

    n_own = len(request().token_ids.ids)
    for top_n in (0, 9):
        fits = MAX_PROMPT_ENTRIES // (top_n + 1) - n_own
        assert parse(asking(fits, top_n), on=on).form.prompt_top_n == top_n
        code, message = refusal(asking(fits + 1, top_n), on=on)
        assert code is Code.INVALID_ARGUMENT
        assert message.startswith("response.prompt_candidates: ")


def test_a_minimum_over_the_budget_is_the_budget() -> None:
    leg = changed(stopping=oe.StoppingOptions(max_tokens=5, min_tokens=2**32 - 1))
    assert parse(leg).sampling.min_tokens == 5


@pytest.mark.parametrize("engine_knows", [True, False])
def test_an_engine_that_knows_the_end_of_a_text_is_not_told(*, engine_knows: bool) -> None:
    """A model may have more ends than the tokenizer's one; an end that is told replaces them."""
    identity = WorkerIdentity(
        oe.ENGINE_ROLE_AGGREGATED, MODEL, "i1", "0", "", 1, end_id=2, engine_knows_end=engine_knows
    )
    handoffs = Handoffs(backend="", limit_s=60)
    parser = LegParser(engine(), identity, handoffs, NO_PROCESSORS)
    leg = parser.parse_leg(request(), ())
    assert leg.sampling.end_id == (None if engine_knows else 2)
    assert leg.end_id == 2


def test_a_guide_reaches_the_engines_parameters() -> None:
    guided = engine(guided_decoding_backend="xgrammar")
    guided.api = SimpleNamespace(**vars(sim_request), GuidedDecodingParams=dict)
    leg = parse(changed(guided={"regex": "a+"}), on=guided)
    assert leg.sampling.guided_decoding == {"regex": "a+"}
    assert parse(request(), on=guided).sampling.guided_decoding is None


def test_t2_2_a_prompt_over_the_step_limit_is_refused_by_name_unless_it_is_chunked() -> None:
    over = request(tokens=list(range(1, 102)))
    for role, prompt in (
        (oe.ENGINE_ROLE_AGGREGATED, over),
        (oe.ENGINE_ROLE_PREFILL, changed(token_ids=over.token_ids)),
    ):
        if role == oe.ENGINE_ROLE_PREFILL:
            prompt.extra["request_type"] = "context_only"
        code, message = refusal(prompt, on=engine(max_num_tokens=100), role=role)
        assert code == Code.INVALID_ARGUMENT
        assert message.startswith("token_ids")
        assert "max_num_tokens (100)" in message
        assert parse(prompt, on=engine(max_num_tokens=100, enable_chunked_prefill=True), role=role)
        two = engine(max_num_tokens=100, context_parallel_size=2)
        assert parse(prompt, on=two, role=role)
    decode = changed(token_ids=over.token_ids)
    decode.kv.session.CopyFrom(session())
    assert parse(decode, on=engine(max_num_tokens=100), role=oe.ENGINE_ROLE_DECODE)


def test_w01_where_no_window_is_known_the_engine_judges() -> None:
    unknown = engine(max_seq_len=None)
    leg = parse(request(tokens=list(range(1, 900))), on=unknown)
    assert len(leg.tokens) == 899
    endless = request()
    endless.stopping.ClearField("max_tokens")
    assert parse(endless, on=unknown).sampling.max_tokens is None
    endless.stopping.max_tokens = 0xFFFFFFFF
    assert parse(endless, on=unknown).sampling.max_tokens == 0x7FFFFFFF
