"""What speculative decoding would gain: steps that verify drafts of k tokens, against steps of one token.

The drafts need no second model. An n-gram draft is what followed the longest earlier occurrence of the latest tokens,
in the prompt and the answer so far. An earlier draft is what followed them in the answer to the same prompt, 20
optimizer steps earlier. Exact rejection sampling accepts a given token with the policy's probability of it, and so it
accepts a draft just as often as the policy samples the same tokens. So answers that were sampled at temperature 1 tell
without bias how many tokens each step would have yielded. The policies are trained for 60 steps by real runs: on words
to spell backward (short answers), and on the task with long-tailed answers, which consist of dots except for their end.

The cost of a step of k drafts is measured with the engine's own forward and sampling over k + 1 tokens per row, and set
against a step of one token with rows of the same length. Speed-up is tokens per step over cost. It leaves out the time
to find drafts, and takes it that all rows always have one. `tail` is the last quarter of the answers to end.
With `--device cuda` the cost is measured there, in bfloat16 for both policies, and the runs are the same.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from hardware import accelerator_name, real_policy, seconds, tiny_policy
from lab import EXAMPLE, Lab
from report import Benchmark, Figures, arguments, publish, runs_dir
from transformers import PreTrainedModel

from penstock.model.load_policy import load_policy
from penstock.rollout.admission import Admission
from penstock.rollout.cuda_graphs import Layout, Shape
from penstock.rollout.prefix_cache import Node
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.sampling import sample, uniforms
from penstock.rollout.shared_blocks import BlockMemory
from penstock.rollout.slot_engine import SlotEngine
from penstock.rollout.step_packing import pack
from penstock.store.index import read_groups
from penstock.store.payload_files import PayloadReader

ROWS, DRAFTED = (1, 4, 16, 64), (1, 2, 3, 4)
"""Rows of a step, and tokens of a draft."""
REAL_ROWS_ON_CPU = (1,)
CONTEXT, MAX_CONTEXT = 256, 512
"""Tokens of each row, a multiple of the block size on any device, and the context of the engine."""
BLOCK_STEPS = 16
"""Steps between two measurements, so that the length of each row remains a multiple of the block size."""
LONGEST_MATCH = 8
"""Latest tokens that are looked for, at most."""
PROMPTS = 128
EARLIER, LATER = 40, 60
"""Optimizer steps of the policies that answer."""
TASKS = {"short": 8, "long": 256}
"""Maximum number of tokens of an answer."""
POLICIES = ("tiny", "qwen3_0_6b")


def cost_rows(policy: str, *, accelerator: bool) -> tuple[int, ...]:
    return ROWS if accelerator or policy == "tiny" else REAL_ROWS_ON_CPU


def names(*, accelerator: bool) -> list[str]:
    """Return the names of all figures."""
    found = [f"{place}_mean_tokens" for place in PLACES]
    for policy in POLICIES:
        for rows in cost_rows(policy, accelerator=accelerator):
            found.append(f"{policy}_{rows}_rows_step_ms")
            found += [f"{policy}_{rows}_rows_{k}_cost" for k in DRAFTED]
            found += [f"{place}_{kind}_{policy}_{rows}_rows_speed-up" for place in PLACES for kind in KINDS]
    return found + [f"{place}_{kind}_{k}_per_step" for place in PLACES for kind in KINDS for k in DRAFTED]


KINDS = ("n-gram", "earlier")
PLACES = ("short", "short_tail", "long", "long_tail")
BENCHMARK = Benchmark(
    name="speculation",
    measures=["rollout", "model"],
    figures=names(accelerator=False),
    on_accelerator=names(accelerator=True),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and that of the earlier policy to the same prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    earlier_ids: list[int]


def after_match(latest: Sequence[int], known: Sequence[int], k: int, *, near: int) -> list[int]:
    """Return the k tokens of `known` that follow the longest match of the end of `latest`, the match nearest to `near`
    of several; [] without one. What follows the end of `known` repeats the draft."""
    for size in range(min(LONGEST_MATCH, len(latest), len(known)), 0, -1):
        wanted = list(latest[-size:])
        ends = [end for end in range(size, len(known)) if known[end - size : end] == wanted]
        if ends:
            end = min(ends, key=lambda each: abs(each - near))
            found = list(known[end:])
            while len(found) < k:
                found.append(found[len(found) - (len(known) - end)])
            return found[:k]
    return []


def n_gram(answer: Answer, so_far: int, k: int) -> list[int]:
    """Draft from the prompt and the answer so far, the latest of the longest matches."""
    known = answer.prompt_ids + answer.token_ids[:so_far]
    return after_match(known, known, k, near=len(known))


def earlier(answer: Answer, so_far: int, k: int) -> list[int]:
    """Draft from the earlier answer, near the same position; without a match, from this position."""
    found = after_match(answer.token_ids[:so_far], answer.earlier_ids, k, near=so_far)
    return found or answer.earlier_ids[so_far : so_far + k]


Draft = Callable[[Answer, int, int], list[int]]
"""Takes an answer, the number of its tokens so far, and k. Returns at most k tokens."""
DRAFTS: dict[str, Draft] = {"n-gram": n_gram, "earlier": earlier}


def num_steps(answer: Answer, draft: Draft, k: int) -> int:
    """Return how many steps the answer would have taken. A step yields the accepted tokens of a draft and one more."""
    so_far = steps = 0
    while so_far < len(answer.token_ids):
        for drafted, sampled in zip(draft(answer, so_far, k), answer.token_ids[so_far:], strict=False):
            if drafted != sampled:
                break
            so_far += 1
        so_far += 1
        steps += 1
    return steps


def tokens_per_step(answers: Sequence[Answer], draft: Draft, k: int) -> float:
    return sum(len(each.token_ids) for each in answers) / sum(num_steps(each, draft, k) for each in answers)


def train(lab: Lab) -> dict[str, Path]:
    """Train on a task with short answers and one with long answers. Return the directories of the runs."""
    kept = [f"trainer.steps={LATER}", f"trainer.checkpoint_every={LATER - EARLIER}", "trainer.keep_checkpoints=3"]
    quiet = ["observe.plots=false", "observe.progress=false"]
    if lab.quick:
        kept += ["model.warm_start.steps=5", "trainer.groups_per_step=2"]
    long = ["trainer.learning_rate=5e-4"]
    return {
        "short": lab._runs(EXAMPLE, "speculation-short", [*kept, *quiet], seeds=[0], spare=False)[0],
        "long": lab._runs(lab._config(), "speculation-long", [*kept, *long], seeds=[0], spare=False)[0],
    }


def prompts_of(run_dir: Path, count: int) -> list[list[int]]:
    """Return different prompts that the run played, the latest first."""
    reader, found = PayloadReader(run_dir / "pool"), dict[tuple[int, ...], None]()
    for record in sorted(read_groups(run_dir, setting="speculation"), key=lambda each: -each.group):
        if record.ref is not None and record.state == "trained" and len(found) < count:
            (first, *_) = reader.read(record.ref)
            found[tuple(first.token_ids[: int(first.loss_mask.argmax())].tolist())] = None
    return [list(each) for each in found]


def answers_of(run_dir: Path, step: int, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Return an answer to each prompt, sampled at temperature 1 by the policy of an optimizer step."""
    model = load_policy(run_dir / "checkpoints" / f"step_{step}", weights=True)
    context = max(map(len, prompts)) + max_new_tokens
    engine = SlotEngine(model, num_slots=32, max_context=context, policy_version=step)
    found = dict[str, list[int]]()
    for index, prompt in enumerate(prompts):
        limits, seeds = (max_new_tokens,), (1000 * step + index,)
        rid, params = str(index), SamplingParams()
        engine.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=params, max_new_tokens=limits, seeds=seeds))
    while engine.has_work:
        found |= {each.request.rid: each.segments[0].token_ids for each in engine.step()}
    return [found[str(index)] for index in range(len(prompts))]


def yields(figures: Figures, runs: dict[str, Path], *, quick: bool) -> None:
    """Add the tokens per step of each draft, task and k."""
    for task, run_dir in runs.items():
        prompts = prompts_of(run_dir, 8 if quick else PROMPTS)
        before, after = (answers_of(run_dir, step, prompts, TASKS[task]) for step in (EARLIER, LATER))
        answers = [Answer(*each) for each in zip(prompts, after, before, strict=True)]
        longest = sorted(answers, key=lambda each: -len(each.token_ids))[: max(len(answers) // 4, 1)]
        for place, chosen in ((task, answers), (f"{task} tail", longest)):
            figures.add(f"{place}_mean_tokens".replace(" ", "_"), [fmean(len(each.token_ids) for each in chosen)])
            for kind, draft in DRAFTS.items():
                for k in DRAFTED:
                    found = tokens_per_step(chosen, draft, k)
                    figures.cell("Tokens per step", f"{place} {kind}", f"{k} per_step", [found])
                    print(f"{place}, {kind}, {k} drafted: {found:.3f} tokens per step", file=sys.stderr, flush=True)


def forward(engine: SlotEngine, k: int) -> torch.Tensor:
    """Return the logits [n * (k + 1), vocab] of a step in which each row has a draft of k tokens; k may be 0."""
    rows, memory = engine._rows, engine._memory
    count, size, past = len(rows), k + 1, int(rows.positions[0])
    if isinstance(memory, BlockMemory):
        assert engine._recorded is not None
        if not k:
            return engine._recorded(rows, count, [])
        positions = np.arange(past, past + size)
        layout = Layout(
            decoded=(rows.tokens[:0], rows.positions[:0]),
            token_ids=np.repeat(rows.tokens[:count], size),
            positions=np.tile(positions, count),
            num_computed=np.full(count, size),
            lengths=np.full(count, past + size),
            first_rows=np.arange(count),
            last=np.arange(count * size),
        )
        shape = Shape(0, count * size, count, count * size)
        padded = layout.padded(shape, tables=memory.tables, block_tokens=memory.block_tokens)
        return engine._recorded._logits(shape, torch.from_numpy(padded), is_recorded=True)[: count * size]
    drafts = [
        Admission(
            running=sequence.running,
            prompt_ids=(sequence.prompt_ids + [0] * k),
            prefix=[Node()] * (past // memory.block_tokens),
            block_tokens=memory.block_tokens,
        )
        for sequence in rows.sequences
    ]
    packed = pack(memory.cache, rows, 0, drafts) if k else pack(memory.cache, rows, count, [])
    logits: torch.Tensor = engine.model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        attend=packed.batch.attend,
    ).logits[0]
    assert len(logits) == count * size
    return logits


@torch.inference_mode()
def verify(engine: SlotEngine, k: int, *, times: int = 1) -> None:
    """Compute and sample all places of a draft, several times."""
    params = np.repeat(engine._rows.params, k + 1)
    for _ in range(times):
        tokens, _ = sample(forward(engine, k), params, uniforms(params["seed"], np.arange(len(params))))
        tokens.cpu()


def running_engine(model: PreTrainedModel, rows: int) -> SlotEngine:
    """Return an engine with this many rows of equal length."""
    slots = rows * (1 + DRAFTED[-1]) if model.device.type != "cpu" else rows
    engine = SlotEngine(model, num_slots=slots, max_context=MAX_CONTEXT, policy_version=0, num_cached=0)
    params, limits = SamplingParams(ignore_eos=True), (MAX_CONTEXT - CONTEXT,) * rows
    prompt = [index % 100 for index in range(CONTEXT)]
    engine.submit(
        GenerateRequest(rid="rows", prompt_ids=prompt, params=params, max_new_tokens=limits, seeds=tuple(range(rows)))
    )
    while engine.num_active < rows:
        engine.step()
    return engine


def costs(figures: Figures, policy: str, model: PreTrainedModel, rows: int, *, rounds: int, repeats: int) -> None:
    """Add the time of a step, and the cost of a step with drafts over it."""
    engine, device = running_engine(model, rows), model.device
    steps, found = list[float](), dict[int, list[float]]({k: [] for k in DRAFTED})
    for _ in range(rounds):
        steps.append(seconds(lambda: [engine.step() for _ in range(BLOCK_STEPS)], device) / BLOCK_STEPS)
        engine._memory.begin(engine._positions + DRAFTED[-1], rows, [])
        spent = {}
        for k in (0, *DRAFTED):
            if repeats > 1:
                verify(engine, k)  # warms up
            spent[k] = seconds(partial(verify, engine, k, times=repeats), device) / repeats
        for k in DRAFTED:
            found[k].append(1 + (spent[k] - spent[0]) / steps[-1])
    row, title = f"{policy} {rows} rows", "Cost of a step"
    figures.cell(title, row, "step_ms", [1e3 * median(steps)])
    for k in DRAFTED:
        figures.cell(title, row, f"{k} cost", [median(found[k])])
        print(f"{row}, {k} drafted: costs {median(found[k]):.3f} steps", file=sys.stderr, flush=True)


def speed_ups(figures: Figures, rows_of: dict[str, tuple[int, ...]]) -> None:
    """Add tokens per step over cost, at the best k."""
    for place in PLACES:
        for kind in KINDS:
            for policy, all_rows in rows_of.items():
                for rows in all_rows:
                    best = max(
                        figures.flat[f"{place}_{kind}_{k}_per_step"] / figures.flat[f"{policy}_{rows}_rows_{k}_cost"]
                        for k in DRAFTED
                    )
                    row = f"{place} {kind}".replace("_", " ")
                    figures.cell("Speed-up at the best k", row, f"{policy} {rows} rows speed-up", [best])


def main() -> None:
    options = arguments(__doc__.partition("\n")[0], device="DEVICE", runs="DIRECTORY")
    device = torch.device(options.device or "cpu")
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    figures, is_cpu = Figures(), device.type == "cpu"
    directory = runs_dir(Path(options.runs or "runs"), quick=options.quick)
    lab = Lab(runs=directory, quick=options.quick)
    yields(figures, train(lab), quick=options.quick)
    dtype = torch.float32 if is_cpu else torch.bfloat16
    policies: dict[str, Callable[[], PreTrainedModel]] = {
        "tiny": partial(tiny_policy, MAX_CONTEXT, device=device, dtype=dtype),
        "qwen3_0_6b": partial(real_policy, device=device, dtype=dtype),
    }
    rows_of = {policy: cost_rows(policy, accelerator=not is_cpu) for policy in policies}
    for policy, all_rows in rows_of.items():
        model, is_slow = policies[policy](), is_cpu and policy != "tiny"
        for rows in all_rows:
            rounds, repeats = (1, 1) if options.quick or is_slow else (3, 2)
            costs(figures, policy, model, rows, rounds=rounds, repeats=repeats)
    speed_ups(figures, rows_of)
    publish(
        BENCHMARK,
        figures.flat,
        options.json,
        tables=figures.tables,
        seeds=[0],
        runs_of=lab.commits,
        accelerator=accelerator_name(device),
    )


if __name__ == "__main__":
    main()
