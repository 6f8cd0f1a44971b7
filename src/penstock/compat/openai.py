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
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from penstock.compat import openai_wire as wire
from penstock.compat.openai_errors import NoSuchModel, error_reply, refuse
from penstock.compat.openai_formats import (
    ChatFormat,
    ChatTemplate,
    CompletionFormat,
    Delta,
    fingerprint,
    provenance,
    usage,
)
from penstock.compat.openai_requests import generate_body, message_of, must_call, offered, refuse_if
from penstock.deadline import Stalled
from penstock.rollout import bodies, convert, http
from penstock.rollout.convert import Answer, PromptRequest
from penstock.rollout.generation import Answers
from penstock.rollout.generator import Generator
from penstock.rollout.prompt_text import PromptText
from penstock.rollout.request import MAX_TOKEN, ContextExceeded


class Prompt(Protocol):
    """A function that returns the tokens of a conversation."""

    def __call__(self, messages: Sequence[dict[str, Any]], **settings: Any) -> list[int]: ...


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
        generate = generate_body(body, max_tokens, top=body.logprobs, wanted=body.logprobs is not None)
        refuse_if(
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
        ids, tool = body.prompt_token_ids, must_call(body)
        begun = "" if tool is None else self._tokenizer.answers.beginning(tool)
        calls = bodies.asks(body.function_call) and body.function_call not in ("auto", "none")
        continues = body.continue_final_message or not body.add_generation_prompt
        refuse_if(
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
        generate = generate_body(body, max_tokens, top=body.top_logprobs, wanted=bool(body.logprobs))
        generate.input_ids = list(ids)
        return generate, ChatFormat(
            self._tokenizer,
            offered(body),
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

    async def follow(self, prompts: Sequence[PromptRequest], form: ChatFormat) -> AsyncIterator[Delta]:
        """Yield what is new in the only sample of a chat, as long as it grows."""
        async for sample in self._answers.follow(prompts):
            if (delta := form.delta(sample)) is not None:
                yield Delta(sample, delta)

    async def requests_of(self, generate: bodies.GenerateBody, form: CompletionFormat) -> Sequence[PromptRequest]:
        """Return the requests for the engine. Raises ValueError or `Refused` if one cannot be served."""
        prompts = convert.read_requests(await self._text.tokenised(generate), self._tokenizer, echoes=form.echoes)
        self._answers.check(prompts)
        return prompts

    async def give(self, request: Request, prompts: Sequence[PromptRequest]) -> list[Answer]:
        """Return the answers. Generation ends if the client leaves."""
        return await http.unless_disconnected(request.receive, self._answers.give(prompts))

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a prompt or of a conversation."""
        body = await http.read_body(request, wire.TokenizeBody)
        continues = body.continue_final_message or not body.add_generation_prompt
        refuse_if(
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
        if tools := offered(body):
            settings = settings | {"tools": tools}
        if (tool := must_call(body)) is not None:
            settings = settings | {"must_call": tool}

        def render() -> list[int]:
            return prompt([message_of(each) for each in body.messages], **settings)

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
            return http.EventStream(self._stream(prompts, head, form, with_usage=with_usage))
        answers = await self.give(request, prompts)
        pairs = [(each, segment) for each in answers for segment in each.segments]
        choices = [form.choice(index, *pair) for index, pair in enumerate(pairs)]
        reply = head | {"object": form.kind, "choices": choices, "usage": usage(answers)}
        if len(prompts) == 1 and body.return_token_ids is not False:
            reply["prompt_token_ids"] = prompts[0].prompt_ids  # where vLLM has them
        response = http.answer(reply | provenance([segment for _, segment in pairs], answers[-1].scores))
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
                    head["system_fingerprint"] = fingerprint(sample.spans[-1].policy_version)
                if (delta := form.delta(sample)) is not None:
                    yield http.event(head | {"choices": [delta]})
                if sample.answer is not None:
                    answers.append(sample.answer)
            if with_usage:
                yield http.event(head | {"choices": [], "usage": usage(answers)})
        except http.EXPECTED as error:
            yield http.event(error_reply(error))
        yield http.LAST_EVENT

    def _model(self) -> wire.Model:
        name, max_context = self._model_name, self._generator.max_context
        return wire.Model(id=name, created=self._started, root=name, max_model_len=max_context)
