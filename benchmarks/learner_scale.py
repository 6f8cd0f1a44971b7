"""What the learner needs for answers of real length, counted on a CPU.

`logits_peak_bytes_per_token_vocab`: how much the memory of the process grows at most in a forward and a backward pass
of the output layer, per token and entry of the vocabulary, with the vocabulary of Qwen3 and a narrow body. The worst of
8k and 32k tokens. `whole_logits_peak_bytes_per_token_vocab`: the same with the logits of all tokens at once, for 1k
tokens. `chunks_vs_whole_time`: processor time of the chunks over that of all logits at once, for 1k tokens.

`balance_4_ranks`, `balance_64_ranks`: share of the time of shards in which they compute tokens, if each pass takes as
long as its most expensive rank, with the shape of Qwen3-8B: 32 and 128 groups of 8 answers, log-normal, median 7k and
at most 32k tokens. `kernels_per_layer`: kernels of the forward and the backward pass of one layer in bfloat16, with
`trainer.compile`; `eager_kernels_per_layer` without.
`syncs_per_microbatch`: how often a micro-batch waits for the device. `plan_vs_measured_peak`: the largest deviation of
the planned from the measured memory of a learner, as a share of the measured, for three sizes.

`checkpoint_stall_share`: time in which training stands still for a checkpoint of 0.9 GB, as a share of an optimizer
step and its passes over 4k tokens. Everything else of the checkpoint happens beside them, on the same cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

import torch
from learner_counts import (
    CONTEXTS,
    MEASURED,
    QUICK_MEASURED,
    SHAPES,
    balance,
    fewest_ranks,
    forget_peak,
    kernels,
    memory,
    planned_and_measured,
    real_model,
    waits,
)
from learner_saving import saving_times
from report import Benchmark, Figures, arguments, publish
from torch import Tensor

from penstock.trainer.forward import token_statistics
from penstock.trainer.output_layer import OutputLayer, Scaling

BENCHMARK = Benchmark(
    name="learner_scale",
    measures=["trainer"],
    figures=[
        "logits_peak_bytes_per_token_vocab",
        "whole_logits_peak_bytes_per_token_vocab",
        "chunks_vs_whole_time",
        *(
            "balance_4_ranks",
            "balance_64_ranks",
            "kernels_per_layer",
            "eager_kernels_per_layer",
            "syncs_per_microbatch",
            "plan_vs_measured_peak",
            "checkpoint_stall_share",
        ),
    ],
)
VOCAB, WIDTH = 151_936, 64
TOKENS = (8192, 32_768)
FEW_TOKENS, QUICK_TOKENS = 1024, 2048
ROUNDS = 3
RANKS_AND_GROUPS = ((4, 32), (64, 128))
DRAWS = 5
FITS_TABLE = "Accelerators of 80 GiB that training the whole model takes, as planned and on no device confirmed"
SAVING_TABLE = "A checkpoint beside training, seconds"
PLAN_TABLE = "Memory of a learner in a step, MiB"
TABLE = "Peak memory of the output layer, bytes per token and entry of the vocabulary"

Statistics = Callable[[torch.nn.Linear, Tensor, Tensor], tuple[Tensor, Tensor]]


def in_chunks(head: torch.nn.Linear, hidden: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return OutputLayer(head, Scaling()).statistics(hidden, chosen)


def whole(head: torch.nn.Linear, hidden: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    return token_statistics(head(hidden), chosen)


def peak(statistics: Statistics, num_tokens: int) -> tuple[float, float]:
    """Return the bytes by which the process grows at most, per token and entry, and the processor time in seconds."""
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    hidden = torch.randn(num_tokens, WIDTH, requires_grad=True)
    chosen = torch.randint(0, VOCAB, (num_tokens,))
    forget_peak()
    before, began = memory("VmRSS"), time.process_time()
    logprobs, _ = statistics(head, hidden, chosen)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return (memory("VmHWM") - before) / num_tokens / VOCAB, time.process_time() - began


def add_balance(figures: Figures, *, quick: bool) -> None:
    model = real_model()
    for num_ranks, num_groups in RANKS_AND_GROUPS:
        draws = [balance(model, num_ranks, num_groups, seed) for seed in range(1 if quick else DRAWS)]
        name = f"balance_{num_ranks}_ranks"
        figures.add(name, draws)


def add_fits(figures: Figures, *, quick: bool) -> None:
    for name in list(SHAPES)[: 1 if quick else None]:
        row = {
            f"{context:,} tokens{words}": [fewest_ranks(name, context, offload)]
            for words, offload in (("", ()), (", offloaded", ("activations", "optimizer")))
            for context in CONTEXTS[: 1 if quick else None]
        }
        figures.tables.setdefault(FITS_TABLE, {})[name] = row


def add_counts(figures: Figures) -> None:
    for name, compiled in (("kernels_per_layer", True), ("eager_kernels_per_layer", False)):
        one, two = (kernels(num_layers, compiled=compiled) for num_layers in (1, 2))
        figures.add(name, [two - one])
    (few, num_few), (many, num_many) = waits(2), waits(6)
    figures.add("syncs_per_microbatch", [(many - few) / (num_many - num_few)])


def add_plans(figures: Figures, *, quick: bool) -> None:
    found = {name: planned_and_measured(name) for name in MEASURED if not quick or name == QUICK_MEASURED}
    for name, (planned, measured) in found.items():
        row = {"planned": [planned / 2**20], "measured": [measured / 2**20]}
        figures.tables.setdefault(PLAN_TABLE, {})[name] = row
    figures.add("plan_vs_measured_peak", [max(abs(planned / measured - 1) for planned, measured in found.values())])


def add_saving(figures: Figures, *, quick: bool) -> None:
    found = saving_times(quick=quick, rounds=1 if quick else ROUNDS)
    figures.add("checkpoint_stall_share", [each.stall_share for each in found])
    size = f"{found[0].num_bytes / 1e9:.2f} GB"
    rows = {
        f"{size}, without": {
            "passes": [each.passes_s for each in found],
            "step": [each.step_s for each in found],
        },
        f"{size}, with": {
            "taken": [each.taken_s for each in found],
            "passes": [each.passes_beside_s for each in found],
            "step": [each.step_beside_s for each in found],
            "complete after": [each.complete_s for each in found],
        },
    }
    figures.tables[SAVING_TABLE] = {
        row: {column: [fmean(values), max(values) - min(values)] for column, values in cells.items()}
        for row, cells in rows.items()
    }


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = Figures()
    lengths = (QUICK_TOKENS,) if options.quick else TOKENS
    peaks = {num_tokens: peak(in_chunks, num_tokens)[0] for num_tokens in lengths}
    for num_tokens, found in peaks.items():
        figures.tables.setdefault(TABLE, {})[f"{num_tokens:,} tokens, in chunks"] = {"peak": [found]}
    figures.add("logits_peak_bytes_per_token_vocab", [max(peaks.values())])
    rounds = [(peak(whole, FEW_TOKENS), peak(in_chunks, FEW_TOKENS)) for _ in range(1 if options.quick else ROUNDS)]
    at_once = max(bytes_ for (bytes_, _), _ in rounds)
    figures.tables[TABLE][f"{FEW_TOKENS:,} tokens, all at once"] = {"peak": [at_once]}
    figures.add("whole_logits_peak_bytes_per_token_vocab", [at_once])
    figures.add("chunks_vs_whole_time", [chunks_s / whole_s for (_, whole_s), (_, chunks_s) in rounds])
    add_balance(figures, quick=options.quick)
    add_counts(figures)
    add_fits(figures, quick=options.quick)
    add_plans(figures, quick=options.quick)
    add_saving(figures, quick=options.quick)
    publish(BENCHMARK, figures.flat, options.json, tables=figures.tables)


if __name__ == "__main__":
    main()
