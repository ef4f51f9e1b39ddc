"""Every stream against the continuation of its prompt: tokens are the engine's, in both modes alike."""

from typing import Any

import pytest

from support.engine.tokens import EOS, PROMPT_BEFORE_EOS, expected, prompt
from support.gateway.foreign_client import Answer, Client, read, request
from support.gateway.processes import Cluster


@pytest.mark.parametrize("n_prompt", [1, 31, 32, 33, 1000, 20_000])
def test_tokens_are_the_continuation_of_the_prompt(client: Client, n_prompt: int) -> None:
    tokens = prompt(n_prompt)
    answer = client.generate(request(tokens, 40, request_id=f"n-{n_prompt}"))
    assert answer.tokens == expected(tokens, 40)
    assert answer.events == ["token", "finished"]
    assert answer.reason == "FINISH_REASON_LENGTH"
    assert answer.request_ids == {f"n-{n_prompt}"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (n_prompt, 40)


def test_a_repeated_prompt_gets_the_same_tokens_from_the_cache(client: Client) -> None:
    tokens = prompt(2000, seed=5)
    first, second = (client.generate(request(tokens, 20)) for _ in range(2))
    assert first.tokens == second.tokens == expected(tokens, 20)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_disagg_02_a_small_budget_is_exact(client: Client, max_tokens: int) -> None:
    """DISAGG-02: the token that prefill made counts."""
    answer = client.generate(request(prompt(100), max_tokens))
    assert answer.tokens == expected(prompt(100), max_tokens)
    assert answer.reason == "FINISH_REASON_LENGTH"


def test_min_tokens_of_a_client_reaches_the_decode_leg_only(client: Client) -> None:
    """The prefill leg has a budget of one; a client's min_tokens above that must not break it."""
    whole = expected(PROMPT_BEFORE_EOS, 6)
    assert whole[4] == EOS
    answer = client.generate(request(PROMPT_BEFORE_EOS, 6, stopping={"min_tokens": 5}))
    assert answer.tokens == whole


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_ends_the_stream(client: Client, at: int, *, included: bool) -> None:
    """At 0 the prefill worker's own token ends the request, and there is no handoff."""
    tokens = prompt(50, seed=3)
    whole = expected(tokens, 10)
    options: dict[str, Any] = {"conditions": [{"stop_token_id": whole[at]}]}
    if included:
        options["include_stop_in_output"] = True
    answer = client.generate(request(tokens, 10, stopping=options))
    assert answer.tokens == whole[: at + 1 if included else at]
    assert answer.reason == "FINISH_REASON_STOP"
    assert answer.finished.stop_match.stop_token_id == whole[at]


def test_the_end_of_text_ends_the_stream(client: Client) -> None:
    whole = expected(PROMPT_BEFORE_EOS, 10)
    assert whole[4] == EOS
    answer = client.generate(request(PROMPT_BEFORE_EOS, 10))
    assert answer.tokens == whole[:5]
    assert answer.reason == "FINISH_REASON_STOP"


def test_ignore_eos_goes_past_the_end_of_text(client: Client) -> None:
    answer = client.generate(request(PROMPT_BEFORE_EOS, 10, stopping={"ignore_eos": True}))
    assert answer.tokens == expected(PROMPT_BEFORE_EOS, 10)
    assert answer.reason == "FINISH_REASON_LENGTH"


def test_a_cache_salt_changes_the_tokens_and_only_by_its_value(client: Client) -> None:
    tokens = prompt(200, seed=4)
    salted = client.generate(request(tokens, 10, kv={"cache_salt": "tenant-a"}))
    other = client.generate(request(tokens, 10, kv={"cache_salt": "tenant-b"}))
    plain = client.generate(request(tokens, 10))
    assert salted.tokens == expected(tokens, 10, "tenant-a")
    assert other.tokens == expected(tokens, 10, "tenant-b")
    assert plain.tokens == expected(tokens, 10)
    assert len({tuple(answer.tokens) for answer in (salted, other, plain)}) == 3


def test_without_a_budget_the_context_window_is_the_budget(disagg_client: Client) -> None:
    """Window 32,768: a prompt of 32,760 tokens leaves 8."""
    tokens = prompt(32_760)
    answer = disagg_client.generate(request(tokens, None))
    assert answer.tokens == expected(tokens, 8)
    assert answer.reason == "FINISH_REASON_LENGTH"


def test_two_clients_with_the_same_request_id_do_not_meet(either: Cluster) -> None:
    """Each gets its own tokens and its own id back, though both run at the same time."""
    prompts = [prompt(500, seed=11), prompt(700, seed=12)]
    with Client(either.gateway.address) as first, Client(either.gateway.address) as second:
        calls = [
            client.start(request(tokens, 60, request_id="same"))
            for client, tokens in zip((first, second, first, second), prompts * 2, strict=True)
        ]
        answers: list[Answer] = [read(call) for call in calls]
    for answer, tokens in zip(answers, prompts * 2, strict=True):
        assert answer.tokens == expected(tokens, 60)
        assert answer.request_ids == {"same"}


def test_logprobs_are_the_same_whether_one_worker_or_two_gave_them(
    agg: Cluster, disagg: Cluster
) -> None:
    """The prompt's come from prefill, the first token's travel with the handoff, the rest from decode."""
    seen = []
    for served in (agg, disagg):
        message = request(prompt(70, seed=61), 5)
        message.response.return_prompt_logprobs = True
        message.response.prompt_candidates.top_n = 2
        message.response.return_output_logprobs = True
        message.response.output_candidates.top_n = 2
        with Client(served.gateway.address) as client:
            responses = list(client.start(message))
        assert {response.request_id for response in responses} == {message.request_id}
        events = [response.WhichOneof("event") for response in responses]
        assert (events[0], events[-1]) == ("prompt", "finished")
        assert set(events[1:-1]) == {"token"}
        of_prompt = list(responses[0].prompt.tokens)
        of_output = [token for response in responses for token in response.token.tokens]
        assert len(of_prompt) == 70
        assert len(of_output) == 5
        assert all(token.HasField("logprob") for token in of_prompt[1:] + of_output)
        assert not of_prompt[0].HasField("logprob")
        seen.append(
            [
                (t.token_id, t.logprob, [(c.token_id, c.logprob) for c in t.candidates])
                for t in of_prompt + of_output
            ]
        )
    assert seen[0] == seen[1]
