"""The slot engine against Transformers' own generation and plain forwards."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from tiny_policy import (
    EOS,
    MAX_CONTEXT,
    VOCAB_SIZE,
    generate_greedily,
    make_engine,
    make_model,
    make_request,
    reference_logprobs,
    run,
    weights,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.slot_engine import Finished, SlotEngine
from penstock.samples import Segment, VersionSpan

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def engine(device: torch.device) -> SlotEngine:
    """Four slots, weights of seed 0 served as policy_version 0."""
    return make_engine(device=device)


def random_prompts(count: int, *, longest: int = 20, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(2, VOCAB_SIZE) for _ in range(numbers.randint(1, longest))] for _ in range(count)]


def test_greedy_output_equals_generate_across_slot_reuse(device: torch.device) -> None:
    model = make_model()
    prompts = random_prompts(11)
    limits = [random.Random(i).randint(1, 30) for i in range(len(prompts))]
    requests = [
        make_request(str(i), prompt, max_new_tokens=limit, params=GREEDY)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    segments = run(make_engine(num_slots=3, device=device), *requests)
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        assert segments[str(i)][0].token_ids == generate_greedily(model, prompt, limit)


LLAMA = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "model_of",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, num_attention_heads=4, initializer_range=0.2)),
        lambda: LlamaForCausalLM(
            LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=1, initializer_range=0.2)
        ),
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
        ),
    ],
    ids=["llama-mha", "llama-mqa", "gpt2"],
)
def test_other_architectures(model_of: type[PreTrainedModel], device: torch.device) -> None:
    torch.manual_seed(0)
    model = model_of().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = random_prompts(5, longest=12)
    expected = [generate_greedily(model, prompt, 16) for prompt in prompts]
    engine = SlotEngine(model.to(device), num_slots=3, max_context=48, policy_version=0)
    requests = [
        make_request(str(i), prompt, max_new_tokens=16, params=SamplingParams(temperature=0.0, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    segments = run(engine, *requests)
    assert [segments[str(i)][0].token_ids for i in range(5)] == expected


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_plain_forward(temperature: float, device: torch.device) -> None:
    """Enough rows of very different lengths that groups form, dissolve and trade rows."""
    engine = make_engine(num_slots=80, device=device)
    numbers = random.Random(1)
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    requests = [
        make_request(
            str(i),
            prompt,
            max_new_tokens=tuple(min(60, int(numbers.lognormvariate(2, 1)) + 1) for _ in range(3)),
            seeds=(3 * i, 3 * i + 1, 3 * i + 2),
            params=params,
        )
        for i, prompt in enumerate(random_prompts(60, longest=30))
    ]
    segments = run(engine, *requests)
    model = make_model()
    for request in requests:
        for segment, limit in zip(segments[request.rid], request.max_new_tokens, strict=True):
            assert len(segment.token_ids) == limit
            tokens = torch.tensor([request.prompt_ids + segment.token_ids])
            with torch.inference_mode():
                logits = model(tokens, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
            expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor([segment.token_ids]).T)
            torch.testing.assert_close(torch.tensor(segment.logprobs), expected[:, 0], atol=1e-4, rtol=0)


def test_weight_update_in_mid_sequence_keeps_the_cache_and_splits_the_spans(device: torch.device) -> None:
    engine = make_engine(seed=0, policy_version=4, device=device)
    prompt = [5, 6, 7]
    engine.submit(make_request("a", prompt, max_new_tokens=12, seeds=(1, 2)))
    for _ in range(5):
        engine.step()
    engine.load_weights(weights(1), 7)
    for segment in run(engine)["a"]:
        assert segment.spans == [VersionSpan(4, 0, 5), VersionSpan(7, 5, 12)]
        expected = reference_logprobs(prompt, segment.token_ids, seeds=((0, 0), (5, 1)))
        assert segment.logprobs == pytest.approx(expected, abs=1e-4)


def test_updates_without_tokens_in_between_leave_no_empty_span(engine: SlotEngine) -> None:
    engine.submit(make_request("a", [5], max_new_tokens=2))
    engine.load_weights(weights(1), 1)
    engine.step()
    engine.load_weights(weights(2), 2)
    engine.load_weights(weights(3), 3)
    assert run(engine)["a"][0].spans == [VersionSpan(1, 0, 1), VersionSpan(3, 1, 2)]


def test_a_refused_update_changes_nothing(engine: SlotEngine, device: torch.device) -> None:
    expected = run(make_engine(device=device), make_request("a", [5, 6]))
    new = weights(1)
    name = next(reversed(new))
    with pytest.raises(ValueError, match="not newer than 0"):
        engine.load_weights(new, 0)
    with pytest.raises(ValueError, match=f"lacks 1 weights, the first is {name}"):
        engine.load_weights({key: value for key, value in new.items() if key != name}, 1)
    with pytest.raises(ValueError, match=f"{name} has shape"):
        engine.load_weights({**new, name: torch.zeros(3)}, 1)
    assert engine.policy_version == 0
    assert run(engine, make_request("a", [5, 6])) == expected


def tokens_of(segments: list[Segment]) -> list[list[int]]:
    return [segment.token_ids for segment in segments]


def test_samples_depend_on_their_seed_and_not_on_the_batch(device: torch.device) -> None:
    request = make_request("a", [5, 6, 7], seeds=(11, 12, 11))
    alone = tokens_of(run(make_engine(device=device), request)["a"])
    assert alone[0] == alone[2] != alone[1]
    others = [make_request(f"b{i}", prompt, seeds=(i,)) for i, prompt in enumerate(random_prompts(20))]
    crowd = run(make_engine(num_slots=8, device=device), *others[:10], request, *others[10:])
    assert tokens_of(crowd["a"]) == alone


def test_an_answer_cut_into_segments_continues_with_the_same_tokens(engine: SlotEngine) -> None:
    prompt = [5, 6, 7]
    whole = run(engine, make_request("whole", prompt, max_new_tokens=9, seeds=(3,)))["whole"][0].token_ids
    first = run(engine, make_request("first", prompt, max_new_tokens=4, seeds=(3,)))["first"][0].token_ids
    rest = run(engine, make_request("rest", prompt + first, max_new_tokens=5, seeds=(3,)))["rest"][0].token_ids
    assert first + rest == whole


def test_more_samples_than_slots_are_served_in_parts(engine: SlotEngine) -> None:
    request = make_request("a", [5, 6], max_new_tokens=tuple(range(1, 11)), seeds=tuple(range(10)))
    segments = run(engine, request)["a"]
    assert [len(segment.token_ids) for segment in segments] == list(range(1, 11))
    assert engine.num_generated_tokens == sum(range(1, 11))


def test_stop_tokens_end_a_sample_and_ignore_eos_does_not() -> None:
    def answer(params: SamplingParams, seed: int) -> Segment:
        return run(make_engine(), make_request("a", [5, 6], max_new_tokens=60, seeds=(seed,), params=params))["a"][0]

    seed = next(seed for seed in range(50) if EOS in answer(SamplingParams(ignore_eos=True), seed).token_ids)
    free = answer(SamplingParams(ignore_eos=True), seed)
    assert (free.finish_reason, len(free.token_ids)) == ("length", 60)
    stopped = answer(SamplingParams(), seed)
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", free.token_ids[: free.token_ids.index(EOS) + 1])
    third = free.token_ids[2]
    cut = answer(SamplingParams(stop_token_ids=frozenset([third]), ignore_eos=True), seed)
    assert (cut.finish_reason, cut.token_ids) == ("stop", free.token_ids[: free.token_ids.index(third) + 1])


def test_abort_returns_what_there_is(engine: SlotEngine) -> None:
    expected = run(make_engine(), make_request("a", [5, 6], seeds=(1, 2)))["a"]
    engine.submit(make_request("other", [9], max_new_tokens=6, seeds=(3,)))
    engine.submit(make_request("a", [5, 6], max_new_tokens=(2, 8), seeds=(1, 2)))
    engine.submit(make_request("queued", [5], seeds=(1, 2, 3, 4)))
    for _ in range(3):
        engine.step()
    (aborted,) = engine.abort(["a"])
    assert [segment.finish_reason for segment in aborted.segments] == ["length", "abort"]
    assert tokens_of(aborted.segments) == [expected[0].token_ids[:2], expected[1].token_ids[:3]]
    (queued,) = engine.abort(["queued"])
    assert [len(segment.token_ids) for segment in queued.segments] == [3, 1, 0, 0]
    assert queued.segments[2] == Segment(token_ids=[], logprobs=[], spans=[], finish_reason="abort")
    assert engine.abort(["unknown"]) == []
    rest = run(engine)
    assert len(rest["other"][0].token_ids) == 6
    assert (engine.num_active, engine.num_waiting) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", []), "the prompt is empty"),
        (make_request("a", [3, -1]), "token id -1 is outside the vocabulary"),
        (make_request("a", [VOCAB_SIZE, 1]), f"token id {VOCAB_SIZE} is outside"),
        (make_request("a", [1] * 90, max_new_tokens=7), f"maximum context length is {MAX_CONTEXT} tokens"),
        (make_request("a", [1], max_new_tokens=0), "max_new_tokens must be at least 1"),
        (make_request("a", [1], max_new_tokens=(1, 2)), "has 1 seeds for 2 samples"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    engine: SlotEngine, request_: GenerateRequest, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.check(request_)


def test_reduced_precision_stays_near_the_plain_forward(device: torch.device) -> None:
    engine = make_engine(num_slots=8, device=device, dtype=torch.bfloat16)
    requests = [make_request(str(i), prompt, seeds=(i, -i)) for i, prompt in enumerate(random_prompts(6))]
    segments = run(engine, *requests)
    for request in requests:
        for segment in segments[request.rid]:
            expected = reference_logprobs(request.prompt_ids, segment.token_ids)
            assert segment.logprobs == pytest.approx(expected, abs=0.5)


def test_the_context_can_be_filled_to_the_last_token(engine: SlotEngine) -> None:
    segment = run(engine, make_request("a", [5] * 90, max_new_tokens=MAX_CONTEXT - 90))["a"][0]
    assert len(segment.token_ids) == 6


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_non_finite_logits_fail_the_request_and_poison_nobody(engine: SlotEngine) -> None:
    expected = run(make_engine(1, device=engine.model.device), make_request("b", [7, 8], seeds=(5,)))["b"]
    engine.load_weights({name: torch.full_like(tensor, torch.nan) for name, tensor in weights(0).items()}, 1)
    engine.submit(make_request("a", [5, 6], seeds=(1, 2)))
    failed = engine.step()
    assert [(result.request.rid, result.segments) for result in failed] == [("a", [])]
    assert "policy_version 1 computed logits that are not finite" in str(failed[0].error)
    engine.load_weights(weights(1), 2)
    assert tokens_of(run(engine, make_request("b", [7, 8], seeds=(5,)))["b"]) == tokens_of(expected)


def kv_tensors() -> int:
    """Tensors in the shape of the cache that are alive: 2 layers, 4 slots, 2 heads."""
    return sum(type(x) is torch.Tensor and x.ndim == 5 and x.shape[:3] == (2, 4, 2) for x in gc.get_objects())


def test_a_released_engine_holds_no_cache_and_serves_the_same_after_resuming() -> None:
    held = kv_tensors()
    engine = make_engine()
    request = make_request("whole", [5, 6, 7], max_new_tokens=20, seeds=(1, 2))
    whole = run(engine, request)["whole"]
    assert kv_tensors() == held + 2
    assert engine.release() == []
    assert kv_tensors() == held
    engine.resume()
    assert kv_tensors() == held + 2
    assert run(engine, request)["whole"] == whole


def test_release_ends_running_and_waiting_requests_with_what_they_have(engine: SlotEngine) -> None:
    whole = run(make_engine(), make_request("a", [5], max_new_tokens=20, seeds=(1, 2, 3)))["a"]
    for rid in ("a", "b", "c"):
        engine.submit(make_request(rid, [5], max_new_tokens=(20, 20, 2), seeds=(1, 2, 3)))
    for _ in range(4):
        engine.step()
    finished = {each.request.rid: each.segments for each in engine.release()}
    assert [len(segment.token_ids) for segment in finished["a"]] == [4, 4, 2]
    assert [segment.finish_reason for segment in finished["a"]] == ["abort", "abort", "length"]
    assert [len(segment.token_ids) for segment in finished["c"]] == [0, 0, 0]
    assert not engine.has_work and engine.num_active == 0 and engine.release() == []
    for part, full in zip(finished["a"], whole, strict=True):
        assert part.token_ids == full.token_ids[: len(part.token_ids)]


def test_what_arrives_while_released_ends_at_once_without_a_token(engine: SlotEngine) -> None:
    engine.release()
    request = make_request("early", [5], seeds=(1, 2, 3, 4, 5))
    (early,) = engine.submit(request)
    nothing = Segment(token_ids=[], logprobs=[], spans=[], finish_reason="abort")
    assert early == Finished(request=request, segments=[nothing] * 5)
    assert (engine.has_work, engine.num_waiting, engine.step()) == (False, 0, [])
    engine.load_weights(weights(3), 4)
    engine.resume()
    (late,) = run(engine, make_request("late", [5], seeds=(1,)))["late"]
    assert late.spans == [VersionSpan(4, 0, 8)]
    assert late.token_ids == run(make_engine(3), make_request("x", [5], seeds=(1,)))["x"][0].token_ids


def test_a_step_tells_what_it_computed(engine: SlotEngine) -> None:
    engine.submit(make_request("a", [5, 6, 7], max_new_tokens=3, seeds=(1, 2)))
    engine.step()
    assert (engine.num_decoded, engine.num_prefilled) == (0, 3)
    engine.submit(make_request("b", [5, 6], max_new_tokens=3))
    engine.step()
    assert (engine.num_decoded, engine.num_prefilled) == (2, 2)
    engine.step()
    assert (engine.num_decoded, engine.num_prefilled) == (3, 0)


def test_models_the_engine_would_compute_wrongly_are_refused() -> None:
    config = Qwen3Config(**LLAMA, num_attention_heads=4, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding_attention"):
        SlotEngine(Qwen3ForCausalLM(config), num_slots=1, max_context=8)
    windowed = MistralConfig(**LLAMA, num_attention_heads=4, sliding_window=16)  # lists no layers: all have the window
    with pytest.raises(ValueError, match="sliding_attention"):
        SlotEngine(MistralForCausalLM(windowed), num_slots=1, max_context=8)
    with pytest.raises(ValueError, match=f"exceeds the {MAX_CONTEXT} positions"):
        SlotEngine(make_model(), num_slots=1, max_context=MAX_CONTEXT + 1)
