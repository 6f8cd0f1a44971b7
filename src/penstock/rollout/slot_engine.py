"""The slot engine: continuous batching of one Hugging Face causal language model, as far as slots and memory allow.

The engine is synchronous and single-threaded. `submit` queues a request; each `step` advances every sequence by one
token. A step is one forward over the newest token of every active row, packed with the prompts of newly admitted
requests. All samples that are admitted together share one computation of their prompt. A prompt that begins like an
earlier prompt or answer reuses its keys and values. A long prompt is computed in parts, one per step. `load_weights`
and `abort` happen between steps.

Invariants:

* Rows 0..n-1 are active. Each has memory for the keys and values of all its tokens, in a slot or in shared blocks.
* When memory runs out, the youngest rows go back into the queue. The oldest row always stays.
* Every token's version span and log-probability belong to the weights that sampled it.
* Work for one request that raises fails this request alone. Work for the whole batch raises only because of a defect or
  the device, and then `step` fails.
* An update keeps the KV of running sequences: their later tokens attend to keys of the older weights.
* The served weights computed all keys and values in the prefix cache. An update empties it, and a sequence that ran
  during an update adds nothing to it. So no later prompt gets keys of older weights.
* The prefix cache holds finite values only: it gets those of sequences with finite logits.
* Retracted samples lose their KV. When they continue, the weights of that time compute it again.
* The experts of a token are recorded only for requests that ask for it. Such a step is not replayed as a CUDA graph.
  Such a request reuses only tokens with a record in the prefix cache, or tokens that it asks no record of.
* An engine with released memory holds no requests. A new request ends with `abort` at once. Weights may be loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from penstock.model.experts import expert_layers, record_of, recording
from penstock.rollout.admission import Admission, AdmissionQueue
from penstock.rollout.cuda_graphs import CudaGraphs, finds_blocks
from penstock.rollout.generator import ScoredToken
from penstock.rollout.model_check import check_model, eos_ids, fit_tensors
from penstock.rollout.prefix_cache import RecordOf
from penstock.rollout.request import GenerateRequest, check_prompt
from penstock.rollout.room import tokens_that_fit
from penstock.rollout.sampling import sample, shaped, uniforms
from penstock.rollout.shared_blocks import BlockMemory, has_flash
from penstock.rollout.slot_attention import ATTENTION_NAME
from penstock.rollout.slot_memory import Kept, SlotMemory
from penstock.rollout.slot_rows import Rows, RunningRequest, SlotSequence
from penstock.rollout.slots import Ints, regroup
from penstock.rollout.step_packing import pack
from penstock.routed_experts import Record
from penstock.samples import Segment
from penstock.types import NO_VERSION

SCORED_PLACES = 512
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
"""A part of the engine's memory that can be released."""
ALL_MEMORY: tuple[MemoryTag, ...] = get_args(MemoryTag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request that has ended, with its samples' segments. With an `error`, `segments` is empty."""

    request: GenerateRequest
    segments: list[Segment]
    error: str | None = None


class SlotEngine:
    """The engine that this module describes. `policy_version` is NO_VERSION until weights have been loaded."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_context: int,
        policy_version: int = NO_VERSION,
        num_tokens: int | None = None,
        num_cached: int | None = None,
    ) -> None:
        """`num_tokens`: number of tokens that have keys and values at one time, at least `max_context`; None for as
        many as are useful and fit into the free memory. `num_cached`: maximum number of these in the prefix cache; None
        for all that no sample needs. Raises ValueError if the memory is too small for one sample."""
        check_model(model, max_context)
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self.num_slots = num_slots
        self.max_context = max_context
        self.policy_version = policy_version
        self.num_generated_tokens = 0
        self.num_decoded = self.num_context = self.num_prefilled = self.num_reused = 0
        """Counts of the last step: sequences advanced by a token, tokens they held before, prompt tokens computed, and
        prompt tokens with reused keys and values."""
        self.begun: list[str] = []
        """Ids of the requests that got their first token in the last step."""
        self.released: set[MemoryTag] = set()
        """The released parts of the memory. While there are any, requests end at once."""
        self.paused = False
        """While True, no sample advances and none is admitted. Requests may be submitted and aborted."""
        self.admitting = True
        """While False, running samples continue and no new sample is admitted."""
        if num_tokens is None:
            num_tokens = tokens_that_fit(model, num_slots=num_slots, max_context=max_context, num_cached=num_cached)
        make_memory = BlockMemory if has_flash(model) and finds_blocks(model) else SlotMemory
        self._memory = make_memory(
            model,
            num_slots=num_slots,
            max_context=max_context,
            num_tokens=max(num_tokens, max_context),
            num_cached=num_cached,
        )
        self._recorded: CudaGraphs | None = None
        if isinstance(self._memory, BlockMemory):
            self._recorded = CudaGraphs(self.model, self._memory, num_rows=num_slots)
        self._expert_layers = expert_layers(self.model)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._rows = Rows(num_slots)
        self._waiting = AdmissionQueue(self._memory, num_slots=num_slots, eos_ids=eos_ids(model))
        self._requests: dict[str, RunningRequest] = {}
        self.num_put_back = 0
        """How often a running sample was put back into the queue for lack of memory, so far."""

    @property
    def num_active(self) -> int:
        """Number of samples that are being generated."""
        return len(self._rows)

    @property
    def num_started(self) -> int:
        """Number of samples that have started: they are being generated or were retracted."""
        return len(self._rows) + self._waiting.num_returned

    @property
    def num_waiting(self) -> int:
        """Number of samples without a slot."""
        return self._waiting.num_samples

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens that can have keys and values at one time: of running samples, and in the prefix cache."""
        return self._memory.num_blocks * self._memory.block_tokens

    @property
    def num_free_tokens(self) -> int:
        """Number of these that running samples leave in the next step. The prefix cache may have them."""
        return max(self._num_free, 0) * self._memory.block_tokens

    @property
    def num_running_tokens(self) -> int:
        """Number of tokens of running samples that have keys and values."""
        return int(self._positions.sum())

    @property
    def num_reserved_bytes(self) -> int:
        """Memory that the keys and values of running samples take."""
        return self._memory.num_reserved_bytes

    @property
    def num_cached(self) -> int:
        """Number of tokens in the prefix cache."""
        return self._memory.prefixes.num_cached * self._memory.block_tokens

    @property
    def num_evicted(self) -> int:
        """Number of tokens that the prefix cache has evicted so far."""
        return self._memory.prefixes.num_evicted * self._memory.block_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._requests) and not self.paused

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError if the request cannot be served. It reads only constants, so any thread may call it."""
        request.check(vocab_size=self._vocab_size, max_context=self.max_context)

    def check_prompt(self, prompt_ids: list[int]) -> None:
        """Raise ValueError for a prompt that cannot be computed."""
        check_prompt(prompt_ids, vocab_size=self._vocab_size, max_context=self.max_context)

    def submit(self, request: GenerateRequest) -> list[Finished]:
        """Queue a request that `check` accepts and with an unused id. A later `step` or `abort` returns its segments.

        An engine that is released or has no current weights ends the request at once and returns it."""
        running = RunningRequest(request)
        self._requests[request.rid] = running
        self._waiting.add(running)
        return self.abort([request.rid]) if self.released or self.policy_version == NO_VERSION else []

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit samples that fit and generate one token for every active sequence. Return the completed requests."""
        left = self._make_room()
        num_decode = self.num_decoded = len(self._rows)
        self.num_context = int(self._rows.positions[:num_decode].sum())
        admissions = self._waiting.admit(self.num_slots - num_decode, left - num_decode, new=self.admitting)
        self._count(admissions)
        for admission in admissions:
            for sequence in admission.sequences:
                self._rows.append(sequence)
        if not self._rows and not admissions:
            return []
        self._memory.begin(self._positions, num_decode, admissions)
        tokens, logprobs = self._forward(num_decode, admissions)
        ended = self._record(tokens, logprobs, admissions)
        failed = [admission.running for admission in admissions if admission.running.error]
        touched = [*(self._rows.sequences[row].running for row in ended), *failed]
        if ended or admissions:
            self._memory.share(num_decode, admissions)
            self._keep(sorted(ended), num_decode, admissions)
            self._close_holes(ended)
        return [self._take(running) for running in dict.fromkeys(touched) if running.done]

    def abort(self, rids: Iterable[str]) -> list[Finished]:
        """End requests now. Their unfinished samples keep their tokens so far. Unknown ids are ignored."""
        requests = [self._requests[rid] for rid in rids if rid in self._requests]
        chosen = set(requests)
        rows = {row for row, sequence in enumerate(self._rows.sequences) if sequence.running in chosen}
        waiting = [sequence for running in requests for sequence in self._waiting.remove(running)]
        for sequence in [*(self._rows.sequences[row] for row in rows), *waiting]:
            sequence.finish("abort", self.policy_version)
        self._keep(sorted(rows), len(self._rows), [])
        self._close_holes(rows)
        return [self._take(running) for running in requests]

    def abort_all(self) -> list[Finished]:
        """End every request now."""
        return self.abort(list(self._requests))

    def release(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> list[Finished]:
        """End every request now and free the memory of `tags`. Later requests end at once, until all is resumed.

        Weights move to the memory of the host, where updates still reach them. CUDA graphs, which hold the places of
        weights and KV memory, are freed with any part, and recorded again when they are needed."""
        new = set(tags) - self.released
        if not new:
            return []
        finished = self.abort_all()
        self._memory.prefixes.clear()
        if self._recorded is not None:
            self._recorded.forget()
        if "weights" in new:
            self._move_weights(torch.device("cpu"))
        if "kv_cache" in new:
            self._memory.free()
        if self._memory.device.type != "cpu":
            torch.get_device_module(self._memory.device).empty_cache()
        self.released |= new
        return finished

    def _move_weights(self, device: torch.device) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(device)

    def retract(self) -> None:
        """Remove all running samples from their slots and put them at the head of the queue. Before they continue, the
        weights of that time compute the keys and values of their prompt and answer again. The prefix cache becomes
        empty."""
        self._memory.prefixes.clear()
        self._memory.leave(range(len(self._rows)))
        self._put_back(self._rows.clear())

    def resume(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        """Allocate the released memory of `tags` again. Requests are served again once nothing is released."""
        resumed = self.released & set(tags)
        if "weights" in resumed:
            self._move_weights(self._memory.device)
        if "kv_cache" in resumed:
            self._memory.allocate()
        self.released -= resumed

    def sequences(self, rid: str) -> list[SlotSequence]:
        """Return the started samples of a request, with their tokens so far; [] if there is no such request."""
        running = self._requests.get(rid)
        return running.sequences if running else []

    @torch.inference_mode()
    def scoring(self, prompt_ids: list[int], *, num_top: int = 0) -> Iterator[list[ScoredToken]]:
        """Yield the log-probability of every token but the first, at temperature 1, and the `num_top` likeliest tokens
        at its place, in parts of `SCORED_PLACES` tokens.

        So the logits of only one part exist at once, for any prompt length, and steps may run between two parts. After
        a weights update, the new weights compute the KV of earlier tokens again. So no log-probability mixes two
        versions."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        cache, version = DynamicCache(), self.policy_version
        for start in range(0, len(prompt_ids) - 1, SCORED_PLACES):
            places = torch.arange(start, min(start + SCORED_PLACES, len(prompt_ids) - 1), device=ids.device)
            if self.policy_version != version:
                cache, version = DynamicCache(), self.policy_version
            fresh = ids[:, cache.get_seq_length() : int(places[-1]) + 1]
            output = self.model(input_ids=fresh, past_key_values=cache, use_cache=True, logits_to_keep=len(places))
            logprobs = torch.log_softmax(output.logits[0].float(), dim=-1)
            found = logprobs.gather(1, ids[0, places + 1, None])[:, 0].tolist()
            best, best_ids = (each.tolist() for each in logprobs.topk(min(num_top, logprobs.shape[1])))
            tops = (list(zip(*each, strict=True)) for each in zip(best, best_ids, strict=True))
            yield [ScoredToken(*each) for each in zip(found, tops, strict=True)]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the model's weights by name, tied weights once. An update must provide all of them."""
        return dict(self.model.named_parameters())

    def tied_names(self) -> set[str]:
        """Return the additional names of tied weights, which `parameters` lists under another name."""
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - self.parameters().keys()

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy new weights into the model. Running sequences continue, and the prefix cache becomes empty. Weights that
        are the model's own are not copied. Raises ValueError, with nothing changed, if a weight does not fit or the
        version is not newer."""
        if policy_version <= self.policy_version:
            raise ValueError(f"policy_version {policy_version} is not newer than {self.policy_version}")
        parameters = self.parameters()
        fitted = fit_tensors(parameters, self.tied_names(), tensors)
        if missing := sorted(parameters.keys() - fitted.keys()):
            raise ValueError(f"the update lacks {len(missing)} weights, the first is {missing[0]}")
        self._memory.prefixes.clear()
        for sequence in self._rows.sequences:
            sequence.close_span(self.policy_version)
            sequence.keys_are_served = False
        if changed := [name for name, own in parameters.items() if fitted[name] is not own]:
            torch._foreach_copy_([parameters[name] for name in changed], [fitted[name] for name in changed])
        self.policy_version = policy_version

    def forget_weights(self) -> list[Finished]:
        """Stop using the current weights: end every request now, and later requests at once, until the next weights."""
        finished = self.abort_all()
        self._memory.prefixes.clear()
        self.policy_version = NO_VERSION
        return finished

    def rename_weights(self, policy_version: int) -> None:
        """Name the current weights `policy_version`, from the next token on. Raises ValueError for an older version."""
        if policy_version < self.policy_version:
            raise ValueError(f"policy_version {policy_version} is older than {self.policy_version}")
        for sequence in self._rows.sequences:
            sequence.close_span(self.policy_version)
        self.policy_version = policy_version

    def _forward(self, num_decode: int, admissions: list[Admission]) -> tuple[list[int], list[float]]:
        rows = self._rows
        logits = self._logits(num_decode, admissions)
        if admissions and admissions[0].is_part and not logits[-1].isfinite().all():
            admissions[0].running.error = self._not_finite()
        if not rows:
            return [], []
        logits = logits[: len(rows)]
        rows.positions[: len(rows)] += 1
        to_draw_from = shaped(logits, rows.sequences)
        uniform = uniforms(rows.params["seed"], rows.positions[: len(rows)])
        changed = None if to_draw_from is logits else to_draw_from
        tokens, vocabulary = sample(logits, rows.params, uniform, shaped=changed)
        self._add_top_logprobs(vocabulary)
        logprobs = vocabulary.gather(1, tokens[:, None])[:, 0]
        # One transfer for both: float64 holds every token id exactly.
        host = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()
        rows.tokens[: len(rows)] = host[0]
        self.num_generated_tokens += len(rows)
        return rows.tokens[: len(rows)].tolist(), host[1].tolist()

    def _logits(self, num_decode: int, admissions: list[Admission]) -> torch.Tensor:
        """Return the logits [n, vocab] in the order of the rows, and one more row for the part of a prompt."""
        if self._expert_layers and (
            any(sequence.is_routed for sequence in self._rows.sequences)
            or any(admission.is_routed for admission in admissions)
        ):
            with recording(self._expert_layers) as chosen:
                logits = self._computed(num_decode, admissions)
            self._route(record_of(chosen, self._expert_layers[0].num_experts), num_decode, admissions)
            return logits
        if self._recorded is not None:
            return self._recorded(self._rows, num_decode, admissions)
        return self._computed(num_decode, admissions)

    def _computed(self, num_decode: int, admissions: list[Admission]) -> torch.Tensor:
        """Compute the logits without recording a CUDA graph."""
        if isinstance(self._memory, BlockMemory):
            assert self._recorded is not None
            return self._recorded(self._rows, num_decode, admissions, is_recorded=False)
        packed = pack(self._memory.cache, self._rows, num_decode, admissions)
        logits: torch.Tensor = self.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            logits_to_keep=packed.logits_to_keep,
            attend=packed.batch.attend,
        ).logits[0]
        return logits if packed.rows_of_logits is None else logits.index_select(0, packed.rows_of_logits)

    def _route(self, experts: Record, num_decode: int, admissions: list[Admission]) -> None:
        """Give the sequences the experts of a step's packed tokens, [T, width]."""
        rows = self._rows
        for row, position in enumerate(rows.positions[:num_decode].tolist()):
            rows.sequences[row].route(position, experts[row : row + 1])
        start = num_decode
        for admission in admissions:
            end = start + admission.num_computed
            admission.route(experts[start:end])
            start = end

    def _add_top_logprobs(self, vocabulary: torch.Tensor) -> None:
        """Add top log-probabilities to the sequences that request them. `vocabulary` [n, vocab] has the
        log-probabilities of this position."""
        for row, sequence in enumerate(self._rows.sequences):
            if sequence.top_logprobs is not None:
                with sequence.running.failing_alone():
                    best, ids = vocabulary[row].topk(sequence.params.top_logprobs)
                    sequence.top_logprobs.append(list(zip(best.tolist(), ids.tolist(), strict=True)))

    def _record(self, tokens: list[int], logprobs: list[float], admissions: list[Admission]) -> set[int]:
        """Append the new tokens to their sequences. Return the rows that ended."""
        ended: set[int] = set()
        failed = any(admission.running.error for admission in admissions)
        for row, (sequence, token, logprob) in enumerate(zip(self._rows.sequences, tokens, logprobs, strict=True)):
            running = sequence.running
            if not isfinite(logprob):
                running.error = self._not_finite()
            elif running.error is None and (reason := sequence.append(token, logprob)):
                sequence.finish(reason, self.policy_version)
                ended.add(row)
            failed |= running.error is not None
        return ended | self._end_failed(admissions) if failed else ended

    def _not_finite(self) -> str:
        return f"policy_version {self.policy_version} computed logits that are not finite"

    def _end_failed(self, admissions: list[Admission]) -> set[int]:
        """Return the rows of all failed requests. Zero their slots, so that later samples get no NaN."""
        failed = {row for row, sequence in enumerate(self._rows.sequences) if sequence.running.error}
        part = [len(self._rows)] if admissions and admissions[0].is_part and admissions[0].running.error else []
        self._memory.erase([*failed, *part])
        return failed

    def _count(self, admissions: list[Admission]) -> None:
        """Set the counts of the step that concern prompts."""
        self.num_prefilled = sum(admission.num_computed for admission in admissions)
        self.num_reused = 0
        self.begun = []
        for admission in admissions:
            running = admission.running
            if admission.is_part:
                running.num_in_parts += admission.num_computed
                continue
            self.num_reused += max(admission.start - running.num_in_parts, 0)
            running.num_in_parts = 0
            first = admission.sequences[0]
            if first.index == 0 and not first.token_ids:
                self.begun.append(running.request.rid)

    @property
    def _positions(self) -> Ints:
        """Position of each row's newest token, [n]."""
        return self._rows.positions[: len(self._rows)]

    @property
    def _num_free(self) -> int:
        """Number of blocks that are left when each row has room for its newest token; negative if not all have."""
        return self._memory.num_free(self._positions)

    def _keep(self, ended: Iterable[int], num_decode: int, admissions: list[Admission]) -> None:
        """Give keys and values of ended rows and of computed prompts to the prefix cache, and end the use of these
        rows. Prompts come last, so that a cache that can hold a long prompt still holds its parts at the next step."""
        kept, rows = list[Kept](), list(ended)

        def add(row: int, token_ids: list[int], record: RecordOf) -> None:
            kept.append(Kept(row, token_ids, record if self._expert_layers else None))

        for row in rows:
            sequence = self._rows.sequences[row]
            if sequence.keys_are_served and sequence.running.error is None:
                add(row, sequence.computed_ids, sequence.record)
        row = num_decode
        for admission in admissions:
            if admission.running.error is None:
                add(row, admission.prompt_ids, admission.record)
            if admission.is_part:
                rows.append(row)
            row += len(admission.sequences)
        self._memory.keep(kept)
        self._memory.leave(rows)

    def _make_room(self) -> int:
        """Put the youngest samples back into the queue until there is memory for the next token of all the others.
        Return how many blocks are left.

        The oldest sample is never put back, because the memory suffices for any single one. So every sample ends."""
        while (left := self._num_free) < 0:
            sequences = self._rows.sequences
            youngest = max(range(len(sequences)), key=lambda row: sequences[row].number)
            self._keep([youngest], len(sequences), [])
            self._put_back([sequences[youngest]])
            self._close_holes({youngest})
            self.num_put_back += 1
        return left

    def _put_back(self, sequences: Collection[SlotSequence]) -> None:
        """Put samples at the head of the queue. Their keys and values were dropped."""
        for sequence in sequences:
            sequence.close_span(self.policy_version)
            sequence.keys_are_served = True
        self._waiting.requeue(sequences)

    def _close_holes(self, ended: set[int]) -> None:
        rows = self._rows
        live = np.ones(len(rows), dtype=np.bool_)
        live[list(ended)] = False
        source, target = regroup(self._positions, live)
        self._memory.move(source, target, int(live.sum()), self._positions[source])
        rows.move(source, target, int(live.sum()))

    def _take(self, running: RunningRequest) -> Finished:
        """Remove a finished request from the engine and return its result."""
        del self._requests[running.request.rid]
        self._waiting.remove(running)
        segments = [] if running.error else [segment for _, segment in sorted(running.segments.items())]
        return Finished(request=running.request, segments=segments, error=running.error)
