"""Every field of GenerateRequest at and beyond the edges of its range, and the chain of defaults."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest

from pellucid.v1 import inference_pb2, types_pb2
from pellucid_model.tokenizers import CharacterTokenizer, ChatTemplate
from pellucid_server.chat import ChatPrompter
from pellucid_server.checkpoint_info import SamplingDefaults
from pellucid_server.engine.messages import Constraint, LogprobWish
from pellucid_server.errors import InvalidRequest, ModelNotFound, QueueFull, UnsupportedField
from pellucid_server.live_request import NO_OPTIONS
from pellucid_server.planning import ContextWish
from pellucid_server.rpc.errors import error_trailers
from pellucid_server.rpc.inference import SHORT_TEXT, prompt_tokens, tokenized
from pellucid_server.rpc.validation import GenerateSpec, validate_generate
from pellucid_server.served import DefaultSampling, ServedModel, default_sampling
from pellucid_server.text_pool import TextPool

VOCAB = 20
TOKENIZER = CharacterTokenizer.train(["abcdefghijklmnop"])


def model(tokenizer: bool = True, can_roll: bool = True) -> ServedModel:
    return ServedModel(
        name="m",
        tokenizer=TOKENIZER if tokenizer else None,
        vocab_size=VOCAB,
        eos_ids=(2,),
        longest_token=4,
        stop_ids=None,
        context_length=128,
        block_size=16,
        block_count=64,
        native_window=0,
        can_roll=can_roll,
        sampling=DefaultSampling(0.5, 7, 0.75, 0.25),
        default_max_new_tokens=256,
        max_new_tokens_limit=1000,
        overflow="reject",
    )


def validate(tokenizer: bool = True, **fields: Any) -> GenerateSpec:
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["text"] = "abc"
    return validate_generate(inference_pb2.GenerateRequest(**fields), model(tokenizer))


def refused(kind: type[InvalidRequest] = InvalidRequest, tokenizer: bool = True, **fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        validate(tokenizer, **fields)
    assert type(caught.value) is kind
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0000001, "1.0000001"),
        (1.0001, "1.0001"),
        (200.1, "200.1"),
        (-1e-9, "-1e-09"),
        (3.4028235e38, "3.4028235e+38"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_a_refused_number_is_shown_as_it_was_sent(value: float, shown: str) -> None:
    found = refused(sampling={"top_p": value})
    assert found == {"sampling.top_p": f"{shown} is not accepted; accepted: a number in (0, 1]"}


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("typical_p", [1e-9, 0.5, 1.0], [math.nan, math.inf, -math.inf, 0.0, -1.0, 1.0001, 1e30]),
        ("repetition_penalty", [0.01, 1.0, 100.0], [math.nan, math.inf, -math.inf, 0.0, 0.0099, 100.1, 1e30]),
        ("presence_penalty", [-2.0, 0.0, 2.0], [math.nan, math.inf, -math.inf, -2.001, 2.001, 1e30]),
        ("frequency_penalty", [-2.0, 0.0, 2.0], [math.nan, math.inf, -math.inf, -2.001, 2.001, 1e30]),
        ("temperature", [0.0, 1e-9, 1.0, 100.0], [math.nan, math.inf, -math.inf, -1e-9, -1.0, 100.1, 1e30]),
        ("top_p", [1e-9, 0.5, 1.0], [math.nan, math.inf, -math.inf, 0.0, -1.0, 1.0001, 1e30]),
        ("min_p", [0.0, 0.5, 0.999], [math.nan, math.inf, -math.inf, -1e-9, -1.0, 1.0, 1e30]),
        ("top_k", [0, 1, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1], [2**31, 2**32 - 1]),
    ],
)
def test_sampling_ranges(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        sampling = validate(sampling=types_pb2.SamplingParams(**{field: value})).wishes.sampling
        assert getattr(sampling, field) == pytest.approx(value, rel=1e-6)
    for value in bad:
        found = refused(sampling=types_pb2.SamplingParams(**{field: value}))
        assert set(found) == {f"sampling.{field}"}
        assert "accepted: a" in found[f"sampling.{field}"]


def test_all_violations_come_in_one_answer() -> None:
    found = refused(
        request_id="x" * 129,
        sampling=types_pb2.SamplingParams(temperature=math.nan, top_p=0, min_p=1, top_k=2**31),
        stopping=inference_pb2.StoppingCriteria(
            max_new_tokens=1001, min_new_tokens=2000, stop_strings=["", "y" * 1025], stop_token_ids=[1, VOCAB]
        ),
        output=inference_pb2.OutputOptions(min_tokens_per_message=257),
    )
    assert set(found) == {
        "request_id",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "stopping.max_new_tokens",
        "stopping.min_new_tokens",
        "stopping.stop_strings[0]",
        "stopping.stop_strings[1]",
        "stopping.stop_token_ids[1]",
        "output.min_tokens_per_message",
    }


def test_unset_sampling_takes_the_defaults_and_zero_is_not_unset() -> None:
    unset = validate().wishes.sampling
    assert (unset.temperature, unset.top_k, unset.top_p, unset.min_p) == (0.5, 7, 0.75, 0.25)
    zero = validate(sampling=types_pb2.SamplingParams(temperature=0, top_k=0, min_p=0, seed=0)).wishes.sampling
    assert (zero.temperature, zero.top_k, zero.min_p, zero.seed) == (0, 0, 0, 0)
    assert zero.top_p == 0.75


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
def test_any_seed_is_a_seed(seed: int) -> None:
    assert validate(sampling=types_pb2.SamplingParams(seed=seed)).wishes.sampling.seed == seed


def test_an_unset_seed_is_drawn() -> None:
    assert len({validate().wishes.sampling.seed for _ in range(5)}) == 5


def test_the_default_chain() -> None:
    operator = SamplingDefaults(temperature=0.0, top_k=None, top_p=None, min_p=None)
    checkpoint = SamplingDefaults(temperature=0.7, top_k=0, top_p=0.9, min_p=None)
    made = default_sampling(operator, checkpoint)
    assert (made.temperature, made.top_k, made.min_p) == (0.0, 0, 0.0)
    # Rounded to the API's float32: the echoed value, sent back, is the same value.
    assert made.top_p == types_pb2.SamplingParams(top_p=0.9).top_p
    assert default_sampling(SamplingDefaults(), SamplingDefaults()) == DefaultSampling(1.0, 0, 1.0, 0.0)


def test_prompts() -> None:
    with pytest.raises(InvalidRequest, match="prompt: is missing"):
        validate_generate(inference_pb2.GenerateRequest(), model())
    assert validate(token_ids=types_pb2.TokenIds(ids=[0, VOCAB - 1])).token_ids == [0, VOCAB - 1]
    assert refused(token_ids=types_pb2.TokenIds(ids=[0, VOCAB, 3])) == {
        "token_ids.ids[1]": f"{VOCAB} is not accepted; accepted: token ids from 0 to {VOCAB - 1}"
    }
    ids = types_pb2.TokenIds(ids=[1])
    assert set(refused(token_ids=ids, omit_special_tokens=True, parse_special_tokens=True)) == {
        "omit_special_tokens",
        "parse_special_tokens",
    }
    for text in ("", " ", "\0", "\U0010ffff"):
        assert validate(text=text).text == text


def test_without_a_tokenizer_text_is_refused_by_name() -> None:
    found = refused(
        UnsupportedField,
        tokenizer=False,
        text="x",
        stopping=inference_pb2.StoppingCriteria(stop_strings=["y"]),
    )
    assert set(found) == {"text", "stopping.stop_strings"}
    assert validate(tokenizer=False, token_ids=types_pb2.TokenIds(ids=[1])).token_ids == [1]


def test_stopping_ranges() -> None:
    def stopping(**fields: Any) -> dict[str, Any]:
        return {"stopping": inference_pb2.StoppingCriteria(**fields)}

    assert validate(**stopping(max_new_tokens=0)).wishes.max_new_tokens == 0
    assert validate(**stopping(max_new_tokens=1000)).wishes.max_new_tokens == 1000
    assert validate().wishes.max_new_tokens == 256
    assert (
        "1001 is not accepted; accepted: a whole number from 0 to 1000"
        in refused(**stopping(max_new_tokens=1001))["stopping.max_new_tokens"]
    )
    validate(**stopping(max_new_tokens=4, min_new_tokens=4))
    assert "which is 3" in refused(**stopping(max_new_tokens=3, min_new_tokens=4))["stopping.min_new_tokens"]
    validate(**stopping(min_new_tokens=256))
    assert "which is 256" in refused(**stopping(min_new_tokens=257))["stopping.min_new_tokens"]
    validate(**stopping(stop_strings=["é" * 512] * 32, stop_token_ids=[3] * 256))
    assert set(refused(**stopping(stop_strings=["a"] * 33, stop_token_ids=[3] * 257))) == {
        "stopping.stop_strings",
        "stopping.stop_token_ids",
    }


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"),
    [(1, 500_000_000, 1.5), (0, 1, 1e-9), (0, 0, None), (-1, 0, None), (0, -1, None), (1, -1, None), (1, 10**9, None)],
)
def test_time_limits(seconds: int, nanos: int, expected: float | None) -> None:
    stopping = inference_pb2.StoppingCriteria()
    stopping.time_limit.seconds = seconds
    stopping.time_limit.nanos = nanos
    if expected is None:
        assert set(refused(stopping=stopping)) == {"stopping.time_limit"}
    else:
        assert validate(stopping=stopping).time_limit == expected


def test_unknown_enumerators_are_refused() -> None:
    for number in (6, 99, -1):
        context = inference_pb2.ContextPolicy(overflow=number)  # type: ignore[arg-type]
        assert set(refused(UnsupportedField, context=context)) == {"context.overflow"}
    output = inference_pb2.OutputOptions(delivery_mode=3)  # type: ignore[arg-type]
    assert set(refused(UnsupportedField, output=output)) == {"output.delivery_mode"}


def context_of(can_roll: bool = True, **fields: Any) -> ContextWish:
    request = inference_pb2.GenerateRequest(text="abc", context=inference_pb2.ContextPolicy(**fields))
    return validate_generate(request, model(can_roll=can_roll)).wishes.context


def test_context_policies() -> None:
    assert context_of() == ContextWish("reject")
    assert context_of(overflow=inference_pb2.CONTEXT_OVERFLOW_AUTO) == ContextWish("roll")
    assert context_of(False, overflow=inference_pb2.CONTEXT_OVERFLOW_AUTO) == ContextWish("reencode")
    roll = context_of(overflow=inference_pb2.CONTEXT_OVERFLOW_ROLL, window_tokens=128, sink_tokens=0)
    assert roll == ContextWish("roll", window=128, sinks=0)
    reencode = context_of(overflow=inference_pb2.CONTEXT_OVERFLOW_REENCODE, hop_tokens=1)
    assert reencode == ContextWish("reencode", hop=1)


@pytest.mark.parametrize(
    ("policy", "numbers", "field", "says"),
    [
        ("ROLL", {"window_tokens": 0}, "window_tokens", "a whole number from 1 to 128"),
        ("ROLL", {"window_tokens": 129}, "window_tokens", "a whole number from 1 to 128"),
        ("REENCODE", {"sink_tokens": 128}, "sink_tokens", "a whole number from 0 to 127"),
        ("REENCODE", {"hop_tokens": 0}, "hop_tokens", "a whole number from 1 to 128"),
        ("ROLL", {"hop_tokens": 4}, "hop_tokens", "does not apply to the policy ROLL"),
        ("AUTO", {"hop_tokens": 4}, "hop_tokens", "does not apply to the policy ROLL"),
        ("REJECT", {"window_tokens": 8}, "window_tokens", "does not apply to the policy REJECT"),
        ("TRUNCATE", {"sink_tokens": 0}, "sink_tokens", "does not apply to the policy TRUNCATE"),
    ],
)
def test_windows_out_of_range(policy: str, numbers: dict[str, int], field: str, says: str) -> None:
    context = inference_pb2.ContextPolicy(overflow=f"CONTEXT_OVERFLOW_{policy}", **numbers)
    found = refused(context=context)
    assert set(found) == {f"context.{field}"}
    assert says in found[f"context.{field}"]


def test_absolute_positions_cannot_roll() -> None:
    with pytest.raises(InvalidRequest, match=r"context\.overflow: ROLL needs rotary"):
        context_of(False, overflow=inference_pb2.CONTEXT_OVERFLOW_ROLL)


def test_output_options() -> None:
    rules = validate().rules
    assert (rules.final_only, rules.min_tokens, rules.with_text, rules.with_token_ids) == (False, 1, True, True)
    assert set(refused(output=inference_pb2.OutputOptions(min_tokens_per_message=0))) == {
        "output.min_tokens_per_message"
    }
    assert validate(output=inference_pb2.OutputOptions(min_tokens_per_message=256)).rules.min_tokens == 256
    # A caller who says how many tokens a message needs gets it as soon as it has them.
    assert rules.paced
    assert not validate(output=inference_pb2.OutputOptions(min_tokens_per_message=1)).rules.paced


def test_other_models_are_not_found() -> None:
    assert validate(model="m").text == "abc"
    with pytest.raises(ModelNotFound, match="'gpt' is not served here; this server serves 'm'"):
        validate(model="gpt")
    with pytest.raises(ModelNotFound) as caught:
        validate(model="x" * 100_000)
    assert len(caught.value.message) < 200


def test_a_million_bad_values_make_a_short_answer() -> None:
    found = refused(
        token_ids=types_pb2.TokenIds(ids=[VOCAB] * 100_000),
        stopping=inference_pb2.StoppingCriteria(stop_strings=[""] * 32, stop_token_ids=[VOCAB] * 256),
    )
    assert 0 < len(found) <= 16


@pytest.mark.parametrize("character", ["r", "汉", "🔥", "\U000e0001"])
def test_bad_roles_in_any_script_fit_into_an_answer(character: str) -> None:
    """gRPC clients refuse more than 8,192 bytes of trailers, and their user would be told of that instead."""
    speaking = replace(model(), chat=ChatPrompter(ChatTemplate("{{ messages }}"), TOKENIZER))
    request = inference_pb2.GenerateRequest()
    for _ in range(40):
        request.chat.messages.add(role=character * 100, content="x")
    with pytest.raises(InvalidRequest) as caught:
        validate_generate(request, speaking)
    trailers = dict(error_trailers(caught.value))
    assert 1 <= len(caught.value.violations) <= 16
    assert len(quote(caught.value.message)) + len(trailers["grpc-status-details-bin"]) < 8000


def test_a_penalty_of_a_hundredth_is_shown_as_such() -> None:
    found = refused(sampling={"repetition_penalty": 0.001})
    assert found["sampling.repetition_penalty"].endswith("accepted: a number in [0.01, 100]")


def test_biases_and_allowed_ids() -> None:
    sampling = validate(sampling={"logit_bias": {7: -100, 0: 100, 3: 0.5}}).wishes.sampling
    assert sampling.logit_bias == ((0, 100.0), (3, 0.5), (7, -100.0))
    assert validate(sampling={"allowed_token_ids": [9, 2, 9]}).wishes.sampling.allowed_ids == (2, 9)
    found = refused(sampling={"logit_bias": {VOCAB: 1, 1: math.nan, 2: 101}, "allowed_token_ids": [0, VOCAB]})
    assert set(found) == {
        f"sampling.logit_bias[{VOCAB}]",
        "sampling.logit_bias[1]",
        "sampling.logit_bias[2]",
        "sampling.allowed_token_ids[1]",
    }


def test_sequence_counts() -> None:
    assert validate().sequence_count == 1
    assert validate(sampling={"sequence_count": 64}).sequence_count == 64
    for count in (0, 65):
        assert "from 1 to 64" in refused(sampling={"sequence_count": count})["sampling.sequence_count"]
    small = replace(model(), max_sequences=3)
    with pytest.raises(InvalidRequest, match="from 1 to 3"):
        validate_generate(inference_pb2.GenerateRequest(text="a", sampling={"sequence_count": 4}), small)


def test_logprobs() -> None:
    assert validate().wishes.options == NO_OPTIONS
    output: Any = {
        "output_logprobs": {},
        "prompt_logprobs": {"top_count": 20, "token_ids": [4, 4], "start_position": 9},
    }
    options = validate(output=output).wishes.options
    assert options.output_logprobs == LogprobWish()
    assert options.prompt_logprobs == LogprobWish(20, (4,), 9)
    few = replace(model(), max_logprobs=0)
    request = inference_pb2.GenerateRequest(text="a", output={"output_logprobs": {"top_count": 1}})
    with pytest.raises(InvalidRequest, match=r"output\.output_logprobs\.top_count: 1 .* from 0 to 0"):
        validate_generate(request, few)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"json_schema": "{}"}, Constraint("json_schema", "{}")),
        ({"json_object": {}}, Constraint("json_object")),
        ({"ebnf_grammar": 'root ::= "a"'}, Constraint("ebnf", 'root ::= "a"')),
        ({"choices": {"values": ["b", "a", "b"]}}, Constraint("choices", choices=("b", "a"))),
    ],
)
def test_constraints(given: dict[str, Any], expected: Constraint) -> None:
    assert validate(constraint=given).wishes.options.constraint == expected
    found = refused(UnsupportedField, False, token_ids={"ids": [1]}, constraint=given)
    assert set(found) == {"constraint"}


def test_cache_options_and_priority() -> None:
    options = validate(cache={"bypass_read": True, "salt": "x" * 256}, priority=-100).wishes.options
    assert (options.cache_read, options.cache_write, options.cache_salt) == (False, True, "x" * 256)
    assert options.priority == -100
    assert not validate(cache={"bypass_write": True}).wishes.options.cache_write


def test_chat_needs_a_template_and_messages() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<eos>")
    speaking = replace(model(), chat=ChatPrompter(template, TOKENIZER))
    request = inference_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "a"}, {"role": "x-Y_1"}]})
    spec = validate_generate(request, speaking)
    assert (spec.chat, spec.open_answer) == ((("user", "a"), ("x-Y_1", "")), True)
    assert (spec.text, spec.token_ids, spec.wishes.prompt_field) == (None, None, "chat.messages")
    assert prompt_tokens(speaking, spec) == [*TOKENIZER.encode("a", add_special_tokens=False), 2]
    request.chat.omit_generation_prompt = True
    assert not validate_generate(request, speaking).open_answer
    assert set(refused(UnsupportedField, chat={"messages": [{"role": "user"}]})) == {"chat"}
    request.chat.messages.add(role="", content="b")
    with pytest.raises(InvalidRequest, match=r"chat\.messages\[2\]\.role: '' is not accepted"):
        validate_generate(request, speaking)
    request.chat.ClearField("messages")
    with pytest.raises(InvalidRequest, match=r"chat\.messages: has 0 entries; accepted: 1 to 1024"):
        validate_generate(request, speaking)


async def test_only_what_takes_long_is_tokenized_in_a_thread() -> None:
    full = TextPool(0)  # It refuses whatever comes.
    for fields in (
        {"token_ids": {"ids": [5] * 10_000}, "context": {"overflow": "CONTEXT_OVERFLOW_TRUNCATE"}},
        {"text": "a" * SHORT_TEXT},
    ):
        spec = validate(**fields)
        assert await tokenized(model(), spec, full) == prompt_tokens(model(), spec)
    with pytest.raises(QueueFull):
        await tokenized(model(), validate(text="a" * (SHORT_TEXT + 1)), full)
    full.close()
