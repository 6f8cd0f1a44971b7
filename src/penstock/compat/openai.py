"""The OpenAI API: models, completions and chat completions, whole or streamed.

Extensions to OpenAI's API:

* Token ids in and out, which training needs. Requests may give `prompt` as ids, or `prompt_token_ids` on chat as the
  authoritative history. Every choice returns `token_ids` and `prompt_token_ids`, unless `return_token_ids` is false.
* The sampling extensions of vLLM and SGLang.
* The policy_version: in `system_fingerprint`, in `metadata` as `weight_version`, in each choice as `weight_versions`,
  and in the header `X-Policy-Version`. In a stream, every chunk has the fingerprint, and the last chunk of each choice
  has the metadata.
* `/tokenize` and `/detokenize`, as vLLM has them.

Any model name in a request selects the only model, as in SGLang. An unsupported field that would change the answer is
refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.compat import openai_wire as wire
from penstock.deadline import Stalled
from penstock.model.answer_format import AnswerFormat, ParsedAnswer, Tools, call_ids, with_decoded_arguments
from penstock.rollout import bodies, convert, http
from penstock.rollout.convert import Answer, GrowingSample, PromptRequest
from penstock.rollout.generation import Answers
from penstock.rollout.generator import Generator
from penstock.rollout.prompt_text import PromptText
from penstock.rollout.request import MAX_TOKEN, ContextExceeded
from penstock.rollout.text import Tokenizer
from penstock.samples import Segment

MAX_TOP_LOGPROBS = 20
RETRYABLE = (408, 409, 429, 503)
"""Statuses of errors for which a retry may succeed."""
CODES = {401: "invalid_api_key"}
INVALID = "invalid_request_error"
MAX_SHOWN = 100
"""Characters of a value that an error shows."""
SAMPLING_FIELDS = {
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    **{name: name for name in ("n", "temperature", "top_p", "top_k", "min_p", "logit_bias")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    **{name: name for name in ("stop", "stop_token_ids", "ignore_eos")},
}
"""Names of the sampling fields here and in the body of `/generate`."""

Logprobs = Sequence[float | None]
TopLogprobs = list[list[tuple[float, int]]] | None


class ChatTemplate(Tokenizer, Protocol):
    """A tokenizer that renders conversations and knows how to read answers."""

    answers: AnswerFormat

    def prompt(self, messages: Sequence[dict[str, Any]], **settings: Any) -> list[int]: ...


class Prompt(Protocol):
    """A function that returns the tokens of a conversation."""

    def __call__(self, messages: Sequence[dict[str, Any]], **settings: Any) -> list[int]: ...


class NoSuchModel(http.Refused):
    """The requested name is not the name of the only model."""


CONTEXT_EXCEEDED = "context_length_exceeded"
ERROR_CODES = {NoSuchModel: "model_not_found", ContextExceeded: CONTEXT_EXCEEDED}


class OpenAI:
    """The endpoints of the OpenAI API."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: ChatTemplate,
        *,
        model_name: str,
        measure: Prompt | None = None,
        renders_inline: bool = False,
    ) -> None:
        """`measure`: renders conversations for `/tokenize`, where those of `tokenizer` have consequences.
        `renders_inline`: see `PromptText`."""
        self._generator, self._tokenizer, self._model_name = generator, tokenizer, model_name
        self._measure = measure or tokenizer.prompt
        self._answers = Answers(generator, tokenizer)
        self._text = PromptText(tokenizer, max_context=generator.max_context, renders_inline=renders_inline)
        self._started = int(time.time())

    def routes(self) -> list[http.Route]:
        route = partial(http.Route, access="generation", refuse=refuse, error=wire.OpenAIError)
        generate = partial(route, methods=["POST"], reply=wire.CompletionReply, streams=True)
        return [
            route("/v1/models", ["GET"], self.models, reply=wire.ModelList),
            route("/v1/models/{name}", ["GET"], self.model, reply=wire.Model),
            generate("/v1/completions", endpoint=self.completions, body=wire.CompletionBody),
            generate("/v1/chat/completions", endpoint=self.chat, body=wire.ChatBody),
            route("/tokenize", ["POST"], self.tokenize, body=wire.TokenizeBody, reply=wire.TokenizeReply),
            route("/detokenize", ["POST"], self.detokenize, body=wire.DetokenizeBody, reply=wire.DetokenizeReply),
            route("/v1/{rest}", [], http.not_found),
        ]

    async def models(self, request: Request) -> Response:
        """List the only model."""
        return http.answer(wire.ModelList(data=[self._model()]))

    async def model(self, request: Request) -> Response:
        """Describe the model of this name."""
        name = request.path_params["rest"]
        if name != self._model_name:
            raise NoSuchModel(404, f"the model {name!r} does not exist; this server serves {self._model_name!r}")
        return http.answer(self._model())

    async def completions(self, request: Request) -> Response:
        """Generate the continuation of a prompt."""
        body = await http.read_body(request, wire.CompletionBody)
        prompt: Any = body.prompt
        kinds = {str} if isinstance(prompt, str) else {type(part) for part in prompt}
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        generate = _generate_body(body, max_tokens, top=body.logprobs, wanted=body.logprobs is not None)
        _refuse_if(
            (body.echo and body.stream, "`echo` is not served in a stream"),
            (len(kinds) != 1, "`prompt` is a string, a list of strings, token ids, or a list of lists of token ids"),
        )
        generate.logprob_start_len = 0 if body.echo else -1
        generate.text, generate.input_ids = (prompt, None) if kinds == {str} else (None, prompt)
        form = CompletionFormat(self._tokenizer, has_tokens=body.return_token_ids is not False, echo=bool(body.echo))
        return await self._answer(request, body, generate, form)

    async def chat(self, request: Request) -> Response:
        """Generate the assistant's next message."""
        body = await http.read_body(request, wire.ChatBody)
        return await self._answer(request, body, *await self.prepare_chat(body))

    async def prepare_chat(self, body: wire.ChatBody) -> tuple[bodies.GenerateBody, ChatFormat]:
        """Return what to generate for a chat request, and how to read it. Raises ValueError for what is not served."""
        ids, tool = body.prompt_token_ids, _must_call(body)
        begun = "" if tool is None else self._tokenizer.answers.beginning(tool)
        calls = bodies.asks(body.function_call) and body.function_call not in ("auto", "none")
        continues = body.continue_final_message or not body.add_generation_prompt
        _refuse_if(
            (not body.messages and ids is None, "`messages` is empty: a chat needs them, or `prompt_token_ids`"),
            (calls or bodies.asks(body.functions), "`functions` and `function_call` are not served: give `tools`"),
            (body.modalities not in (None, [], ["text"]), "`modalities` is not served but for `text`"),
            (bodies.asks(body.chat_template), "`chat_template` is not served: the model's own is used"),
            (begun and ids, "`tool_choice` cannot demand a call after `prompt_token_ids`: begin it there"),
            (continues, "an assistant's message is not continued: give the conversation as `prompt_token_ids`"),
            (body.separate_reasoning is False, "`separate_reasoning` false is not served: read `token_ids`"),
            (body.include_reasoning is False, "`include_reasoning` false is not served: ignore `reasoning_content`"),
        )
        ids = await self._rendered(body, self._tokenizer.prompt) if ids is None else ids
        max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if max_tokens is None:
            max_tokens = max(self._generator.max_context - len(ids), 1)
        generate = _generate_body(body, max_tokens, top=body.top_logprobs, wanted=bool(body.logprobs))
        generate.input_ids = list(ids)
        return generate, ChatFormat(
            self._tokenizer,
            _offered(body),
            begun=begun,
            one_call=body.parallel_tool_calls is False,
            has_tokens=body.return_token_ids is not False,
        )

    def check_length(self, *parts: object) -> None:
        """Raise `ContextExceeded` if a conversation of these parts is too long. A dialect checks before it converts."""
        self._text.check(*parts)

    async def count(self, body: wire.ChatBody) -> int:
        """Return the number of tokens of a conversation. Raises ValueError if it cannot be rendered."""
        return len(await self._rendered(body, self._measure))

    async def follow(self, generate: bodies.GenerateBody, form: ChatFormat) -> AsyncIterator[Delta]:
        """Yield what is new in the only sample of a chat, as long as it grows."""
        async for sample in self._answers.follow(await self.requests_of(generate, form)):
            if (delta := form.delta(sample)) is not None:
                yield Delta(sample, delta)

    async def requests_of(self, generate: bodies.GenerateBody, form: CompletionFormat) -> Sequence[PromptRequest]:
        """Return the requests for the engine. Raises ValueError or `Refused` if one cannot be served."""
        prompts = convert.read_requests(await self._text.tokenised(generate), self._tokenizer, echoes=form.echoes)
        self._answers.check(prompts)
        return prompts

    async def give(self, request: Request, prompts: Sequence[PromptRequest]) -> list[Answer]:
        """Return the answers. Generation ends if the client leaves."""
        return await http.unless_disconnected(request, self._answers.give(prompts))

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt or of a conversation."""
        body = await http.read_body(request, wire.TokenizeBody)
        continues = body.continue_final_message or not body.add_generation_prompt
        _refuse_if(
            ((body.prompt is None) == (not body.messages), "give exactly one of `prompt` and `messages`"),
            (continues, "an assistant's message is not continued"),
            (body.add_special_tokens, "`add_special_tokens` is not served: write them into the prompt"),
            (body.return_token_strs, "`return_token_strs` is not served: ask `/detokenize`"),
        )
        if body.prompt is None:
            chat = wire.ChatBody(
                messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
            )
            ids = await self._rendered(chat, self._measure)
        else:
            found = (await self._text.tokenised(bodies.GenerateBody(text=body.prompt))).input_ids
            ids = [each for each in found or () if isinstance(each, int)]
        reply = wire.TokenizeReply(count=len(ids), max_model_len=self._generator.max_context, tokens=ids)
        return http.answer(reply)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, special ones included."""
        body = await http.read_body(request, wire.DetokenizeBody)
        if len(body.tokens) > self._generator.max_context:
            raise ContextExceeded(
                f"there are {len(body.tokens)} tokens, and this model's maximum context length is "
                f"{self._generator.max_context} tokens"
            )
        if any(not 0 <= token < MAX_TOKEN for token in body.tokens):
            raise ValueError(f"`tokens` holds a number that no token can be: they go from 0 to {MAX_TOKEN - 1}")
        return http.answer(wire.DetokenizeReply(prompt=self._tokenizer.decode(body.tokens, skip_special=False)))

    async def _rendered(self, body: wire.ChatBody, prompt: Prompt) -> list[int]:
        settings = body.chat_template_kwargs or {}
        if taken := sorted(settings.keys() & {"messages", "tools", "must_call", "self"}):
            raise ValueError(f"`chat_template_kwargs` cannot set {', '.join(taken)}")
        if tools := _offered(body):
            settings = settings | {"tools": tools}
        if (tool := _must_call(body)) is not None:
            settings = settings | {"must_call": tool}

        def render() -> list[int]:
            return prompt([_message(message) for message in body.messages], **settings)

        try:
            return await self._text.rendered(render, body.messages, settings)
        except (Stalled, ContextExceeded):
            raise
        except Exception as error:  # the model's template is foreign code, and runs on the client's data
            raise ValueError(f"the conversation cannot be rendered: {error}") from error

    async def _answer(
        self, request: Request, body: wire.SamplingFields, generate: bodies.GenerateBody, form: CompletionFormat
    ) -> Response:
        prompts = await self.requests_of(generate, form)
        head = {"id": f"{form.prefix}-{prompts[0].rid}", "created": int(time.time()), "model": self._model_name}
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            stream = self._stream(prompts, head, form, with_usage=with_usage)
            return StreamingResponse(stream, media_type="text/event-stream")
        answers = await self.give(request, prompts)
        pairs = [(each, segment) for each in answers for segment in each.segments]
        choices = [form.choice(index, *pair) for index, pair in enumerate(pairs)]
        reply = head | {"object": form.kind, "choices": choices, "usage": _usage(answers)}
        if len(prompts) == 1 and body.return_token_ids is not False:
            reply["prompt_token_ids"] = prompts[0].prompt_ids  # where vLLM has them
        response = http.answer(reply | _provenance([segment for _, segment in pairs], answers[-1].scored_by))
        response.headers.update(convert.version_header(answers))
        return response

    async def _stream(
        self, prompts: Sequence[PromptRequest], head: dict[str, Any], form: CompletionFormat, *, with_usage: bool
    ) -> AsyncIterator[bytes]:
        """Yield the deltas of each choice, its last chunk with the finish reason, and finally the usage if the client
        asked for it."""
        head = head | {"object": form.chunk_kind}
        answers: list[Answer] = []
        try:
            async for sample in self._answers.follow(prompts):
                if sample.spans:
                    head["system_fingerprint"] = _fingerprint(sample.spans[-1].policy_version)
                if (delta := form.delta(sample)) is not None:
                    yield http.event(head | {"choices": [delta]})
                if sample.answer is not None:
                    answers.append(sample.answer)
            if with_usage:
                yield http.event(head | {"choices": [], "usage": _usage(answers)})
        except http.EXPECTED as error:
            yield http.event(_error(error))
        yield http.LAST_EVENT

    def _model(self) -> wire.Model:
        name, max_context = self._model_name, self._generator.max_context
        return wire.Model(id=name, created=self._started, root=name, max_model_len=max_context)


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
            logprobs = [None, *(whole.prompt_logprobs or ()), *logprobs]
            tops = None if tops is None else [[]] * len(prompt.prompt_ids) + tops
        reason = convert.finish_reason(prompt, segment, self._tokenizer)
        return {
            "text": text,
            "index": index,
            "finish_reason": segment.finish_reason,
            "matched_stop": reason.matched if isinstance(reason, bodies.Stop) else None,
            "logprobs": self._logprobs(ids, logprobs, tops) if prompt.body.return_logprob else None,
            "weight_versions": _weight_versions(segment),
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
        is_first = sample.index not in self._sent
        delta = {
            "index": sample.index,
            "finish_reason": segment.finish_reason if segment is not None else None,
            **chunk,
            "logprobs": self._logprobs(ids, logprobs, tops, num_characters) if prompt.body.return_logprob else None,
            **self._tokens(ids, prompt.prompt_ids if is_first else None),
        }
        self._sent[sample.index] = len(text), sample.num_tokens
        if segment is None:
            return delta
        return delta | {"weight_versions": _weight_versions(segment)} | _provenance([segment])

    def _chunk(self, sample: GrowingSample, text: str) -> dict[str, Any] | None:
        """Return what is new of a sample with this text; None if nothing is, and it has not ended."""
        num_sent, _ = self._sent.get(sample.index, (0, 0))
        return {"text": text[num_sent:]} if sample.answer is not None or len(text) > num_sent else None

    def _logprobs(self, ids: Sequence[int], logprobs: Logprobs, tops: TopLogprobs, start: int = 0) -> dict[str, Any]:
        """Return the log-probabilities in OpenAI's format. `start`: offset in the text of the first token."""
        tokens = [self._text(token) for token in ids]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "text_offset": list(accumulate(map(len, tokens), initial=start))[:-1],
            "top_logprobs": tops and [{self._text(token): logprob for logprob, token in top} for top in tops],
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


def refuse(error: Exception) -> Response:
    """Return an error in OpenAI's format. A header tells OpenAI's SDK whether a retry may succeed."""
    status = http.status_of(error)
    response = http.answer(_error(error), status)
    response.headers["x-should-retry"] = should_retry(error)
    return response


def should_retry(error: Exception) -> str:
    """Return what a header tells the official SDKs: whether a retry may succeed."""
    return "true" if http.status_of(error) in RETRYABLE else "false"


def _generate_body(body: wire.SamplingFields, max_tokens: int, *, top: int | None, wanted: bool) -> bodies.GenerateBody:
    """Return the request as a body of `/generate`. Raises ValueError for unsupported fields and invalid values."""
    num_samples = 1 if body.n is None else body.n
    unserved = [name for name in wire.UnservedFields.__struct_fields__ if bodies.asks(getattr(body, name))]
    form = "text" if body.response_format is None else body.response_format.get("type")
    _refuse_if(
        (max_tokens < 0, f"max_tokens must be at least 0, not {max_tokens}"),
        (not 0 <= (top or 0) <= MAX_TOP_LOGPROBS, f"at most {MAX_TOP_LOGPROBS} top log-probabilities, not {top}"),
        (body.best_of not in (None, 1, body.n), "`best_of` is not served: sample with `n` and choose"),
        (unserved, f"`{'`, `'.join(unserved)}` is not served"),
        (not body.skip_special_tokens, "`skip_special_tokens` false is not served: read `token_ids`"),
        (top and not wanted, "`top_logprobs` needs `logprobs`"),
        (body.prompt_logprobs is not None, "`prompt_logprobs` is not served: use `echo`, or `/generate`"),
        (
            body.stream_options is not None and body.stream_options.continuous_usage_stats,
            "`continuous_usage_stats` is not served: `include_usage` tells the usage at the end",
        ),
        (form != "text", "`response_format` is not served but for `text`"),
        (not 1 <= num_samples <= bodies.MAX_SAMPLES, f"n must be from 1 to {bodies.MAX_SAMPLES}, not {num_samples}"),
    )
    sampling = {name: value for field, name in SAMPLING_FIELDS.items() if (value := getattr(body, field)) is not None}
    rid, params = body.rid or body.request_id, bodies.SamplingBody(max_new_tokens=max_tokens, **sampling)
    return bodies.GenerateBody(rid=rid, return_logprob=wanted, top_logprobs_num=top or 0, sampling_params=params)


def _must_call(body: wire.ChatBody) -> str | None:
    """Return the tool that the answer must call: empty for any, None if it may call none. Raises ValueError for other
    choices, and for a tool that is not offered."""
    match body.tool_choice:
        case None | "auto" | "none":
            return None
        case "required":
            tool = ""
        case {"type": "function", "function": {"name": str(tool)}}:
            pass
        case other:
            raise ValueError(f"`tool_choice` is `auto`, `none`, `required` or a named function, not {short(other)}")
    names = [function.get("name") for each in body.tools or () if isinstance(function := each.get("function"), dict)]
    if not names or (tool and tool not in names):
        raise ValueError(
            f"`tool_choice` asks for a call of {short(tool) if tool else 'a tool'}, and `tools` does not have it"
        )
    return tool


def _offered(body: wire.ChatBody) -> list[dict[str, Any]]:
    """Return the tools that the policy may call."""
    return (body.tools or []) if body.tool_choice != "none" else []


def _refuse_if(*problems: tuple[object, str]) -> None:
    """Raise ValueError with the message of the first problem that is present."""
    for is_present, message in problems:
        if is_present:
            raise ValueError(message)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates expect it: text parts joined to plain text, arguments of tool calls as
    objects. Raises ValueError for parts that are not text."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("only text is served: a message has parts of another type")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
        raise ValueError("a message has a `role` and a `content` of text")
    plain = message | {"content": content or ""}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [with_decoded_arguments(call) for call in calls]
    return plain


def _usage(answers: Sequence[Answer]) -> wire.Usage:
    prompt_tokens = sum({each.prompt.rid: len(each.prompt.prompt_ids) for each in answers}.values())
    completion_tokens = sum(len(segment.token_ids) for each in answers for segment in each.segments)
    total_tokens = prompt_tokens + completion_tokens
    return wire.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, total_tokens=total_tokens)


def _provenance(segments: Sequence[Segment], scored_by: Sequence[int] = ()) -> dict[str, Any]:
    """Return the reply's fields with the policy_version of the last token, or of the scores if there are only these."""
    versions = [*scored_by[-1:], *(segment.spans[-1].policy_version for segment in segments if segment.spans)]
    if not versions:
        return {}
    return {"system_fingerprint": _fingerprint(versions[-1]), "metadata": {"weight_version": str(versions[-1])}}


def _weight_versions(segment: Segment) -> list[dict[str, Any]]:
    """Return the policy_versions of a choice: which of its tokens each version sampled."""
    return [{"version": str(version), "start": start, "end": end} for version, start, end in segment.spans]


def _fingerprint(policy_version: object) -> str:
    return f"policy_version-{policy_version}"


def _error(error: Exception) -> wire.OpenAIError:
    status = http.status_of(error)
    kind, code = INVALID if status < 500 else "server_error", code_of(error) or CODES.get(status)
    return wire.OpenAIError(error=wire.OpenAIErrorDetails(message=str(error), type=kind, code=code))


def short(value: object) -> str:
    """Return the beginning of a value that a client has sent."""
    return repr(value)[:MAX_SHOWN]


def code_of(error: Exception) -> str | None:
    """Return OpenAI's code for an error; None if it has none."""
    return next((code for kind, code in ERROR_CODES.items() if isinstance(error, kind)), None)
