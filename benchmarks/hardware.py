"""Where a benchmark computes: its clock, a policy of real size, and what the hardware can do at most."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from penstock.config import TinyModelConfig
from penstock.model.load_policy import CPU, load_policy
from penstock.model.tiny import write_tiny_model

QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}
LARGE_BYTES = 2**30
MATRIX, CPU_MATRIX = 8192, 1024


def tiny_policy(max_context: int, *, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The built-in tiny policy; the same random weights every time."""
    with TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), TinyModelConfig(), max_context)
        return load_policy(Path(directory), weights=False, seed=0, device=device, dtype=dtype)


def real_policy(*, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The shape of Qwen3-0.6B with random weights."""
    with TemporaryDirectory() as directory, torch.device(device):
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_0_6B))
        return load_policy(Path(directory), weights=False, seed=0, device=device, dtype=dtype)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """On a CPU the CPU time of the process, which other load disturbs least; elsewhere wall time until it is done."""
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    work()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def accelerator_name(device: torch.device) -> str | None:
    """None for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def bytes_per_s(device: torch.device) -> float:
    """Read plus written, by a copy within the device's memory."""
    source = torch.ones(LARGE_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 10 * 2 * LARGE_BYTES / _typical(lambda: [target.copy_(source) for _ in range(10)], device)


def flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """By a product of two large square matrices."""
    size = CPU_MATRIX if device.type == "cpu" else MATRIX
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 10 * 2 * size**3 / _typical(lambda: [one @ other for _ in range(10)], device)


def _typical(work: Callable[[], object], device: torch.device) -> float:
    work()
    return median(seconds(work, device) for _ in range(5))
