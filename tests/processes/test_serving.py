"""Weights from a publisher to an engine, wherever each computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import publish_next

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.processes.slot_server import make_update
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.slot_engine import SlotEngine
from penstock.weights.publication import WeightsPublisher
from penstock.weights.shared_memory import fingerprint, layout, receive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_published_weights_are_what_the_engine_serves(
    tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    write_tiny_model(tmp_path, TinyModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1), 64)
    trained = load_policy(tmp_path, weights=False, seed=1, device=device)  # float32, as a trainer's
    model = load_policy(tmp_path, weights=False, seed=2, device=device, dtype=dtype)
    runner = EngineRunner(SlotEngine(model, num_slots=4, max_context=64, policy_version=0), process="rollout-0")
    request = GenerateRequest(
        rid="a", prompt_ids=[7, 8], params=SamplingParams(ignore_eos=True), max_new_tokens=(50,), seeds=(1,)
    )
    runner.start()
    try:
        publisher = WeightsPublisher(tmp_path / "weights")
        handle = publish_next(publisher, {name: p.to(dtype) for name, p in trained.named_parameters()}, 1)
        expected = layout(runner.engine.parameters())
        update = make_update(runner, lambda handle: receive(handle, expected))
        await update.begin(handle)
        served = await update.commit(1)
        (segment,) = await runner.generate(request)
    finally:
        await runner.stop()
    assert served.fingerprint == handle.fingerprint == fingerprint(runner.engine.parameters())
    assert all(torch.equal(p, q.to(dtype)) for p, q in zip(model.parameters(), trained.parameters(), strict=True))
    assert [span.policy_version for span in segment.spans] == [1]
