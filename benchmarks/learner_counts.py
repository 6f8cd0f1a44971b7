"""Counts for `learner_scale.py`: balance of ranks, kernels and waits of a micro-batch, and planned memory."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3 import Qwen3Config

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.processes.memory_plan import Need
from penstock.samples import Sample
from penstock.trainer.forward import pass_cost, token_logprobs
from penstock.trainer.learner import Learner
from penstock.trainer.memory import learner_bytes
from penstock.trainer.packed_attention import pack
from penstock.trainer.packing import PASSES, TokenTable, flatten, micro_batches
from penstock.trainer.prepare import prepare
from penstock.trainer.rank_balancing import Work, attention_per_token, costs, split_over_ranks
from penstock.trainer.strategy import compile_layers
from penstock.types import NO_VERSION

GROUP_SIZE, PROMPT, MEDIAN, SIGMA, CAP = 8, 512, 7000, 1.0, 32_768
PASS_TOKENS = 32_768
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__")
COUNTS = ("nonzero", "masked_select", "unique", "unique_consecutive")
"""What waits until the device has computed a value, or how many there are."""
COMPUTE_NOTHING = frozenset(
    f"aten::{name}"
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "as_strided",
        "as_strided_",
        "detach",
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "resolve_conj",
        "resolve_neg",
        "to",
        "lift_fresh",
        "alias",
        "reshape",
        "unsqueeze",
        "squeeze",
        "narrow",
        "result_type",
    ]
)
"""Operations that launch no kernel."""
MEASURED = {
    "10 M, 4k tokens": ({"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}, 4096),
    "30 M, 4k tokens": ({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}, 4096),
    "90 M, 2k tokens": ({"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10}, 2048),
}
"""Shapes of models, and the tokens of their micro-batches."""
ENOUGH_S = 600.0
RETURNED_BYTES = 2**16
"""Size from which on the C library returns freed memory."""
QUICK_MEASURED = "10 M, 4k tokens"


SHAPES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12_288, 36, 32, False),
    "Qwen3-14B": (5120, 17_408, 40, 40, False),
    "Qwen3-32B": (5120, 25_600, 64, 64, False),
}
"""Width, width of the feed-forward layer, layers, heads, and whether the output layer is the embedding."""
CONTEXTS = (8192, 32_768)
CARD_BYTES = 80 * 2**30
MOST_RANKS = 256


def shape(name: str) -> Any:
    width, between, layers, heads, tied = SHAPES[name]
    return Qwen3Config(
        hidden_size=width,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )


def real_model() -> PreTrainedModel:
    """Qwen3-8B without weights."""
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(shape("Qwen3-8B"))
    return made.eval()


def fewest_ranks(name: str, context: int, offload: Sequence[str] = ()) -> float:
    """Return the smallest number of ranks with 80 GiB each on which the whole model can be trained, as planned: shards,
    activations computed again, passes of one answer of this length. `offload`: what waits in main memory. nan if there
    are too few."""
    ranks = 1
    while ranks <= MOST_RANKS:
        trainer = TrainerConfig.model_validate(
            {
                "ranks": ranks,
                "distributed": {"strategy": "fsdp"},
                "activation_checkpointing": True,
                "offload": list(offload),
                "tokens_per_microbatch": context,
            }
        )
        needed = learner_bytes(
            shape(name), trainer, longest=context, dtype=torch.bfloat16, on_accelerator=True, roles=["actor"]
        )
        if Need("actor", ranks, {"all": needed.total}).total <= CARD_BYTES:
            return float(ranks)
        ranks *= 2
    return math.nan


def balance(model: PreTrainedModel, num_ranks: int, num_groups: int, seed: int) -> float:
    """Return the share of the ranks' time in which they compute tokens, if they make every pass together: answers of
    log-normal length, median 7k and at most 32k tokens."""
    draw = np.random.default_rng(seed)
    answers = np.minimum(draw.lognormal(np.log(MEDIAN), SIGMA, num_groups * GROUP_SIZE), CAP - PROMPT).astype(int)
    ids = [np.zeros(PROMPT + max(answer, 1), dtype=np.int64) for answer in answers]
    groups = np.repeat(np.arange(num_groups), GROUP_SIZE)
    batch = Batch({"groups": groups, "early": np.zeros(len(ids), dtype=bool)}, {"token_ids": ids})
    work = Work(attention_per_token=attention_per_token(model), pass_tokens=PASS_TOKENS)
    fixed = pass_cost(model, torch.device("cuda"))
    loads = []
    for part in split_over_ranks(batch, num_ranks, work):
        masks = [np.arange(len(row)) >= PROMPT for row in part["token_ids"]]
        table = TokenTable.build(part["token_ids"], flatten(masks, np.bool_), passes=part[PASSES])
        micros = micro_batches(table, PASS_TOKENS, torch.device("cpu"), share_prefixes=False, pack=True)
        lengths = [micro.boundaries.lengths for micro in micros if micro.boundaries is not None]
        loads.append([float(costs(each, work.attention_per_token).sum()) for each in lengths])
    num_rounds = max(map(len, loads))
    whole = np.asarray([[*each, *[0.0] * (num_rounds - len(each))] for each in loads])
    return float(whole.sum() / num_ranks / (whole.max(axis=0) + fixed).sum())


def kernels(num_layers: int, *, compiled: bool) -> int:
    """Return the kernels of a forward and a backward pass over packed samples, in bfloat16."""
    config = Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, vocab_size=64, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert pack(model)
    table = TokenTable.build([np.arange(1, 40)], np.ones(39, dtype=bool))
    (micro,) = micro_batches(table, 64, torch.device("cpu"), share_prefixes=False, pack=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run() -> None:
        token_logprobs(model, micro)[0].sum().backward()  # type: ignore[no-untyped-call]

    if compiled:
        torch.compiler.reset()
        compile_layers(model)
        with inductor.patch({"cpp.enable_kernel_profile": True}):
            run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return sum(map(_computes, seen.events()))


def _computes(event: Any) -> bool:
    """Return whether an event of the profiler is a compiled kernel, or an operation that computes something itself."""
    if "cpp_fused" in event.name:
        return True
    return _is_operation(event) and not any(map(_is_operation, event.cpu_children))


def _is_operation(event: Any) -> bool:
    return event.name.startswith("aten::") and event.name not in COMPUTE_NOTHING


class Waits(TorchFunctionMode):
    """Counts operations that wait for the device: those that read a value, and those that select by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        indexed = name in ("__getitem__", "__setitem__") and any(map(_is_mask, _indices(args[1])))
        self.count += name in (*READS, *COUNTS) or indexed
        return func(*args, **(kwargs or {}))


def _indices(index: Any) -> Sequence[Any]:
    return index if isinstance(index, tuple) else (index,)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def waits(num_samples: int) -> tuple[int, int]:
    """Return how often the learner waits for the device while it accumulates, and its micro-batches."""
    config = Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    learner = Learner(model, TrainerConfig(tokens_per_microbatch=64), max_staleness=1)
    learner._strategy.packs = pack(model)  # as on an accelerator
    with Waits() as counted:
        learner.accumulate(prepare(samples(num_samples, 64, 64))[0])
    return counted.count, num_samples


def samples(number: int, length: int, vocab: int) -> list[Sample]:
    draw = np.random.default_rng(0)
    mask = (np.arange(length) > 0).astype(np.uint8)
    return [
        Sample(
            group=each // 2,
            episode=each,
            reward=float(each % 2),
            truncated=False,
            token_ids=draw.integers(3, vocab, length).astype(np.int32),
            loss_mask=mask,
            logprobs=(-4.0 * mask).astype(np.float32),
            versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        )
        for each in range(number)
    ]


def planned_and_measured(name: str) -> tuple[float, float]:
    """Return the bytes of a learner, as planned, and as measured: by how much a process with one grows at most in two
    steps, and by how much more when it saves a checkpoint, which may happen at the same time. What is freed there goes
    back to the system at once, so that its size is that of its tensors."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(RETURNED_BYTES)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_planned_and_measured, (name,))


def _planned_and_measured(name: str) -> tuple[float, float]:
    torch.set_num_threads(1)
    sizes, tokens = MEASURED[name]
    config = Qwen3Config(**sizes, vocab_size=8192, head_dim=64, num_attention_heads=8, num_key_value_heads=4)
    trainer = TrainerConfig.model_validate({"tokens_per_microbatch": tokens, "canaries": {"parity_every": None}})
    longest = tokens // 4
    planned = learner_bytes(
        config, trainer, longest=longest, dtype=torch.float32, on_accelerator=False, roles=["actor"]
    )
    before = memory("VmRSS")
    learner = Learner(AutoModelForCausalLM.from_config(config).eval(), trainer, max_staleness=9)
    batch, _ = prepare(samples(8, longest, 8192))
    forget_peak()
    for _ in range(2):
        learner.accumulate(batch)
        learner.step()
    measured = memory("VmHWM") - before
    forget_peak()
    before = memory("VmRSS")
    with TemporaryDirectory() as directory:
        learner.write(Path(directory))
        await_files(learner)
    return float(planned.total), float(measured + memory("VmHWM") - before)


def forget_peak() -> None:
    """Make the present size of this process the largest so far."""
    Path("/proc/self/clear_refs").write_text("5")


def await_files(learner: Learner) -> None:
    """Wait until the files of a checkpoint are written."""
    if not learner.is_written(ENOUGH_S):
        raise TimeoutError(f"the files of a checkpoint were not written in {ENOUGH_S:g} s")


def memory(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
