"""The tiny policy: a generated model directory with the Qwen3 architecture and without weights.

The tokenizer covers printable ASCII and the newline, with one token per character, and round-trips them exactly. The
directory has the standard Hugging Face layout, so that all other code treats it like a downloaded model. This module
does not import transformers: the start of a run must not wait for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from penstock.config.run_settings import TinyModelConfig

PAD, UNKNOWN, USER, ASSISTANT, END = "<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, UNKNOWN, USER, ASSISTANT, END)
ALPHABET = ("\n", *map(chr, range(0x20, 0x7F)))

CHAT_TEMPLATE = (
    "{%- if tools -%}"
    f"{{{{- '{USER}tools:' -}}}}"
    "{%- for tool in tools -%}"
    "{{- ' ' + tool['function']['name'] + '(' -}}"
    "{%- for key in tool['function'].get('parameters', {}).get('properties', {}) -%}"
    "{{- ('' if loop.first else ', ') + key -}}"
    "{%- endfor -%}"
    "{{- ')' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    f"{{{{- '{ASSISTANT}' + message['content'] -}}}}"
    "{%- for call in message.get('tool_calls', []) -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' -}}"
    "{{- call['function']['arguments'] | tojson -}}"
    "{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    f"{{{{- '{END}' -}}}}"
    "{%- elif message['role'] == 'tool' -%}"
    f"{{{{- '{USER}<tool_response>' + message['content'] + '</tool_response>' -}}}}"
    "{%- else -%}"
    f"{{{{- '{USER}' + message['content'] -}}}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
)
"""A user message has no closing token: the assistant's opening token ends it. This keeps prompts short. Of tools only
the names and those of their parameters are shown. Calls have the form of Hermes and Qwen."""


def write_tiny_model(directory: Path, config: TinyModelConfig, max_context: int) -> None:
    """Write configuration, tokenizer and chat template of the tiny policy into `directory`."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": _architecture(config, vocabulary, max_context),
        "generation_config.json": {
            "eos_token_id": vocabulary[END],
            "pad_token_id": vocabulary[PAD],
            "do_sample": True,
            "temperature": 1.0,
        },
        "tokenizer.json": json.loads(_tokenizer(vocabulary).to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "eos_token": END,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_context,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _architecture(config: TinyModelConfig, vocabulary: dict[str, int], max_context: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(vocabulary),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "pad_token_id": vocabulary[PAD],
        "eos_token_id": vocabulary[END],
    }


def _tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    """Return byte-pair encoding without merges, which gives one token per character."""
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer
