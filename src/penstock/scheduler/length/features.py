"""Cheap features of a task's text, by one pass of substring searches and without regular expressions."""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

from penstock.types import Task

MAX_CHARS = 1024  # features read half of them from each end of a text, since instructions are at either end


class Cue(NamedTuple):
    """Words that predict the length of an answer: `factor` times the length without these words."""

    name: str
    factor: float
    english: tuple[str, ...]
    """In lower case. A leading space marks the beginning of a word."""
    chinese: tuple[str, ...]

    def occurs(self, lower: str, *, ascii_only: bool) -> bool:
        words = self.english if ascii_only else self.english + self.chinese
        return any(word in lower for word in words)


EXPLAIN = (" explain", " why ", " describe", " discuss", " compare", " analy")
CODE = (" write a program", " write a function", " implement", " algorithm", " source code", "```", " def ", " class ")
STEPS = (" step by step", " step-by-step", " show your work", " reason carefully", " think carefully")
ESSAY = (
    " essay",
    " write a story",
    " write an article",
    " write a report",
    " blog post",
    " poem",
    " write a detailed",
    " write a long",
    " imagine a story",
    " tell a story",
    " tell me a story",
    " in detail",
)
LONG_TEXTS = ("作文", "写一篇", "文章", "小说", "报告", "详细的", "写一个故事", "想象一个", "讲一个故事", "编一个故事")
FEW = (" list two", " list three", " list 2 ", " list 3 ", " name two", " name three", " two points", " three points")
SUMMARY = (" summar", " abstract", " tl;dr", " key point", " in a nutshell", " main idea")
CHOICE = (" yes or no", " true or false", " choose", " which of the following", " multiple choice", " select the")
BRIEF = (" briefly", " in one word", " one sentence", " only the ", " just the answer", " short answer", " concise")
CUES = (
    Cue("proof", 3.0, (" prove ", " proof", " derive ", " show that "), ("证明", "求证", "推导", "論證")),
    Cue("steps", 2.0, STEPS, ("一步一步", "一步步", "逐步", "详细过程", "解题过程", "思考过程")),
    Cue("explain", 1.6, EXPLAIN, ("解释", "说明", "为什么", "分析", "讨论", "阐述")),
    Cue("code", 2.0, CODE, ("写代码", "编程", "编写", "实现一个", "程序", "算法", "函数实现")),
    Cue("essay", 3.0, ESSAY, LONG_TEXTS),
    Cue("list", 1.3, (" list all", " list the", " enumerate", " for each"), ("列出", "列举", "枚举")),
    Cue("few", 0.5, FEW, ("列出三", "列出两", "列出3", "列出2", "列举三", "列举两", "三点", "两点", "三条", "两条")),
    Cue("summary", 0.5, SUMMARY, ("总结", "摘要", "概括", "归纳", "要点", "大意", "简述")),
    Cue("choice", 0.4, CHOICE, ("是否", "选择", "判断", "对还是错", "下列哪")),
    Cue("brief", 0.4, BRIEF, ("简要", "简短", "一句话", "只回答", "仅输出", "直接给出", "简答")),
    Cue("translate", 0.5, (" translate", " translation"), ("翻译", "译成", "译为")),
)


class Features(NamedTuple):
    """Counts over the excerpt of a text. Only `num_chars` is over the full text."""

    num_chars: int
    num_wide: int
    """Approximate number of characters with three or more bytes in UTF-8: Chinese, Japanese, Korean."""
    num_digits: int
    num_lines: int
    num_questions: int
    num_operators: int
    num_code_marks: int
    cues: tuple[bool, ...]
    """Whether any word of each cue occurs."""

    @property
    def prompt_tokens(self) -> float:
        """Return the approximate tokens of the text: one per wide character, and one per four other characters."""
        seen = min(self.num_chars, MAX_CHARS)
        scale = self.num_chars / seen if seen else 1.0
        return scale * (self.num_wide + (seen - self.num_wide) / 4)

    @property
    def numbers(self) -> list[float]:
        """Return the inputs of a linear model: sizes as logarithms, and shares."""
        seen = max(1, min(self.num_chars, MAX_CHARS))
        counts = (self.num_digits, self.num_lines, self.num_questions, self.num_operators, self.num_code_marks)
        return [
            math.log1p(self.num_chars),
            self.num_wide / seen,
            self.num_digits / seen,
            self.num_operators / seen,
            *(math.log1p(count) for count in counts),
            *map(float, self.cues),
        ]


def text_of(task: Task) -> str:
    """Return the text of a task that predicts its answer length: its question, else all its texts, else its id. A text
    is a string or a chat, `[{role, content}, ...]`."""
    question = _text(task.payload.get("question"))
    return question or "\n".join(filter(None, map(_text, task.payload.values()))) or task.task_id


def _text(value: object) -> str:
    """Return a string, or the contents of a chat and of its parts; empty for other values."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    parts = [each.get("content", each.get("text")) for each in value if isinstance(each, dict)]
    return "\n".join(filter(None, map(_text, parts)))


def digest(text: str) -> bytes:
    """Return a digest that identifies a text. Two texts share a digest with probability 2**-128."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def excerpt(text: str) -> str:
    """Return the part of a text that features read: at most `MAX_CHARS` characters."""
    if len(text) <= MAX_CHARS:
        return text
    return text[: MAX_CHARS // 2] + text[-(MAX_CHARS // 2) :]


def features(text: str) -> Features:
    seen = excerpt(text)
    ascii_only = seen.isascii()
    encoded = seen.encode("utf-8", "surrogatepass")
    lower = f" {seen.lower()} ".replace("\n", " ")
    return Features(
        num_chars=len(text),
        num_wide=(len(encoded) - len(seen)) // 2,
        num_digits=_count(encoded, b"0123456789"),
        num_lines=seen.count("\n"),
        num_questions=seen.count("?") + seen.count("？"),
        num_operators=_count(encoded, b"+-*/=^\\<>"),
        num_code_marks=_count(encoded, b"`{}[];_"),
        cues=tuple(cue.occurs(lower, ascii_only=ascii_only) for cue in CUES),
    )


def _count(encoded: bytes, marks: bytes) -> int:
    return len(encoded) - len(encoded.translate(None, marks))
