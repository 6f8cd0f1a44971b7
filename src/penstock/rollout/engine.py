"""The slot engine: continuous batching of one Hugging Face causal language model over a fixed number of KV slots.

Synchronous and single-threaded: `submit` queues, each `step` advances every sequence by one token. A step is one
forward over the newest token of every active row, packed together with the prompts of newly admitted requests
(computed once per request, whatever its number of samples). `load_weights` and `abort` happen between steps.

Invariants: rows 0..n-1 are active and live in slots 0..n-1; every token's version span and log-probability belong
to the weights that sampled it; nothing invalid gets past `check`, so `step` fails only on a defect or the device.
After an update the KV of running sequences is kept: their later tokens attend to keys of the older weights.
Samples that are retracted lose theirs, and have it computed anew by the weights of when they go on.
A released engine holds no KV memory and no requests: whoever asks is told `abort` at once; weights may be loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from penstock.rollout.admission import Admission, WaitingLine
from penstock.rollout.attention import ATTENTION_NAME
from penstock.rollout.packing import pack
from penstock.rollout.recorded import RecordedForwards, records
from penstock.rollout.request import GenerateRequest, check_prompt
from penstock.rollout.rows import Rows, Running, Sequence
from penstock.rollout.sampling import sample, uniforms
from penstock.rollout.served import check_model, check_tensors, eos_ids, make_cache
from penstock.rollout.shaping import shaped
from penstock.rollout.slots import regroup
from penstock.types import NO_VERSION, Segment

SCORED_PLACES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request whose samples have all ended. With an `error`, `segments` is empty."""

    request: GenerateRequest
    segments: list[Segment]
    error: str | None = None


class SlotEngine:
    """See the module's docstring. `policy_version` is NO_VERSION until weights have been loaded."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_context: int, policy_version: int = NO_VERSION
    ) -> None:
        check_model(model, max_context)
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self.num_slots = num_slots
        self.max_context = max_context
        self.policy_version = policy_version
        self.num_generated_tokens = 0
        self.num_decoded = self.num_context = self.num_prefilled = 0
        """Of the last step: sequences advanced by a token, tokens they held before, and prompt tokens computed."""
        self.begun: list[str] = []
        """Requests whose first token the last step made."""
        self.released = False
        self.paused = False
        """Nothing advances and nobody is admitted; requests may come and go."""
        self.admitting = True
        """While not, running samples go on and nobody joins them."""
        self._cache = make_cache(model, num_slots, max_context)
        self._recorded = RecordedForwards(self.model, self._cache, num_rows=num_slots) if records(self._cache) else None
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._rows = Rows(num_slots)
        self._waiting = WaitingLine(num_slots=num_slots, eos_ids=eos_ids(model))
        self._requests: dict[str, Running] = {}

    @property
    def num_active(self) -> int:
        """Samples being generated."""
        return len(self._rows)

    @property
    def num_started(self) -> int:
        """Samples being generated, or retracted in the midst of it."""
        return len(self._rows) + self._waiting.num_returned

    @property
    def num_waiting(self) -> int:
        """Samples without a slot yet."""
        return self._waiting.num_samples

    @property
    def has_work(self) -> bool:
        return bool(self._requests) and not self.paused

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError if the request cannot be served. Reads constants only: safe from any thread."""
        request.check(vocab_size=self._vocab_size, max_context=self.max_context)

    def check_prompt(self, prompt_ids: list[int]) -> None:
        """Raise ValueError for a prompt that cannot be computed."""
        check_prompt(prompt_ids, vocab_size=self._vocab_size, max_context=self.max_context)

    def submit(self, request: GenerateRequest) -> Finished | None:
        """Queue a request; its segments come out of a later `step` or `abort`. A released engine, and one whose weights
        are nobody's, ends it here."""
        self.check(request)
        if request.rid in self._requests:
            raise ValueError(f"request {request.rid} is already being served")
        running = Running(request)
        self._requests[request.rid] = running
        self._waiting.add(running)
        return self.abort(request.rid) if self.released or self.policy_version == NO_VERSION else None

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit what fits, generate one token for every active sequence, return the requests this completed."""
        num_decode = self.num_decoded = len(self._rows)
        self.num_context = int(self._rows.positions[:num_decode].sum())
        admissions = self._waiting.admit(self.num_slots - num_decode, new=self.admitting)
        self.num_prefilled = sum(len(admission.prompt_ids) for admission in admissions)
        first = (admission.sequences[0] for admission in admissions)
        self.begun = [it.running.request.rid for it in first if it.index == 0 and not it.token_ids]
        for admission in admissions:
            for sequence in admission.sequences:
                self._rows.append(sequence)
        if not self._rows:
            return []
        tokens, logprobs = self._forward(num_decode, admissions)
        ended = self._record(tokens, logprobs)
        touched = [self._rows.sequences[row].running for row in ended]
        if ended or admissions:
            self._close_holes(ended)
        return [self._take(running) for running in dict.fromkeys(touched) if running.done]

    def abort(self, rid: str) -> Finished | None:
        """End a request now; its unfinished samples keep what they have. None if there is no such request."""
        running = self._requests.get(rid)
        if running is None:
            return None
        mine = {row for row, sequence in enumerate(self._rows.sequences) if sequence.running is running}
        for sequence in [*(self._rows.sequences[row] for row in mine), *self._waiting.leave(running)]:
            sequence.finish("abort", self.policy_version)
        self._close_holes(mine)
        return self._take(running)

    def abort_all(self) -> list[Finished]:
        """End every request now."""
        waiting = (sequence for running in self._requests.values() for sequence in self._waiting.leave(running))
        for sequence in [*self._rows.sequences, *waiting]:
            sequence.finish("abort", self.policy_version)
        self._close_holes(set(range(len(self._rows))))
        return [self._take(running) for running in list(self._requests.values())]

    def release(self) -> list[Finished]:
        """End every request now and free the KV memory. Requests that come later end at once, until `resume`."""
        if self.released:
            return []
        finished = self.abort_all()
        if self._recorded is not None:
            self._recorded.forget()
        self._cache.free()
        self.released = True
        return finished

    def retract(self) -> None:
        """Take all running samples off their slots and put them at the head of the line: prompt and answer so far are
        computed again, with the weights of then, before they go on."""
        for sequence in self._rows.sequences:
            sequence.close_span(self.policy_version)
        self._waiting.give_back(self._rows.clear())

    def resume(self) -> None:
        """Take the KV memory back and serve again."""
        if self.released:
            self._cache.allocate()
            self.released = False

    def sequences(self, rid: str) -> list[Sequence]:
        """The samples of a request that have started, as far as they are; none if there is no such request."""
        running = self._requests.get(rid)
        return running.sequences if running else []

    def score(self, prompt_ids: list[int]) -> list[float]:
        """Log-probability of every token but the first, given those before it, at temperature 1."""
        return [logprob for part in self.scoring(prompt_ids) for logprob in part]

    @torch.inference_mode()
    def scoring(self, prompt_ids: list[int]) -> Iterator[list[float]]:
        """The same a part at a time: the logits of only so many places exist at once, whatever the prompt's length, and
        steps may be taken in between. After an update of weights what came before is computed again with the new ones,
        so that no score mixes them."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        cache, version = DynamicCache(), self.policy_version
        for places in torch.split(torch.arange(len(prompt_ids) - 1, device=ids.device), SCORED_PLACES):
            if self.policy_version != version:
                cache, version = DynamicCache(), self.policy_version
            fresh = ids[:, cache.get_seq_length() : int(places[-1]) + 1]
            output = self.model(input_ids=fresh, past_key_values=cache, use_cache=True, logits_to_keep=len(places))
            logits = output.logits[0].float()
            found: list[float] = torch.log_softmax(logits, dim=-1).gather(1, ids[0, places + 1, None])[:, 0].tolist()
            yield found

    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's weights by name, tied ones once: what an update must provide."""
        return dict(self.model.named_parameters())

    def tied_names(self) -> set[str]:
        """Further names of weights that `parameters` has already."""
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - self.parameters().keys()

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Copy new weights in; nothing is touched unless all of them fit. Running sequences continue."""
        if policy_version <= self.policy_version:
            raise ValueError(f"policy_version {policy_version} is not newer than {self.policy_version}")
        parameters = self.parameters()
        check_tensors(parameters, tensors)
        for sequence in self._rows.sequences:
            sequence.close_span(self.policy_version)
        torch._foreach_copy_(list(parameters.values()), [tensors[name] for name in parameters])
        self.policy_version = policy_version

    def forget_weights(self) -> list[Finished]:
        """Whatever is held counts as nobody's: end every request, and serve none until the next weights."""
        finished = self.abort_all()
        self.policy_version = NO_VERSION
        return finished

    def rename_weights(self, policy_version: int) -> None:
        """The weights that are held are `policy_version`, from the next token on. It never goes back."""
        if policy_version < self.policy_version:
            raise ValueError(f"policy_version {policy_version} is older than {self.policy_version}")
        for sequence in self._rows.sequences:
            sequence.close_span(self.policy_version)
        self.policy_version = policy_version

    def _forward(self, num_decode: int, admissions: list[Admission]) -> tuple[list[int], list[float]]:
        rows = self._rows
        logits = self._logits(num_decode, admissions)
        rows.positions[: len(rows)] += 1
        to_draw_from = shaped(logits, rows.sequences)
        tokens, vocabulary = sample(
            logits,
            rows.params,
            uniforms(rows.seeds, rows.positions[: len(rows)]),
            shaped=None if to_draw_from is logits else to_draw_from,
        )
        self._tell_top_logprobs(vocabulary)
        logprobs = vocabulary.gather(1, tokens[:, None])[:, 0]
        # One transfer for both: float64 holds every token id exactly.
        host = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()
        rows.tokens[: len(rows)] = host[0]
        self.num_generated_tokens += len(rows)
        return rows.tokens[: len(rows)].tolist(), host[1].tolist()

    def _logits(self, num_decode: int, admissions: list[Admission]) -> torch.Tensor:
        """[n, vocab], in the order of the rows."""
        if self._recorded is not None:
            return self._recorded(self._rows, num_decode, admissions)
        packed = pack(self._cache, self._rows, num_decode, admissions, self.model.device)
        logits: torch.Tensor = self.model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            logits_to_keep=packed.logits_to_keep,
            slot_batch=packed.batch,
        ).logits[0]
        return logits if packed.rows_of_logits is None else logits.index_select(0, packed.rows_of_logits)

    def _tell_top_logprobs(self, vocabulary: torch.Tensor) -> None:
        """To the sequences that asked for them; `vocabulary` [n, vocab] are the log-probabilities of this place."""
        for row, sequence in enumerate(self._rows.sequences):
            if sequence.top_logprobs is not None:
                best, ids = vocabulary[row].topk(sequence.params.top_logprobs)
                sequence.top_logprobs.append(list(zip(best.tolist(), ids.tolist(), strict=True)))

    def _record(self, tokens: list[int], logprobs: list[float]) -> set[int]:
        """Append the new tokens; returns the rows that ended."""
        ended: set[int] = set()
        failed = False
        for row, (sequence, token, logprob) in enumerate(zip(self._rows.sequences, tokens, logprobs, strict=True)):
            if not isfinite(logprob):
                failed = True
                sequence.running.error = f"the policy's logits are not finite (policy_version {self.policy_version})"
            elif reason := sequence.append(token, logprob):
                sequence.finish(reason, self.policy_version)
                ended.add(row)
        return ended | self._end_failed() if failed else ended

    def _end_failed(self) -> set[int]:
        """The rows of all requests that went non-finite. Their slots must not poison the next users."""
        failed = {row for row, sequence in enumerate(self._rows.sequences) if sequence.running.error}
        for row in failed:
            self._cache.erase(row)
        return failed

    def _close_holes(self, ended: set[int]) -> None:
        rows = self._rows
        live = np.ones(len(rows), dtype=np.bool_)
        live[list(ended)] = False
        moves = regroup(rows.positions[: len(rows)], live)
        if len(moves.source):
            source, target = (torch.from_numpy(x).to(self.model.device) for x in (moves.source, moves.target))
            self._cache.move(source, target, int(rows.positions[moves.source].max()))
        rows.move(moves.source, moves.target, int(live.sum()))

    def _take(self, running: Running) -> Finished:
        """Let go of a request that is done."""
        del self._requests[running.request.rid]
        self._waiting.leave(running)
        segments = [] if running.error else [segment for _, segment in sorted(running.segments.items())]
        return Finished(request=running.request, segments=segments, error=running.error)
