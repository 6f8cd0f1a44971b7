"""Same index, same task, whatever was asked for before; held-out problems never reach training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_tables import json_lines, parquet, reading

from penstock.config import Config, ConfigError
from penstock.data.items import PIECE_SIZE, ReasoningGym
from penstock.data.sources import MixedTasks, TaskStream, held_out_tasks, open_tasks, question
from penstock.sendable import fault_of
from penstock.types import Task

SPELL = Config.model_validate({"data": {"options": {"min_word_len": 3, "max_word_len": 3}, "eval_tasks": 50}})


def taken(source: MixedTasks, count: int) -> list[Task]:
    return [task for index in range(count) if (task := source.task(index)) is not None]


def questions(config: Config) -> list[str]:
    """Of all that is trained on, in order."""
    tasks = open_tasks(config)
    assert tasks.size is not None
    return [question(task) for task in taken(tasks, tasks.size + 5)]


def test_reasoning_gym_is_deterministic_and_what_is_held_out_differs() -> None:
    tasks = taken(open_tasks(SPELL), 20)
    assert tasks == taken(open_tasks(SPELL), 20)
    assert [task.payload["answer"] for task in tasks] != [task.payload["answer"] for task in held_out_tasks(SPELL)[:20]]
    assert {task.purpose for task in tasks} == {"train"} and held_out_tasks(SPELL)[0].purpose == "eval"
    assert {task.tag for task in tasks} == {"single_turn"}


@pytest.mark.parametrize(
    "dataset", ["acre", "gsm_symbolic", "knights_knaves", "list_functions", "pool_matrix", "word_ladder"]
)
def test_every_dataset_is_endless_repeats_itself_and_can_be_sent(dataset: str) -> None:
    items = ReasoningGym(dataset, {}, seed=3, name="train")
    drawn = {number: items.item(number) for number in (0, 1, PIECE_SIZE, 3 * PIECE_SIZE + 1)}
    assert all(fault_of(payload) is None for _, payload in drawn.values())
    assert len({str(payload) for _, payload in drawn.values()}) == len(drawn)
    assert ReasoningGym(dataset, {}, seed=3, name="train").item(3 * PIECE_SIZE + 1) == drawn[3 * PIECE_SIZE + 1]
    assert items.item(0) == drawn[0]


def test_held_out_questions_are_skipped() -> None:
    held_out = held_out_tasks(SPELL)
    stream = TaskStream(open_tasks(SPELL), held_out=held_out)
    unseen = {question(task) for task in held_out}
    drawn = stream.take(500)
    assert len(drawn) == 500 and stream.position > 500, "some three-letter words must have been held out"
    assert not any(question(task) in unseen for task in drawn)


def test_a_stream_goes_on_where_it_stopped() -> None:
    source = open_tasks(Config.model_validate({"data": {"source": "seeds"}}))
    stream = TaskStream(source)
    assert [task.index for task in stream.take(3)] == [0, 1, 2]
    resumed = TaskStream(source, position=stream.position).next()
    assert resumed is not None and resumed.index == 3 and resumed == stream.at(3)


class Few:
    """An endless source of `size` distinct tasks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def task(self, index: int) -> Task:
        return Task(task_id=str(index), tag="sums", index=index, payload={"question": f"{index % self._size}+1"})

    def first(self, count: int) -> list[Task]:
        return [self.task(index) for index in range(count)]


def test_a_source_with_few_distinct_tasks_says_how_many_are_left() -> None:
    def warnings(num_held_out: int) -> list[str]:
        found: list[str] = []
        few = Few(23)
        TaskStream(few, held_out=few.first(num_held_out), warn=found.append).take(600)
        return found

    assert warnings(11) == warnings(0) == []
    (warning,) = warnings(17)
    assert "of the first 512 tasks of sums are held out" in warning
    assert "23 distinct tasks, of which 17 are held out: the dataset is too small for data.eval_tasks" in warning
    with pytest.raises(ConfigError, match="23 distinct tasks, of which 21 are held out"):
        warnings(21)


def test_everything_held_out_is_an_error() -> None:
    class One:
        def task(self, index: int) -> Task:
            return Task(task_id="one", tag="sums", index=index, payload={"question": "1+1"})

    stream = TaskStream(One(), held_out=[One().task(0)])
    with pytest.raises(ConfigError, match="too small"):
        stream.next()


@pytest.mark.parametrize(
    ("data", "message"),
    [({"dataset": "spel_backward"}, "spel_backward"), ({"options": {"min_word_length": 3}}, "min_word_length")],
)
def test_unknown_datasets_and_options_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tasks(Config.model_validate({"data": data}))


@pytest.mark.parametrize("make", [json_lines, parquet])
def test_the_last_rows_of_a_file_are_held_out(tmp_path: Path, make: Any) -> None:
    file = make(tmp_path / f"words.{'jsonl' if make is json_lines else 'parquet'}", 5)
    config = reading(file, eval_tasks=2)
    assert questions(config) == ["q0", "q1", "q2"]
    held_out = held_out_tasks(config)
    assert [question(task) for task in held_out] == ["q3", "q4"] and held_out[1].task_id == "words/5"
    apart = reading(file, eval_path=str(make(tmp_path / f"others{file.suffix}", 2)), eval_tasks=256)
    assert len(questions(apart)) == 5 and [task.task_id for task in held_out_tasks(apart)] == ["others/1", "others/2"]
    with pytest.raises(ConfigError, match=r"has 5 rows, none of them to train on: lower data.eval_tasks"):
        open_tasks(reading(file, eval_tasks=9))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("eval_tasks", [0, 7])
def test_every_epoch_takes_every_row_once(tmp_path: Path, suffix: str, eval_tasks: int) -> None:
    make = json_lines if suffix == "jsonl" else lambda path, count: parquet(path, count, rows_per_group=30)
    config = reading(make(tmp_path / f"q.{suffix}", 100), mode="sample", epochs=2, eval_tasks=eval_tasks)
    size, found = 100 - eval_tasks, questions(config)
    first, second = found[:size], found[size:]
    assert sorted(first) == sorted(second) == sorted(f"q{number}" for number in range(size))
    assert first != second and first != sorted(first, key=lambda name: int(name[1:]))
    assert found == questions(config)
    other = config.model_copy(update={"seed": 1})
    assert questions(other) != found


def test_a_shuffled_parquet_file_is_read_a_row_group_at_a_time(tmp_path: Path) -> None:
    config = reading(parquet(tmp_path / "q.parquet", 100, rows_per_group=25), mode="sample")
    groups = [int(name[1:]) // 25 for name in questions(config)]
    runs = [group for place, group in enumerate(groups) if place == 0 or groups[place - 1] != group]
    assert sorted(runs) == [0, 1, 2, 3]


def test_without_an_end_of_epochs_rows_go_on(tmp_path: Path) -> None:
    tasks = open_tasks(reading(json_lines(tmp_path / "q.jsonl", 3), epochs=None))
    assert tasks.size is None
    assert [question(task) for task in taken(tasks, 7)] == ["q0", "q1", "q2", "q0", "q1", "q2", "q0"]


def test_a_row_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text('{"question": "a"}\n[1]\n{"answer": 3}\n')
    tasks = open_tasks(reading(file, keys=["question", "answer"]))
    with pytest.raises(ConfigError, match=r"words.jsonl, line 2: not a JSON object"):
        tasks.task(1)
    with pytest.raises(ConfigError, match=r"words.jsonl, line 1: has no answer; it has question"):
        tasks.task(0)
    with pytest.raises(ConfigError, match=r"nowhere.jsonl cannot be read"):
        open_tasks(reading(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"words.parquet cannot be read as Parquet"):
        open_tasks(reading(file.rename(tmp_path / "words.parquet")))


def test_rows_without_a_question_are_not_held_out_with_each_other(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text('{"question": null, "word": "a"}\n' * 20)
    config = reading(file, eval_tasks=5)
    stream = TaskStream(open_tasks(config), held_out=held_out_tasks(config))
    assert len(stream.take(100)) == 15


@pytest.mark.parametrize("key", ["temperature", "max_new_tokens"])
def test_a_row_with_unusable_settings_is_named(tmp_path: Path, key: str) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text(f'{{"question": "a", "{key}": 1}}\n{{"question": "b", "{key}": -1}}\n')
    tasks = open_tasks(reading(file))
    assert tasks.task(0) is not None
    with pytest.raises(ConfigError, match=rf"words.jsonl, line 2: {key} is '-1': it must be"):
        tasks.task(1)


def test_a_few_damaged_rows_are_left_out_with_a_warning(tmp_path: Path) -> None:
    file, warned = tmp_path / "words.jsonl", list[str]()
    rows = [f'{{"question": "{number}"}}' if number % 4 else "{" for number in range(48)]
    file.write_text("\n".join(rows))
    stream = TaskStream(open_tasks(reading(file)), warn=warned.append)
    assert [question(task) for task in stream.take(100)] == [str(number) for number in range(48) if number % 4]
    assert [stream.at(index) is not None for index in (1, 2, 3)] == [True] * 3
    first, tenth = warned
    assert first.startswith("left out 1 of the first 1 rows; the latest is data: ") and "words.jsonl, line 1" in first
    assert tenth.startswith("left out 10 of the first 37 rows") and "words.jsonl, line 37" in tenth


@pytest.mark.parametrize("num_bad", [3, 30])
def test_data_of_damaged_rows_alone_are_refused(tmp_path: Path, num_bad: int) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text("{\n" * num_bad)
    with pytest.raises(ConfigError, match=r"words.jsonl, line 1"):
        TaskStream(open_tasks(reading(file))).take(100)


def test_a_tag_of_damaged_rows_alone_is_refused(tmp_path: Path) -> None:
    good, bad = json_lines(tmp_path / "good.jsonl", 100), tmp_path / "bad.jsonl"
    bad.write_text("{\n" * 100)
    mixture = {name: {"data": {"source": "jsonl", "path": str(file)}} for name, file in (("good", good), ("bad", bad))}
    config = Config.model_validate({"env": {"mixture": mixture}, "data": {"eval_tasks": 0}})
    with pytest.raises(ConfigError, match=r"bad.jsonl, line 1"):
        TaskStream(open_tasks(config)).take(200)


NESTED = "[" * 1500 + "]" * 1500


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (str(10**29), "'a' has an integer of more than 64 bits"),
        ('{"b": [1, -9223372036854775809]}', "'a' has an integer of more than 64 bits"),
        (NESTED[1399:1601], "'a' has values that are nested more than 100 deep"),
        (NESTED, "nested too deeply"),
    ],
    ids=["positive", "negative", "nested", "deep"],
)
def test_a_row_that_cannot_leave_the_process_is_named(tmp_path: Path, value: str, fault: str) -> None:
    file = tmp_path / "words.jsonl"
    largest = '[18446744073709551615, -9223372036854775808, 1e300, true, null, "é"]'
    file.write_text(f'{{"question": {largest}}}\n{{"a": {value}}}\n')
    tasks = open_tasks(reading(file))
    assert tasks.task(0) is not None
    with pytest.raises(ConfigError, match=rf"words.jsonl, line 2: .*{fault}"):
        tasks.task(1)


def test_a_value_that_only_pandas_knows_is_named(tmp_path: Path) -> None:
    file = tmp_path / "times.parquet"
    times = pa.array([1, 2**62], type=pa.duration("ns"))
    pq.write_table(pa.table({"question": ["a", "b"], "took": times}), file)
    with pytest.raises(ConfigError, match=r"times.parquet, row 1: .*(cannot be sent|cannot be read)"):
        open_tasks(reading(file)).task(0)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bytes.parquet"
    pq.write_table(pa.table({"question": pa.array([b"\xff"], type=pa.binary()).view(pa.string())}), file)
    with pytest.raises(ConfigError, match=r"bytes.parquet, row 1: the row cannot be read \(UnicodeDecodeError"):
        open_tasks(reading(file)).task(0)


@pytest.mark.parametrize("row", [{"a": ["\ud800"]}, {"a": {"\udc00": 1}}])
def test_text_with_a_lone_surrogate_is_found(row: dict[str, Any]) -> None:
    assert fault_of(row) == "text with a lone surrogate"


def test_a_file_without_a_newline_at_its_end_and_one_with_windows_lines(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(b'{"question": "a"}\r\n{"question": "b"}')
    assert questions(reading(file)) == ["a", "b"]


def test_hugging_face_datasets(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list([{"question": f"q{number}"} for number in range(6)])
    dataset.save_to_disk(str(tmp_path / "one"))
    config = reading(tmp_path / "one", eval_tasks=2)
    assert questions(config) == ["q0", "q1", "q2", "q3"]
    assert [question(task) for task in held_out_tasks(config)] == ["q4", "q5"]
    splits = datasets.DatasetDict({"train": dataset, "test": dataset.select(range(2))})
    splits.save_to_disk(str(tmp_path / "splits"))
    config = reading(tmp_path / "splits", eval_split="test", eval_tasks=256)
    assert len(questions(config)) == 6 and len(held_out_tasks(config)) == 2
    with pytest.raises(ConfigError, match="has no split dev; it has train, test"):
        open_tasks(reading(tmp_path / "splits", split="dev"))
    with pytest.raises(ConfigError, match="there is no directory"):
        open_tasks(reading(tmp_path / "nowhere"))


def mixture(tmp_path: Path, **validation: Any) -> Config:
    return Config.model_validate(
        {
            "data": {"eval_tasks": 2},
            "env": {
                "mixture": {
                    "game": {"name": "guess_number", "weight": 3, "data": {"source": "seeds"}},
                    "quiz": {"data": {"source": "jsonl", "path": str(json_lines(tmp_path / "quiz.jsonl", 6))}},
                }
            },
            "validation": validation,
        }
    )


def test_a_mixture_takes_turns_by_weight_until_a_part_is_used_up(tmp_path: Path) -> None:
    tasks = taken(open_tasks(mixture(tmp_path)), 40)
    tags = [task.tag for task in tasks]
    assert all(abs(tags[:end].count("game") - 0.75 * end) <= 0.5 for end in range(16))
    assert tags.count("quiz") == 4 and tags[16:] == ["game"] * 24
    assert [task.task_id for task in tasks if task.tag == "quiz"] == [f"quiz/{line}" for line in range(1, 5)]
    assert [task.task_id for task in tasks if task.tag == "game"] == [f"seed/game/train/{n}" for n in range(36)]


def test_what_a_mixture_holds_out_is_the_same_whenever_it_is_asked_for(tmp_path: Path) -> None:
    held_out = held_out_tasks(mixture(tmp_path))
    assert [task.task_id for task in held_out] == ["seed/game/eval/0", "quiz/5", "seed/game/eval/1", "quiz/6"]
    assert held_out == held_out_tasks(mixture(tmp_path))
    assert [task.tag for task in held_out_tasks(mixture(tmp_path, tasks=1))] == ["game", "quiz"]


def test_validation_may_have_environments_and_data_of_its_own(tmp_path: Path) -> None:
    hard = {"name": "single_turn", "data": {"source": "jsonl", "path": str(json_lines(tmp_path / "hard.jsonl", 5))}}
    hard["data"] |= {"eval_path": hard["data"]["path"]}  # type: ignore[operator, index]
    held_out = held_out_tasks(mixture(tmp_path, mixture={"hard": hard}, tasks=-1))
    assert [task.task_id for task in held_out] == [f"hard/{line}" for line in range(1, 6)]
