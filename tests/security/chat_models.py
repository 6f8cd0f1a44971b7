"""Model directories with the tokenizers and chat templates of well-known models, in short."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from penstock.model.chat import ChatTokenizer

CORPUS = [
    "user assistant system tool The answer of the tool is: <b>4</b> [1, 2] if a < b and b > c | d: return x_y",
    "im_start im_end start header id end_of_turn begin of sentence think tool_call INST User Assistant\n\n eot",
    "".join(map(chr, range(0x20, 0x7F))),
    " ".join(map(chr, range(0x20, 0x7F))),
] * 4


@dataclass(frozen=True)
class Style:
    """A family of models."""

    special: tuple[str, ...]
    """Tokens marked as special."""
    plain: tuple[str, ...]
    """Control tokens that are not."""
    bos: str
    eos: str
    template: str
    kind: str = "bytes"
    """How text is split: bytes, spaces (SentencePiece in BPE), unigram, or folded (normalised, lower case)."""
    ordinary: tuple[str, ...] = ()
    """Added tokens that are vocabulary."""


CHATML = """
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '</tools> Answer with <tool_call></tool_call>.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
  {%- set content = message.content if message.content is string else '' %}
  {%- if message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
  {%- elif message.role == 'assistant' %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
    {{- '<|im_start|>assistant\\n' + content }}
    {%- for call in message.tool_calls %}
      {%- set function = call.function %}
      {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' + function.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
  {%- if loop.first and tools %}{{- 'Tools: ' + tools | tojson(indent=4) + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
  {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
  {%- else %}
    {%- if loop.last and tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
    {{- '[INST] ' + message.content + ' [/INST]' }}
  {%- endif %}
{%- endfor %}
"""

GEMMA = """
{{- bos_token }}
{%- for message in messages %}
  {%- set role = 'model' if message.role == 'assistant' else message.role %}
  {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
  {%- if loop.first and tools %}{{- tools | tojson + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

DEEPSEEK = """
{{- bos_token }}
{%- for tool in tools or [] %}
  {{- '<｜tool▁begin｜>' + tool.function.name + ': ' + tool.function.description }}
{%- endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set content = message.content.split('</think>')[-1] %}
    {{- '<｜Assistant｜>' + content + eos_token }}
  {%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
  {%- elif message.role == 'system' %}{{- message.content }}
  {%- else %}{{- '<｜User｜>' + message.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""

BARS = """
{%- for message in messages %}
  {{- '<|' + message.role + '|>' + ('<' + message.name + '>' if message.name else '') + message.content + '<|end|>' }}
  {%- if loop.first %}
    {%- for tool in tools or [] %}{{- '<' + tool.function.name + '>' + tool | tojson }}{%- endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""The control tokens are joined from parts: `Phi` and others."""

STYLES = {
    "chatml": Style(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|fim_prefix|>"),
        "",
        "<|im_end|>",
        CHATML,
    ),
    "llama3": Style(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        (),
        "<|begin_of_text|>",
        "<|eot_id|>",
        LLAMA3,
    ),
    "mistral": Style(
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
        (),
        "<s>",
        "</s>",
        MISTRAL,
        kind="spaces",
    ),
    "gemma": Style(
        ("<bos>", "<eos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        ("<unused_0>",),
        "<bos>",
        "<end_of_turn>",
        GEMMA,
        kind="spaces",
        ordinary=("\n\n", "<td>", "</td>"),
    ),
    "unigram": Style(
        ("<unk>", "<bos>", "<start_of_turn>", "<end_of_turn>"), (), "<bos>", "<end_of_turn>", GEMMA, kind="unigram"
    ),
    "deepseek": Style(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁begin｜>"),
        ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        DEEPSEEK,
    ),
    "bars": Style(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
        ("<|think|>", "<think_now>"),
        "",
        "<|end|>",
        BARS,
    ),
    "folded": Style(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"), (), "", "<|end|>", BARS, "folded"
    ),
}


def write_model(directory: Path, style: Style) -> ChatTokenizer:
    """Write the tokenizer and the template of a style into `directory`, and load them."""
    tokenizer = _trained(style)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=style.kind == "folded", special=True) for token in style.special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in (*style.plain, *style.ordinary)])
    directory.mkdir(parents=True, exist_ok=True)
    config = {"chat_template": style.template, "eos_token": style.eos, "bos_token": style.bos}
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(style.eos)}))
    return ChatTokenizer.load(directory)


def _trained(style: Style) -> Tokenizer:
    own = list(style.special) if style.kind in ("spaces", "unigram") else []  # SentencePiece has them in its vocabulary
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if style.kind == "unigram":
        tokenizer = Tokenizer(Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        trainer = UnigramTrainer(vocab_size=300, special_tokens=own, unk_token="<unk>", show_progress=False)
    elif style.kind == "spaces":
        tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=False, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = BpeTrainer(vocab_size=400, special_tokens=own, show_progress=False)
    else:
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if style.kind == "folded":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.NFKC(), normalizers.Replace("\u200b", ""), normalizers.Lowercase()]
            )
        trainer = BpeTrainer(vocab_size=500, special_tokens=own, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.ByteLevel() if style.kind in ("bytes", "folded") else decoders.Metaspace()
    return tokenizer
