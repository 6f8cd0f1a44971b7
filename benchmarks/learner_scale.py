"""What the learner needs for answers of real length, counted on a CPU.

`logits_peak_bytes_per_token_vocab`: how much the memory of the process grows at most in a forward and a backward pass
of the output layer, per token and entry of the vocabulary, with the vocabulary of Qwen3 and a narrow body. The worst of
8k and 32k tokens. `whole_logits_peak_bytes_per_token_vocab`: the same with the logits of all tokens at once, for 1k
tokens. `chunks_vs_whole_time`: processor time of the chunks over that of all logits at once, for 1k tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
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
    ],
)
VOCAB, WIDTH = 151_936, 64
TOKENS = (8192, 32_768)
FEW_TOKENS, QUICK_TOKENS = 1024, 2048
ROUNDS = 3
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
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far becomes the present one
    before, began = _size("VmRSS"), time.process_time()
    logprobs, _ = statistics(head, hidden, chosen)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return (_size("VmHWM") - before) / num_tokens / VOCAB, time.process_time() - began


def _size(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


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
    publish(BENCHMARK, figures.flat, options.json, tables=figures.tables)


if __name__ == "__main__":
    main()
