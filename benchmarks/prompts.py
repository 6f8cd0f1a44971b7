"""Prompts such as training sets have (arithmetic, algebra, proofs, code, chat; English and Chinese), and answer lengths
that depend on what is asked and on its size, with noise between samples of the same prompt."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from penstock.types import Task

NOISE = 0.25  # standard deviation of log length between answers to one prompt


class Kind(NamedTuple):
    """A template, and the median length of its answers at size 1; they grow with size ** growth."""

    template: str
    tokens: float
    growth: float


KINDS = (
    Kind("Compute {sum}.", 40, 1.2),
    Kind("What is {a} * {b}? Give only the answer.", 15, 1.0),
    Kind("{name} buys {n} {thing}s for {a} cents each and sells {m} of them to {other} at {b} cents. {story} How much "
         "money does {name} have left, in cents? Think step by step.", 130, 0.7),
    Kind("Solve for x: {a}x^2 + {b}x - {c} = 0. Show your work.", 220, 0.2),
    Kind("Let n be a positive integer with {a} < n < {big}. Prove that n^{n} - n is divisible by {m}. {story}",
         700, 0.4),
    Kind("A {shape} has sides {a}, {b} and {c}. Is its area an integer? Answer yes or no.", 12, 0.2),
    Kind("Find the number of ways to place {n} {thing}s into {m} boxes so that no box holds more than {a}. {story}",
         420, 0.6),
    Kind("Write a function `{func}(values, {m})` in {language} that returns the {n} largest {thing}s. {constraints}",
         180, 0.8),
    Kind("Implement a {structure} in {language} with insert, delete and range queries. {constraints}", 650, 0.5),
    Kind("What does this program print?\n```python\ndef {func}(n):\n    return n * {a} + {b}\nprint({func}({c}))\n```",
         60, 0.1),
    Kind("Translate into {tongue}: \"{name} gave {n} {thing}s to {other} yesterday.\" {story}", 25, 0.9),
    Kind("Explain {topic} to a {person}. {story}", 320, 0.3),
    Kind("Write an essay about {topic} in {era}. Mention {name} and at least {n} {thing}s.", 900, 0.2),
    Kind("{name} asks {other}: what is the capital of {country}?", 10, 0.1),
    Kind("计算 {sum} 的值，只回答数字。", 14, 0.8),
    Kind("证明：对任意正整数 n，n 的 {m} 次方加 {a} 不能被 {b} 整除。请一步一步推导。", 620, 0.3),
    Kind("小明有 {a} 个苹果，给了小红 {b} 个，又买了 {n} 箱，每箱 {m} 个。现在他有多少个苹果？", 110, 0.5),
    Kind("用 {language} 编写一个函数，找出列表中第 {n} 大的数。{constraints}", 240, 0.5),
)  # fmt: skip

WORDS = {
    "name": ("Ada", "Boris", "Chen", "Dalia", "Emre", "Farah", "Goran", "Hana"),
    "other": ("Ivan", "Jun", "Kofi", "Lena", "Mara", "Nils", "Olu", "Priya"),
    "thing": ("apple", "marble", "ticket", "pencil", "coin", "lamp", "stamp", "card", "brick", "book"),
    "shape": ("triangle", "quadrilateral", "prism"),
    "func": ("solve", "top_k", "count_paths", "merge", "score", "fold"),
    "language": ("Python", "Rust", "C++", "Java", "Go"),
    "structure": ("segment tree", "red-black tree", "skip list", "trie", "B-tree"),
    "tongue": ("French", "German", "Spanish", "Japanese"),
    "topic": ("photosynthesis", "inflation", "tides", "entropy", "the printing press", "vaccines", "black holes"),
    "person": ("child", "lawyer", "new colleague", "physicist"),
    "era": ("antiquity", "the Middle Ages", "the 19th century", "our time"),
    "country": ("Peru", "Mongolia", "Kenya", "Norway", "Laos"),
}
STORY = ("It rained all day.", "Nobody else was there.", "The shop closes at six.", "Assume nothing else changes.",
         "Note that the order matters.", "Every value is an integer.", "Ignore rounding.")  # fmt: skip
CONSTRAINTS = ("Use no library.", "It must run in O(n log n).", "Handle empty input.", "Add type annotations.",
               "Values may repeat.", "Return -1 if there is none.")  # fmt: skip


def make_task(index: int, *, seed: int = 0) -> tuple[Task, float]:
    """A prompt and the median length of its answers."""
    draw = random.Random(f"{seed}/{index}")
    kind = draw.choice(KINDS)
    size = draw.randint(1, 8)
    words = {key: draw.choice(choices) for key, choices in WORDS.items()}
    numbers = {key: draw.randint(2, 10 ** (1 + size // 3)) for key in ("a", "b", "c")}
    question = kind.template.format(
        sum=" + ".join(str(draw.randint(2, 999)) for _ in range(1 + size)),
        n=size + 1,
        m=draw.randint(2, 9),
        big=draw.randint(1000, 9999),
        story=" ".join(draw.choices(STORY, k=size)),
        constraints=" ".join(draw.choices(CONSTRAINTS, k=size)),
        **words,
        **numbers,
    )
    task = Task(task_id=f"prompt/{index}", tag="prompt", index=index, payload={"question": question})
    return task, kind.tokens * size**kind.growth


def draw_lengths(median: float, group_size: int, draw: random.Random, *, cap: int) -> list[int]:
    """Lengths of one group's answers."""
    return [min(cap, max(1, round(median * math.exp(draw.gauss(0, NOISE))))) for _ in range(group_size)]
