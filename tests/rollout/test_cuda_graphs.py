"""Recorded forwards on a CUDA device against the same forwards launched one by one, and against plain ones."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_policy import MAX_CONTEXT, make_engine, make_request, reference_logprobs, run, weights
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.slot_engine import SlotEngine
from penstock.samples import Segment

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")


def recording_engine(*, num_slots: int = 24, recordable: bool = True, dtype: torch.dtype = torch.float16) -> SlotEngine:
    engine = make_engine(num_slots=num_slots, device=CUDA, dtype=dtype)
    assert engine._recorded is not None
    engine._recorded._recordable = recordable
    return engine


def mixed_requests(temperature: float = 1.0) -> list[GenerateRequest]:
    """Prompts and answers of many lengths, most prompts shared by several samples, more than there are slots."""
    numbers = random.Random(1)
    return [
        make_request(
            str(i),
            [numbers.randrange(2, 64) for _ in range(numbers.randint(1, 30))],
            max_new_tokens=tuple(min(60, int(numbers.lognormvariate(2, 1)) + 1) for _ in range(1 + i % 4)),
            seeds=tuple(range(4 * i, 4 * i + 1 + i % 4)),
            params=SamplingParams(temperature=temperature, ignore_eos=True),
        )
        for i in range(30)
    ]


def test_replayed_steps_equal_launched_ones_bit_for_bit() -> None:
    recorded, launched = recording_engine(), recording_engine(recordable=False)
    assert run(recorded, *mixed_requests()) == run(launched, *mixed_requests())
    assert recorded._recorded is not None and len(recorded._recorded._recorded) > 5
    assert launched._recorded is not None and not launched._recorded._recorded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_a_plain_forward(temperature: float) -> None:
    requests = mixed_requests(temperature)
    segments = run(recording_engine(), *requests)
    differences = [
        abs(found - expected)
        for request in requests
        for segment in segments[request.rid]
        for found, expected in zip(
            segment.logprobs, reference_logprobs(request.prompt_ids, segment.token_ids), strict=True
        )
    ]
    assert sum(differences) / len(differences) < 2e-3 and max(differences) < 0.05


def test_what_is_replayed_uses_the_weights_and_slots_of_now() -> None:
    request = make_request("a", [5, 6, 7], max_new_tokens=40, seeds=(1, 2, 3))

    def lived(recordable: bool) -> list[Segment]:
        engine = recording_engine(recordable=recordable)
        engine.submit(request)
        for number in range(1, 20):
            engine.step()
            if number == 8:
                engine.load_weights(weights(1), 1)
            if number == 12:
                engine.retract()
        return run(engine)["a"]

    found = lived(recordable=True)
    assert found == lived(recordable=False)
    assert [span.policy_version for span in found[0].spans] == [0, 1]


def test_a_released_engine_gives_its_memory_back_and_serves_the_same_after_resuming() -> None:
    request = make_request("whole", [5, 6, 7], max_new_tokens=20, seeds=(1, 2))
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=48,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval().to(CUDA, torch.bfloat16)
    torch.cuda.empty_cache()
    free_before, _ = torch.cuda.mem_get_info()
    engine = SlotEngine(model, num_slots=63, max_context=4096, policy_version=0)
    kv_bytes = 2 * 8 * 64 * 4 * 4096 * 64 * 2
    whole = run(engine, request)["whole"]
    assert free_before - torch.cuda.mem_get_info()[0] >= kv_bytes
    engine.release()
    assert free_before - torch.cuda.mem_get_info()[0] < kv_bytes / 4
    assert {parameter.device.type for parameter in engine.parameters().values()} == {"cpu"}
    engine.resume()
    assert {parameter.device.type for parameter in engine.parameters().values()} == {"cuda"}
    assert run(engine, request)["whole"] == whole


def test_a_model_that_cannot_be_recorded_is_served_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    engine, expected = recording_engine(num_slots=4), recording_engine(num_slots=4, recordable=False)
    engine.model.register_forward_pre_hook(lambda module, arguments: torch.ones(1, device=CUDA).item() and None)
    request = make_request("a", [5] * (MAX_CONTEXT // 2), seeds=(1, 2))
    assert run(engine, request) == run(expected, request)
    assert "cannot record the forward" in caplog.text
