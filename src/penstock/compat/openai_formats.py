"""Replies of the OpenAI API: choices, and the parts of choices in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from penstock.compat import openai_wire as wire
from penstock.model.answer_format import AnswerFormat, ParsedAnswer, Tools, call_ids
from penstock.rollout import bodies, convert
from penstock.rollout.convert import Answer, GrowingSample, PromptRequest
from penstock.rollout.generator import PromptScores
from penstock.rollout.text import Tokenizer
from penstock.samples import Segment

Logprobs = Sequence[float | None]
TopLogprobs = list[list[tuple[float, int]]] | None


class ChatTemplate(Tokenizer, Protocol):
    """A tokenizer that renders conversations and knows how to read answers."""

    answers: AnswerFormat

    def prompt(self, messages: Sequence[dict[str, Any]], **settings: Any) -> list[int]: ...


class Delta(NamedTuple):
    """What is new in a sample, as a choice for a chunk of a stream."""

    sample: GrowingSample
    choice: dict[str, Any]


class CompletionFormat:
    """The reply format of `/v1/completions`, for one request."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, tokenizer: Tokenizer, *, has_tokens: bool, echo: bool = False) -> None:
        """`has_tokens`: choices have their token ids."""
        self._tokenizer, self.echoes, self._has_tokens = tokenizer, echo, has_tokens
        self._texts: dict[int, str] = {}
        """Texts of tokens. The samples of a prompt repeat its tokens."""
        self._sent: dict[int, tuple[int, int]] = {}
        """Number of characters and tokens that have been sent of each streamed choice."""

    def choice(self, index: int, whole: Answer, segment: Segment) -> dict[str, Any]:
        """Return one sample as a choice."""
        prompt, ids, tops = whole.prompt, segment.token_ids, segment.top_logprobs
        text, logprobs = convert.answer_text(prompt, segment, self._tokenizer), list[float | None](segment.logprobs)
        if self.echoes:
            text = self._tokenizer.decode(prompt.prompt_ids) + text
            ids = prompt.prompt_ids + ids
            scored = whole.scores.tokens if whole.scores is not None else []
            logprobs = [None, *(each.logprob for each in scored), *logprobs]
            tops = [[], *(each.top_logprobs for each in scored), *(tops or [[]] * len(segment.token_ids))]
        return {
            "text": text,
            "index": index,
            "finish_reason": segment.finish_reason,
            "matched_stop": self._matched_stop(prompt, segment),
            "logprobs": self._logprobs(ids, logprobs, tops) if prompt.body.return_logprob else None,
            "weight_versions": weight_versions(segment),
            **self._tokens(segment.token_ids, prompt.prompt_ids),
        }

    def _tokens(self, token_ids: Sequence[int], prompt_ids: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the fields with tokens, unless the client wants none."""
        if not self._has_tokens:
            return {}
        return {"token_ids": token_ids, **({"prompt_token_ids": prompt_ids} if prompt_ids is not None else {})}

    def delta(self, sample: GrowingSample) -> dict[str, Any] | None:
        """Return the new part of a sample, as a choice for a chunk of the stream; None if it has no new text. The first
        chunk has the prompt's tokens, and the last one the versions."""
        prompt, segment = sample.prompt, sample.answer.segments[0] if sample.answer is not None else None
        text = sample.text() if segment is None else convert.answer_text(prompt, segment, self._tokenizer)
        num_characters, num_tokens = self._sent.get(sample.index, (0, 0))
        if (chunk := self._chunk(sample, text)) is None:
            return None
        ids, logprobs, tops = sample.since(num_tokens)
        is_first, has_logprobs = sample.index not in self._sent, prompt.body.return_logprob and ids
        delta = {
            "index": sample.index,
            "finish_reason": segment.finish_reason if segment is not None else None,
            **chunk,
            "logprobs": self._logprobs(ids, logprobs, tops, num_characters) if has_logprobs else None,
            **self._tokens(ids, prompt.prompt_ids if is_first else None),
        }
        self._sent[sample.index] = len(text), sample.num_tokens
        if segment is None:
            return delta
        ended = {"matched_stop": self._matched_stop(prompt, segment), "weight_versions": weight_versions(segment)}
        return delta | ended | provenance([segment])

    def _matched_stop(self, prompt: PromptRequest, segment: Segment) -> int | str | None:
        """Return the token or the text at which a sample stopped; None if it did not stop by itself."""
        reason = convert.finish_reason(prompt, segment, self._tokenizer)
        return reason.matched if isinstance(reason, bodies.Stop) else None

    def _chunk(self, sample: GrowingSample, text: str) -> dict[str, Any] | None:
        """Return what is new of a sample with this text; None if nothing is, and it has not ended."""
        num_sent, _ = self._sent.get(sample.index, (0, 0))
        return {"text": text[num_sent:]} if sample.answer is not None or len(text) > num_sent else None

    def _logprobs(self, ids: Sequence[int], logprobs: Logprobs, tops: TopLogprobs, start: int = 0) -> dict[str, Any]:
        """Return the log-probabilities in OpenAI's format. `start`: offset in the text of the first token."""
        tokens = [self._text(token) for token in ids]
        likely = tops or [[]] * len(ids)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "text_offset": list(accumulate(map(len, tokens), initial=start))[:-1],
            "top_logprobs": [
                None if own is None else {self._text(token): logprob for logprob, token in top} | {text: own}
                for text, own, top in zip(tokens, logprobs, likely, strict=True)
            ],
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token], skip_special=False)
        return self._texts[token]


class ChatFormat(CompletionFormat):
    """The reply format of `/v1/chat/completions`, for one request."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, tokenizer: ChatTemplate, tools: Tools, *, begun: str, one_call: bool, has_tokens: bool) -> None:
        """`begun`: beginning of the answer that is in the prompt. `one_call`: of several calls only the first one is
        told."""
        super().__init__(tokenizer, has_tokens=has_tokens)
        self._format, self._tools, self._begun, self._one_call = tokenizer.answers, tools, begun, one_call
        self._thinking: dict[str, bool] = {}
        """Whether a prompt ends with the beginning of reasoning, by its request id."""
        self._shown: dict[int, tuple[int, int]] = {}
        """Number of characters of the reasoning and of the content that have been sent of each streamed choice."""

    def choice(self, index: int, whole: Answer, segment: Segment) -> dict[str, Any]:
        choice = super().choice(index, whole, segment)
        answer = self._read(whole.prompt, choice.pop("text"))
        calls = self._tool_calls(whole.prompt, segment, answer)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if calls else ""),
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = calls
        ended = {"finish_reason": "tool_calls"} if calls and segment.finish_reason == "stop" else {}
        ids = {"response_token_ids": segment.token_ids} if self._has_tokens else {}
        return choice | ended | {"message": message} | ids

    def _read(self, prompt: PromptRequest, text: str) -> ParsedAnswer:
        return self._format.read(self._begun + text, self._tools, is_thinking=self._is_thinking(prompt))

    def _is_thinking(self, prompt: PromptRequest) -> bool:
        if prompt.rid not in self._thinking:
            self._thinking[prompt.rid] = self._format.is_thinking(prompt.prompt_ids, self._tokenizer.decode)
        return self._thinking[prompt.rid]

    def _tool_calls(self, prompt: PromptRequest, segment: Segment, answer: ParsedAnswer) -> list[dict[str, Any]]:
        calls = answer.calls[:1] if self._one_call else answer.calls
        names = call_ids(self._format, prompt.prompt_ids, segment.token_ids, len(calls))
        return [each.tool_call(name) for name, each in zip(names, calls, strict=True)]

    def _chunk(self, sample: GrowingSample, text: str) -> dict[str, Any] | None:
        prompt, calls, ended = sample.prompt, list[dict[str, Any]](), dict[str, Any]()
        if sample.answer is None:
            is_thinking = self._is_thinking(prompt)
            reasoning, content = self._format.visible(self._begun + text, self._tools, is_thinking=is_thinking)
        else:
            answer, (segment,) = self._read(prompt, text), sample.answer.segments
            reasoning, content, calls = answer.reasoning, answer.content, self._tool_calls(prompt, segment, answer)
            ended = {"finish_reason": "tool_calls"} if calls and segment.finish_reason == "stop" else {}
        num_thought, num_said = self._shown.get(sample.index, (0, 0))
        thought, said = reasoning[num_thought:], content[num_said:]
        if sample.answer is None and not thought and not said:
            return None
        delta: dict[str, Any] = {} if sample.index in self._shown else {"role": "assistant"}
        delta |= {"reasoning_content": thought} if thought else {}
        delta |= {"content": said} if said or (not thought and not calls) else {}
        delta |= {"tool_calls": [{"index": number, **each} for number, each in enumerate(calls)]} if calls else {}
        self._shown[sample.index] = len(reasoning), len(content)
        return {"delta": delta, **ended}

    def _logprobs(self, ids: Sequence[int], logprobs: Logprobs, tops: TopLogprobs, start: int = 0) -> dict[str, Any]:
        places = zip(ids, logprobs, tops or [[]] * len(ids), strict=True)
        return {
            "content": [
                self._token(token, logprob) | {"top_logprobs": [self._token(other, value) for value, other in top]}
                for token, logprob, top in places
            ]
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage(answers: Sequence[Answer]) -> wire.Usage:
    prompt_tokens = sum({each.prompt.rid: len(each.prompt.prompt_ids) for each in answers}.values())
    completion_tokens = sum(len(segment.token_ids) for each in answers for segment in each.segments)
    total_tokens = prompt_tokens + completion_tokens
    return wire.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=total_tokens)


def provenance(segments: Sequence[Segment], scores: PromptScores | None = None) -> dict[str, Any]:
    """Return the reply's fields with the policy_version of the last token, or of the scores if there are only these."""
    scored_by = scores.versions[-1:] if scores is not None else ()
    versions = [*scored_by, *(segment.spans[-1].policy_version for segment in segments if segment.spans)]
    if not versions:
        return {}
    return {"system_fingerprint": fingerprint(versions[-1]), "metadata": {"weight_version": str(versions[-1])}}


def weight_versions(segment: Segment) -> list[dict[str, Any]]:
    """Return the policy_versions of a choice: which of its tokens each version sampled."""
    return [{"version": str(version), "start": start, "end": end} for version, start, end in segment.spans]


def fingerprint(policy_version: object) -> str:
    return f"policy_version-{policy_version}"
