"""Games for agents of any framework: a question, tools, and what an answer is worth."""

from __future__ import annotations

import argparse
import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from penstock.envs.guess_number import GuessNumber
from penstock.ports.environment import Endpoint
from penstock.types import Task

Tool = Callable[..., str]
CITIES = ("Lisbon", "Oslo", "Quito", "Perth", "Kyoto", "Tunis")
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")


class NumberGame(GuessNumber):
    """Find a number with higher/lower hints."""

    def __init__(self, seed: int) -> None:
        super().__init__(Task(task_id="game", tag="game", index=0))
        limits, _ = self.reset(seed)
        self.question = f"Find my number in {limits} with the tool `guess`, at most four times."
        self._earned, self._is_over = 0.0, False

    @property
    def tools(self) -> list[Tool]:
        def guess(number: int) -> str:
            """Guess the number.

            Args:
                number: The guess.
            """
            if self._is_over:
                return "the game is over"
            hint, reward, self._is_over, *_ = self.step(str(number))
            self._earned += reward
            return hint

        return [guess]

    def score(self, answer: str) -> float:
        """Return 1 if the number was found, whatever the answer says."""
        return self._earned


class Retrieval:
    """Find a fact in a few documents."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        homes = dict(zip(NAMES, rng.sample(CITIES, len(NAMES)), strict=True))
        name = rng.choice(NAMES)
        self._documents = [f"{each} lives in {city}." for each, city in homes.items()]
        self._city = homes[name]
        self.question = f"Where does {name} live? Look it up with the tool `search`."

    @property
    def tools(self) -> list[Tool]:
        def search(words: str) -> str:
            """Search the documents.

            Args:
                words: Words that a document should contain.
            """
            wanted = words.lower().split()
            found = [text for text in self._documents if any(word in text.lower() for word in wanted)]
            return "\n".join(found[:2]) or "nothing found"

        return [search]

    def score(self, answer: str) -> float:
        """Return 1 if the answer names the city, and no other one."""
        return float([city for city in CITIES if city in answer] == [self._city])


GAMES: dict[str, Any] = {"number": NumberGame, "retrieval": Retrieval}


class Player(ABC):
    """An environment in which an agent plays one of the games."""

    def __init__(self, task: Task, *, game: str = "number") -> None:
        self._game = GAMES[game]

    async def play(self, llm: Endpoint, seed: int) -> float:
        game = self._game(seed)
        return float(game.score(await self.answer(llm, game.question, game.tools)))

    @abstractmethod
    async def answer(self, llm: Endpoint, question: str, tools: list[Tool]) -> str:
        """Return the agent's last words; empty if it gives up."""


def main(kind: type[Player]) -> None:
    """Let an agent play with a server: `penstock serve --model DIRECTORY --port 8000`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--game", choices=GAMES, default="number")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    player = kind(Task(task_id="game", tag="game", index=0), game=options.game)
    llm = Endpoint(base_url=options.url, api_key="unused", model="default")
    print("reward", asyncio.run(player.play(llm, options.seed)))
