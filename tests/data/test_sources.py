"""Same index, same task; held-out problems never reach training."""

from pathlib import Path

import pytest

from penstock.config import ConfigError, DataConfig
from penstock.data.sources import TaskStream, open_source, question
from penstock.types import Task

SPELL = DataConfig(options={"min_word_len": 3, "max_word_len": 3})


def test_reasoning_gym_is_deterministic_and_tags_differ() -> None:
    first, again = (open_source(SPELL, seed=3, tag="train") for _ in range(2))
    other = open_source(SPELL, seed=3, tag="eval")
    tasks = [first.task(i) for i in range(20)]
    assert tasks == [again.task(i) for i in range(20)]
    assert [t.payload["answer"] for t in tasks if t] != [other.task(i).payload["answer"] for i in range(20)]  # type: ignore[union-attr]


def test_held_out_questions_are_skipped() -> None:
    held_out = [task for i in range(50) if (task := open_source(SPELL, seed=0, tag="eval").task(i))]
    stream = TaskStream(open_source(SPELL, seed=0, tag="train"), held_out=held_out)
    questions = {question(task) for task in held_out}
    drawn = [stream.next() for _ in range(500)]
    assert stream.position > 500, "some three-letter words must have been held out"
    assert not any(question(task) in questions for task in drawn if task)


def test_a_stream_goes_on_where_it_stopped() -> None:
    source = open_source(DataConfig(source="seeds"), seed=0, tag="train")
    stream = TaskStream(source)
    first = [stream.next() for _ in range(3)]
    resumed = TaskStream(source, position=stream.position).next()
    assert [t.index for t in first if t] == [0, 1, 2]
    assert resumed is not None and resumed.index == 3


def test_everything_held_out_is_an_error() -> None:
    class One:
        def task(self, index: int) -> Task:
            return Task(task_id="one", tag="train", index=index, payload={"question": "1+1"})

    stream = TaskStream(One(), held_out=[One().task(0)])
    with pytest.raises(ConfigError, match="too small"):
        stream.next()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(dataset="spel_backward"), "spel_backward"),
        (DataConfig(options={"min_word_length": 3}), "min_word_length"),
    ],
)
def test_unknown_datasets_and_options_are_named(data: DataConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(data, seed=0, tag="train")


def test_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text("".join(f'{{"question": "q{i}", "answer": "{i}"}}\n' for i in range(5)))
    config = DataConfig(source="jsonl", path=str(file), eval_tasks=2)
    train, held_out = (open_source(config, seed=0, tag=tag) for tag in ("train", "eval"))
    questions = [[question(task) for i in range(9) if (task := source.task(i))] for source in (train, held_out)]
    assert questions == [["q0", "q1", "q2"], ["q3", "q4"]]
    last = held_out.task(1)
    assert last is not None and last.task_id == "words/5"
    elsewhere = DataConfig(source="jsonl", path=str(file), eval_path=str(file))
    assert open_source(elsewhere, seed=0, tag="train").task(4) is not None


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text('{"question": "a"}\n[1]\n')
    source = open_source(DataConfig(source="jsonl", path=str(file), eval_tasks=0), seed=0, tag="train")
    with pytest.raises(ConfigError, match=r"words.jsonl, line 2: not a JSON object"):
        source.task(1)
    with pytest.raises(ConfigError, match=r"nowhere.jsonl cannot be read"):
        open_source(DataConfig(source="jsonl", path="nowhere.jsonl"), seed=0, tag="train")
