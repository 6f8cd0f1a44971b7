"""The tiny policy: a Qwen3-architecture model directory without weights, made on the spot.

The tokenizer knows printable ASCII and the newline, one token per character, and round-trips it exactly. Everything
in the directory is the standard Hugging Face layout, so that nothing downstream knows it is not a downloaded model.
Written with the standard library alone: starting a run must not wait for an import of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.config.schema import TinyModelConfig

PAD, UNKNOWN, USER, ASSISTANT, END = "<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, UNKNOWN, USER, ASSISTANT, END)
ALPHABET = ("\n", *map(chr, range(0x20, 0x7F)))

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    f"{{{{- '{ASSISTANT}' + message['content'] + '{END}' -}}}}"
    "{%- else -%}"
    f"{{{{- '{USER}' + message['content'] -}}}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
)
"""A user message needs no closing token: the assistant's opening one ends it. Short prompts are the point."""


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
        "tokenizer.json": _tokenizer(vocabulary),
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
        "hidden_act": "silu",
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": vocabulary[PAD],
        "bos_token_id": None,
        "eos_token_id": vocabulary[END],
    }


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, Any]:
    """The `tokenizers` file format: byte-pair encoding without merges is one token per character."""
    added = [
        {
            "id": vocabulary[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
