"""The OpenAI surface: models, completions, chat completions, whole or streamed.

Beyond OpenAI's own: token ids in and out, which training needs (`prompt` as ids, `prompt_token_ids` on chat as the
authoritative history; `token_ids` and `prompt_token_ids` on every choice), vLLM's and SGLang's sampling extensions, and
the policy_version: in `system_fingerprint`, in `metadata` as `weight_version(s)`, in the header `X-Policy-Version`. In
a stream the fingerprint is on every chunk, the metadata on the last one of each choice. Any model name is served by the
one model there is, as SGLang does; a field that would change the answer and is not served is refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.compat.openai_wire import (
    UNSERVED,
    ChatBody,
    CompletionBody,
    CompletionReply,
    Model,
    ModelList,
    OpenAIError,
    OpenAIErrorDetails,
    SamplingFields,
    Usage,
)
from penstock.rollout import wire
from penstock.rollout.answers import Answers, Growing
from penstock.rollout.convert import Answer, Asked, answer_text, finish_reason, read_requests, version_header
from penstock.rollout.generator import Generator
from penstock.rollout.http import (
    EXPECTED,
    LAST_EVENT,
    Refused,
    Route,
    answer,
    event,
    nowhere,
    read_body,
    status_of,
    unless_gone,
)
from penstock.rollout.text import Tokenizer
from penstock.types import Segment

MAX_TOP_LOGPROBS = 20
PASSING = (408, 409, 429, 503)
"""Statuses of what may succeed when it is tried again."""
CODES = {401: "invalid_api_key"}


class ChatTemplate(Tokenizer, Protocol):
    """A tokenizer that renders conversations."""

    def prompt(self, messages: Sequence[dict[str, Any]], **settings: Any) -> list[int]: ...


class NoSuchModel(Refused):
    """There is one model, and it has another name."""


class OpenAI:
    """The endpoints."""

    def __init__(self, generator: Generator, tokenizer: ChatTemplate, *, model_name: str) -> None:
        self._generator, self._tokenizer, self._model_name = generator, tokenizer, model_name
        self._answers = Answers(generator, tokenizer)
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        route = partial(Route, access="generation", refuse=refuse, error=OpenAIError)
        return [
            route("/v1/models", ["GET"], self.models, reply=ModelList),
            route("/v1/models/{name}", ["GET"], self.model, reply=Model),
            route(
                "/v1/completions", ["POST"], self.completions, body=CompletionBody, reply=CompletionReply, streams=True
            ),
            route("/v1/chat/completions", ["POST"], self.chat, body=ChatBody, reply=CompletionReply, streams=True),
            route("/v1/{rest}", [], nowhere),
        ]

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        return answer(ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        """The model of that name."""
        name = request.path_params["rest"]
        if name != self._model_name:
            raise NoSuchModel(404, f"the model {name!r} does not exist; this server serves {self._model_name!r}")
        return answer(self._model())

    async def completions(self, request: Request) -> Response:
        """Text or tokens that follow a prompt."""
        body = await read_body(request, CompletionBody)
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        generate = _generate_body(body, max_tokens, top_logprobs=body.logprobs, wanted=body.logprobs is not None)
        generate.logprob_start_len = 0 if body.echo else -1
        if body.echo and body.stream:
            raise ValueError("`echo` is not served in a stream")
        prompt: Any = body.prompt
        kinds = {str} if isinstance(prompt, str) else {type(part) for part in prompt}
        if len(kinds) != 1:
            raise ValueError("`prompt` is a string, a list of strings, token ids, or a list of lists of token ids")
        generate.text, generate.input_ids = (prompt, None) if kinds == {str} else (None, prompt)
        return await self._answer(request, body, generate, Completions(self._tokenizer, echo=bool(body.echo)))

    async def chat(self, request: Request) -> Response:
        """The assistant's next message."""
        body = await read_body(request, ChatBody)
        if not body.messages and body.prompt_token_ids is None:
            raise ValueError("`messages` is empty: a chat needs them, or `prompt_token_ids`")
        if body.tool_choice not in (None, "auto", "none"):
            raise ValueError("`tool_choice` is `auto` or `none`: no answer is forced to call a tool")
        if wire.asks(body.functions) or (wire.asks(body.function_call) and body.function_call not in ("auto", "none")):
            raise ValueError("`functions` and `function_call` are not served: give `tools`")
        if body.modalities and body.modalities != ["text"]:
            raise ValueError("`modalities` is not served but for `text`")
        if wire.asks(body.chat_template):
            raise ValueError("`chat_template` is not served: the model's own is used")
        if body.continue_final_message or not body.add_generation_prompt:
            raise ValueError("an assistant's message is not continued: give the conversation as `prompt_token_ids`")
        ids = body.prompt_token_ids
        if ids is None:
            ids = self._rendered(body)
        max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if max_tokens is None:
            max_tokens = max(self._generator.max_context - len(ids), 1)
        generate = _generate_body(body, max_tokens, top_logprobs=body.top_logprobs, wanted=bool(body.logprobs))
        generate.input_ids = list(ids)
        return await self._answer(request, body, generate, Chat(self._tokenizer))

    def _rendered(self, body: ChatBody) -> list[int]:
        settings = body.chat_template_kwargs
        if taken := sorted(settings.keys() & {"messages", "tools", "self"}):
            raise ValueError(f"`chat_template_kwargs` cannot set {', '.join(taken)}")
        if body.tools and body.tool_choice != "none":
            settings = settings | {"tools": body.tools}
        try:
            return self._tokenizer.prompt([_message(message) for message in body.messages], **settings)
        except Exception as error:  # a template is a program that somebody else wrote, run on what a third one sent
            raise ValueError(f"the conversation cannot be rendered: {error}") from error

    async def _answer(
        self, request: Request, body: SamplingFields, generate: wire.GenerateBody, shape: Completions | Chat
    ) -> Response:
        asked = read_requests(generate, self._tokenizer)
        self._answers.check(asked)
        head = {"id": f"{shape.prefix}-{asked[0].rid}", "created": int(time.time()), "model": self._model_name}
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(
                self._stream(asked, head, shape, with_usage=with_usage), media_type="text/event-stream"
            )
        answers = await unless_gone(request, self._answers.give(asked))
        pairs = [(each.asked, segment, each) for each in answers for segment in each.segments]
        choices = [shape.choice(index, mine, segment, whole) for index, (mine, segment, whole) in enumerate(pairs)]
        reply = (
            head
            | {"object": shape.kind, "choices": choices, "usage": _usage(answers)}
            | _provenance([segment for _, segment, _ in pairs], answers[-1].scored_by)
        )
        response = answer(reply)
        response.headers.update(version_header(answers))
        return response

    async def _stream(
        self, asked: Sequence[Asked], head: dict[str, Any], shape: Completions | Chat, *, with_usage: bool
    ) -> AsyncIterator[bytes]:
        """Deltas of each choice, its end with its finish reason, then the usage if it was asked for."""
        head = head | {"object": shape.chunk_kind}
        told: dict[int, Told] = {}
        answers: list[Answer] = []
        try:
            async for sample in self._answers.follow(asked):
                so_far = told.setdefault(sample.index, Told())
                if sample.spans:
                    head["system_fingerprint"] = _fingerprint(sample.spans[-1].policy_version)
                for choice in shape.deltas(sample, so_far):
                    yield event(head | {"choices": [choice]})
                if sample.answer is not None:
                    answers.append(sample.answer)
            if with_usage:
                yield event(head | {"choices": [], "usage": _usage(answers)})
        except EXPECTED as error:
            yield event(_error(error))
        yield LAST_EVENT

    def _model(self) -> Model:
        return Model(
            id=self._model_name,
            created=self._started,
            root=self._model_name,
            max_model_len=self._generator.max_context,
        )


class Told(Struct):
    """Of a streamed choice: how much of it has been sent."""

    text: int = 0
    tokens: int = 0
    begun: bool = False


class Completions:
    """How `/v1/completions` puts it."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, tokenizer: Tokenizer, *, echo: bool) -> None:
        self._tokenizer, self._echo = tokenizer, echo

    def choice(self, index: int, asked: Asked, segment: Segment, whole: Answer) -> dict[str, Any]:
        """One sample."""
        text, ids, logprobs = answer_text(asked, segment, self._tokenizer), segment.token_ids, list(segment.logprobs)
        tops = segment.top_logprobs
        shown_ids, shown_logprobs = ids, logprobs
        if self._echo:
            text = self._tokenizer.decode(asked.prompt_ids) + text
            shown_ids = asked.prompt_ids + ids
            shown_logprobs = [None, *(whole.prompt_logprobs or ()), *logprobs]  # type: ignore[list-item]
            tops = [[]] * len(asked.prompt_ids) + tops if tops is not None else None
        return {
            "index": index,
            "text": text,
            "finish_reason": segment.finish_reason,
            "matched_stop": _matched(asked, segment, self._tokenizer),
            "logprobs": self._logprobs(shown_ids, shown_logprobs, tops) if asked.body.return_logprob else None,
            "token_ids": ids,
            "prompt_token_ids": asked.prompt_ids,
        }

    def deltas(self, sample: Growing, told: Told) -> list[dict[str, Any]]:
        """What is new of one sample."""
        if sample.answer is None:
            text = sample.text()
            if len(text) == told.text:
                return []
            return [self._delta(sample, told, text, None)]
        (segment,) = sample.answer.segments
        text = answer_text(sample.asked, segment, self._tokenizer)
        return [self._delta(sample, told, text, segment.finish_reason) | _provenance([segment])]

    def _delta(self, sample: Growing, told: Told, text: str, reason: str | None) -> dict[str, Any]:
        ids, logprobs, tops = sample.since(told.tokens)
        delta: dict[str, Any] = {
            "index": sample.index,
            "text": text[told.text :],
            "finish_reason": reason,
            "logprobs": None,
            "token_ids": ids,
        }
        if sample.asked.body.return_logprob:
            delta["logprobs"] = self._logprobs(ids, logprobs, tops, start=told.text)
        if not told.begun:
            delta["prompt_token_ids"] = sample.asked.prompt_ids
        told.text, told.tokens, told.begun = len(text), sample.num_tokens, True
        return delta

    def _logprobs(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: list[list[tuple[float, int]]] | None,
        *,
        start: int = 0,
    ) -> dict[str, Any]:
        """`start`: where in the text the first of them begins."""
        tokens = [self._tokenizer.decode([token], skip_special=False) for token in ids]
        offsets = list(accumulate(map(len, tokens), initial=start))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "text_offset": offsets,
            "top_logprobs": None
            if tops is None
            else [
                {self._tokenizer.decode([token], skip_special=False): logprob for logprob, token in place}
                for place in tops
            ],
        }


class Chat:
    """How `/v1/chat/completions` puts it."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, index: int, asked: Asked, segment: Segment, whole: Answer) -> dict[str, Any]:
        """One sample."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer_text(asked, segment, self._tokenizer)},
            "finish_reason": segment.finish_reason,
            "matched_stop": _matched(asked, segment, self._tokenizer),
            "logprobs": self._logprobs(asked, segment.token_ids, segment.logprobs, segment.top_logprobs),
            "token_ids": segment.token_ids,
            "response_token_ids": segment.token_ids,
            "prompt_token_ids": asked.prompt_ids,
        }

    def deltas(self, sample: Growing, told: Told) -> list[dict[str, Any]]:
        """What is new of one sample; first of all who speaks."""
        found = []
        if not told.begun:
            told.begun = True
            role = self._delta(sample, told, "", None) | {"prompt_token_ids": sample.asked.prompt_ids}
            role["delta"] = {"role": "assistant", "content": ""}
            found.append(role)
        if sample.answer is None:
            so_far = sample.text()
            if len(so_far) > told.text:
                found.append(self._delta(sample, told, so_far, None))
            return found
        (segment,) = sample.answer.segments
        text = answer_text(sample.asked, segment, self._tokenizer)
        if len(text) > told.text:
            found.append(self._delta(sample, told, text, None))
        last = self._delta(sample, told, text, segment.finish_reason)
        last["delta"] = {}
        return [*found, last | _provenance([segment])]

    def _delta(self, sample: Growing, told: Told, text: str, reason: str | None) -> dict[str, Any]:
        ids, logprobs, tops = sample.since(told.tokens if text or reason else sample.num_tokens)
        delta: dict[str, Any] = {
            "index": sample.index,
            "delta": {"content": text[told.text :]},
            "finish_reason": reason,
            "logprobs": self._logprobs(sample.asked, ids, logprobs, tops),
            "token_ids": ids,
        }
        told.text, told.tokens = len(text), told.tokens + len(ids)
        return delta

    def _logprobs(
        self,
        asked: Asked,
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: list[list[tuple[float, int]]] | None,
    ) -> dict[str, Any] | None:
        if not asked.body.return_logprob:
            return None
        places = zip(ids, logprobs, tops or [[]] * len(ids), strict=True)
        return {
            "content": [
                self._token(token, logprob) | {"top_logprobs": [self._token(other, value) for value, other in top]}
                for token, logprob, top in places
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def refuse(error: Exception) -> Response:
    """In OpenAI's shape; its SDK is told not to repeat what will fail again."""
    status = status_of(error)
    response = answer(_error(error), status)
    response.headers["x-should-retry"] = "true" if status in PASSING else "false"
    return response


def _generate_body(
    body: SamplingFields, max_tokens: int, *, top_logprobs: int | None, wanted: bool
) -> wire.GenerateBody:
    """In the terms of `/generate`."""
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be at least 0, not {max_tokens}")
    if top_logprobs is not None and not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(f"at most {MAX_TOP_LOGPROBS} top log-probabilities are told, not {top_logprobs}")
    if body.best_of not in (None, 1, body.n):
        raise ValueError("`best_of` is not served: sample with `n` and choose")
    for name in UNSERVED:
        if wire.asks(getattr(body, name)):
            raise ValueError(f"`{name}` is not served")
    if not body.skip_special_tokens:
        raise ValueError("`skip_special_tokens` false is not served: read `token_ids`")
    if top_logprobs and not wanted:
        raise ValueError("`top_logprobs` needs `logprobs`")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise ValueError("`response_format` is not served but for `text`")
    num_samples = 1 if body.n is None else body.n
    if not 1 <= num_samples <= wire.MAX_SAMPLES:
        raise ValueError(f"n must be between 1 and {wire.MAX_SAMPLES}, not {num_samples}")
    return wire.GenerateBody(
        rid=body.rid or body.request_id,
        return_logprob=wanted,
        top_logprobs_num=top_logprobs or 0 if wanted else 0,
        sampling_params=wire.SamplingBody(
            n=num_samples,
            max_new_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=-1 if body.top_k is None else body.top_k,
            min_p=body.min_p,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            no_stop_trim=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            min_new_tokens=body.min_tokens,
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias,
            sampling_seed=body.seed,
        ),
    )


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """As templates expect it: text parts as plain text (other parts are refused), arguments of calls as objects."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("only text is served: a message has parts of another type")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
        raise ValueError("a message has a `role` and a `content` of text")
    plain = message | {"content": content or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function = function | {"arguments": msgspec.json.decode(arguments or "{}")}
    return call | {"function": function}


def _matched(asked: Asked, segment: Segment, tokenizer: Tokenizer) -> int | str | None:
    reason = finish_reason(asked, segment, tokenizer)
    return reason.matched if isinstance(reason, wire.Stop) else None


def _usage(answers: Sequence[Answer]) -> Usage:
    prompts: dict[str, int] = {each.asked.rid: len(each.asked.prompt_ids) for each in answers}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(len(segment.token_ids) for each in answers for segment in each.segments)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def _provenance(segments: Sequence[Segment], scored_by: Sequence[int] = ()) -> dict[str, Any]:
    """Which policy_version made what, of the last token and of every choice; of nothing but scores, who computed
    them."""
    spans = [
        [{"version": str(version), "start": start, "end": end} for version, start, end in segment.spans]
        for segment in segments
    ]
    last = next((choice[-1]["version"] for choice in reversed(spans) if choice), None)
    if last is None and scored_by:
        last = str(scored_by[-1])
    if last is None:
        return {}
    metadata = {"weight_version": last, "weight_versions": spans[0] if len(spans) == 1 else spans}
    return {"system_fingerprint": _fingerprint(last), "metadata": metadata}


def _fingerprint(policy_version: object) -> str:
    return f"policy_version-{policy_version}"


def _error(error: Exception) -> OpenAIError:
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, NoSuchModel) else CODES.get(status)
    return OpenAIError(error=OpenAIErrorDetails(message=str(error), type=kind, code=code))
