"""What each length predictor learns, forgets and refuses."""

import importlib.util
import math
import random
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from penstock.config import Config, ConfigError, LengthConfig
from penstock.scheduler.decoding import DecodingLimits
from penstock.scheduler.length import embedding, neighbours
from penstock.scheduler.length.classifier import ClassifierPredictor, Fit
from penstock.scheduler.length.features import CUES, MAX_CHARS, features, text_of
from penstock.scheduler.length.history import HistoryPredictor
from penstock.scheduler.length.neighbours import Neighbours
from penstock.scheduler.length.predictor import LengthPredictor
from penstock.scheduler.length.trust import kendall_tau
from penstock.scheduler.length_prediction import length_predictor
from penstock.types import Purpose, Task

CAP = 2000


def task_of(text: str, index: int = 0) -> Task:
    return Task(task_id=f"t{index}", tag="play", index=index, payload={"question": text})


def predictor_of(name: str, **settings: object) -> LengthPredictor:
    config = LengthConfig.model_validate({"predictor": name, **settings})
    return length_predictor(config, limit=lambda task: CAP, temperature=lambda task: 1.0)


def history_of(**settings: object) -> HistoryPredictor:
    predictor = predictor_of("history", **settings)
    assert isinstance(predictor, HistoryPredictor)
    return predictor


def draw_task(draw: random.Random, index: int) -> tuple[Task, int]:
    """A task whose answers are as long as what it asks for is big."""
    kind, tokens = draw.choice([("Prove that {} is prime.", 600), ("Compute {}.", 60), ("是否有 {} 个苹果？", 10)])
    size = draw.randint(1, 6)
    numbers = " + ".join(str(draw.randint(10, 99)) for _ in range(size))
    return task_of(kind.format(numbers), index), tokens * size


def test_the_text_of_a_task() -> None:
    payload = {"answer": "4", "hint": "two twos", "level": 3}
    assert text_of(Task(task_id="x", tag="train", index=0, payload={"question": "2+2?", **payload})) == "2+2?"
    assert text_of(Task(task_id="x", tag="train", index=0, payload=payload)) == "4\ntwo twos"
    assert text_of(Task(task_id="x", tag="train", index=0, payload={"question": "", "level": 3})) == "x"


@pytest.mark.parametrize(
    ("text", "cue"),
    [
        ("Please prove that 2 is prime", "proof"),
        ("求证：二是素数", "proof"),
        ("Think STEP BY STEP.", "steps"),
        ("请一步一步思考", "steps"),
        ("Explain tides", "explain"),
        ("请解释潮汐", "explain"),
        ("Now\nwrite a program", "code"),
        ("请写代码", "code"),
        ("Write me an essay", "essay"),
        ("Is it? Yes or no", "choice"),
        ("这是否正确", "choice"),
        ("Translate this", "translate"),
        ("翻译成英文", "translate"),
        ("请总结这篇报道", "summary"),
        ("写一段摘要", "summary"),
        ("Summarize the talk", "summary"),
        ("写一个详细的故事", "essay"),
        ("想象一个故事", "essay"),
        ("Imagine a story about a fox", "essay"),
        ("列出三点", "few"),
        ("List three reasons", "few"),
    ],
)
def test_cues_in_both_languages(text: str, cue: str) -> None:
    assert features(text).cues[[each.name for each in CUES].index(cue)]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("总结这个故事", "写一个详细的故事"),
        ("写一段摘要", "想象一个故事"),
        ("列出三点", "列出所有的理由"),
        ("列出三点", "说点什么"),
    ],
)
def test_keywords_rank_what_they_ask_for(short: str, long: str) -> None:
    brief, lengthy = predictor_of("heuristic").predict([task_of(short), task_of(long)])
    assert brief < lengthy


def test_the_text_of_a_chat() -> None:
    chat = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    for payload in ({"question": chat}, {"prompt": chat, "level": 3}):
        assert text_of(Task(task_id="x", tag="train", index=0, payload=payload)) == "Be terse.\n2+2?"
    assert text_of(Task(task_id="x", tag="train", index=0, payload={"question": [1, {"content": 2}]})) == "x"


def of_tag(tag: str, index: int) -> Task:
    payload = {"question": [{"role": "user", "content": f"Solve problem {index % 7}."}]}
    return Task(task_id=f"{tag}{index}", tag=tag, index=index, payload=payload)


@pytest.mark.parametrize("name", ["heuristic", "classifier", "history"])
def test_each_tag_has_its_own_limit_and_its_own_lengths(name: str) -> None:
    config = LengthConfig.model_validate({"predictor": name, "refit_every": 64})
    limits = {"brief": 8, "long": 2048}
    predictor = length_predictor(config, limit=lambda task: limits[task.tag], temperature=lambda task: 1.0)
    brief, long = predictor.predict([of_tag("brief", 0), of_tag("long", 0)])
    assert brief <= 8 < long
    draw = random.Random(0)
    tasks = [of_tag(draw.choice(["brief", "long"]), index) for index in range(200)]
    predicted: dict[str, list[float]] = {"brief": [], "long": []}
    for task in tasks:
        length = round(draw.lognormvariate(math.log(400 if task.tag == "long" else 5), 0.5))
        predicted[task.tag] += predictor.predict([task])
        predictor.observe(task, [min(length, limits[task.tag])])
        if fit := predictor.due():
            predictor.adopt(fit())
    assert max(predicted["brief"]) < min(predicted["long"])


def test_a_row_may_lower_the_limit_of_its_task() -> None:
    config = Config.model_validate({"env": {"max_new_tokens": 64, "max_turns": 2}})
    limits = DecodingLimits(config)

    def most(limit: object) -> int:
        payload = {"question": "2+2?", "max_new_tokens": limit}
        task = Task(task_id="row 7", tag="train", index=0, payload=payload)
        assert limits.of(task)[1].max_new_tokens == limits.of(task)[0].max_new_tokens
        return limits.max_episode_tokens(task)

    assert [most(limit) for limit in (None, 8, 64, 1000)] == [128, 16, 128, 128]
    for nonsense in (0, -1, 2.5, "many", True):
        with pytest.raises(ValueError, match=r"max_new_tokens is .* whole number above zero"):
            most(nonsense)


def test_a_row_may_have_its_own_temperature_in_training() -> None:
    limits = DecodingLimits(Config.model_validate({"env": {"temperature": 0.7, "eval_temperature": 0.0}}))

    def temperature(own: object, purpose: Purpose = "train") -> float:
        payload = {"question": "2+2?", "temperature": own}
        return limits.temperature(Task(task_id="row 7", tag="train", index=0, purpose=purpose, payload=payload))

    assert [temperature(own) for own in (None, 1, 0.001, 2.0)] == [0.7, 1.0, 0.001, 2.0]
    assert temperature(1.3, "eval") == 0.0
    for nonsense in (0, -1, 25.3, math.nan, "hot", True):
        with pytest.raises(ValueError, match=r"temperature is .* a number from 0.001 to 2"):
            temperature(nonsense)


def test_features_count() -> None:
    found = features("improve 12+3?\n苹果 `x`")
    assert (found.num_chars, found.num_wide, found.num_digits, found.num_lines) == (20, 2, 3, 1)
    assert (found.num_questions, found.num_operators, found.num_code_marks) == (1, 1, 2)
    assert not any(found.cues)
    assert features("苹果" * MAX_CHARS).prompt_tokens == 2 * MAX_CHARS
    assert all(map(math.isfinite, features("").numbers))


def test_heuristic_ranks_by_cue_and_stays_under_the_cap() -> None:
    predictor = predictor_of("heuristic")
    short, plain, long = predictor.predict(
        [task_of("Is 7 odd? Yes or no."), task_of("Is 7 odd? Hm."), task_of("Prove that 7 is odd, step by step.")]
    )
    assert short < plain < long
    for _ in range(3):
        predictor.observe(task_of("Prove it"), [10**6])
    assert predictor.predict([task_of("Prove that")]) == [CAP]


def test_heuristic_learns_the_magnitude() -> None:
    predictor = predictor_of("heuristic")
    for _ in range(200):
        predictor.observe(task_of("Compute 2 + 2."), [7, 9])
    assert predictor.predict([task_of("Compute 2 + 2.")])[0] == pytest.approx(8, rel=0.1)


def test_classifier_learns_and_starts_as_the_heuristic() -> None:
    draw = random.Random(0)
    predictor, heuristic = predictor_of("classifier", refit_every=64), predictor_of("heuristic")
    tasks = [draw_task(draw, index) for index in range(160)]
    for task, length in tasks[:63]:
        assert predictor.predict([task]) == heuristic.predict([task])
        for each in (predictor, heuristic):
            each.observe(task, [length])
        assert predictor.due() is None
    predictor.observe(tasks[63][0], [tasks[63][1]])
    fit = predictor.due()
    assert fit is not None and predictor.due() is None
    before = predictor.predict([tasks[70][0]])
    fitted = fit()
    assert predictor.predict([tasks[70][0]]) == before  # a fit changes nothing until it is adopted
    predictor.adopt(fitted)
    held_out = tasks[64:]
    predicted = predictor.predict([task for task, _ in held_out])
    assert kendall_tau([(p, float(length)) for p, (_, length) in zip(predicted, held_out, strict=True)]) > 0.6
    assert min(predicted) < 100 and max(predicted) > 600


@pytest.mark.parametrize("lengths", [[5] * 32, [5, 9] * 16], ids=["one class", "two classes"])
def test_classifier_of_degenerate_lengths(lengths: list[int]) -> None:
    predictor = predictor_of("classifier", refit_every=32)
    for index, length in enumerate(lengths):
        predictor.observe(task_of("odd" if index % 2 else "even"), [length])
    fit = predictor.due()
    assert fit is not None
    predictor.adopt(fit())
    even, odd = predictor.predict([task_of("even"), task_of("odd")])
    assert (even, odd) == (pytest.approx(5, abs=1), pytest.approx(fmean(lengths[1::2]), abs=1))


def test_classifier_refuses_what_is_no_fit() -> None:
    with pytest.raises(TypeError, match="str is not what a fit"):
        predictor_of("classifier").adopt("nonsense")
    for name in ("heuristic", "history"):
        assert predictor_of(name).due() is None
        with pytest.raises(TypeError, match="nothing to fit"):
            predictor_of(name).adopt(object())


def test_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[predict\]'"):
        ClassifierPredictor(refit_every=16, limit=lambda task: CAP, temperature=lambda task: 1.0)


def test_fit_predicts_the_mean_over_classes() -> None:
    fit = Fit(weights=np.zeros((2, 2)), bias=np.log([1.0, 3.0]), class_tokens=np.array([10.0, 50.0]))
    assert fit.predict(np.ones((1, 2))) == [pytest.approx(40.0)]


def test_history_knows_a_task_it_has_seen() -> None:
    predictor = history_of()
    assert predictor.predict([task_of("new")]) == [pytest.approx(CAP / 2)]
    for _ in range(6):
        predictor.observe(task_of("How many apples?"), [100, 100])
        predictor.observe(task_of("Is it raining today?"), [9, 9])
    assert len(predictor) == 2
    assert predictor.predict([task_of("How many apples?")])[0] == pytest.approx(100)
    for _ in range(20):
        predictor.observe(task_of("How many apples?"), [400])
    assert predictor.predict([task_of("How many apples?")])[0] == pytest.approx(400, rel=0.02)


def test_history_asks_neighbours_about_a_new_task() -> None:
    predictor = history_of()
    for number in range(20):
        predictor.observe(task_of(f"Prove that {number} * {number + 1} is even for all integers."), [800])
        predictor.observe(task_of(f"今天有 {number} 个苹果，是否够？"), [8])
    long, short, unlike = predictor.predict(
        [
            task_of("Prove that 31 * 32 is even for all integers."),
            task_of("今天有 77 个苹果，是否够？"),
            task_of("zzzz"),
        ]
    )
    assert long > 600 and short < 20 and 20 < unlike < 300


def test_history_keeps_similar_texts_apart() -> None:
    predictor = history_of(max_entries=10)
    body = "a" * 3 * MAX_CHARS
    one, other = task_of(body + "x" + body), task_of(body + "y" + body)
    assert (embedding.ngrams([text_of(one)]) == embedding.ngrams([text_of(other)])).all()
    for _ in range(8):
        predictor.observe(one, [20])
        predictor.observe(other, [900])
    assert predictor.predict([one, other]) == [pytest.approx(20), pytest.approx(900)]


def test_history_forgets_the_longest_unseen() -> None:
    predictor = history_of(max_entries=3)
    for text, length in (("apples", 10), ("bridges", 900), ("clouds", 30), ("apples", 10), ("dragons", 40)):
        for _ in range(5):
            predictor.observe(task_of(text), [length])
    assert len(predictor) == 3
    known = predictor.predict([task_of(text) for text in ("apples", "clouds", "dragons")])
    assert known == [pytest.approx(10), pytest.approx(30), pytest.approx(40)]
    assert predictor.predict([task_of("bridges")])[0] < 100


def embed_by_size(texts: list[str]) -> np.ndarray:
    return np.array([[len(text), 10.0] for text in texts])


def embed_wrongly(texts: list[str]) -> np.ndarray:
    return np.zeros((len(texts) + 1, 2))


def test_history_by_an_embedding_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    predictor = history_of(embedding=f"{Path(__file__).stem}:embed_by_size")
    for size in (1, 2, 50, 60):
        predictor.observe(task_of("x" * size), [10 * size])
    short, long = predictor.predict([task_of("yy"), task_of("y" * 55)])
    assert short < long
    with pytest.raises(ConfigError, match=r"shape \(2, 2\) from 1 texts"):
        history_of(embedding=f"{Path(__file__).stem}:embed_wrongly").observe(task_of("x"), [1])


@pytest.mark.parametrize(
    ("name", "message"),
    [("ngram", "unknown scheduler.length.embedding"), ("no.such:thing", "cannot be imported"), ("math:pi", "not a f")],
)
def test_a_bad_embedding_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        history_of(embedding=name)


def test_ngrams_are_unit_vectors_that_follow_the_text() -> None:
    texts = ["What is 3 + 5?", "What is 3 + 6?", "Translate the poem into French", "苹果苹果苹果", "a", "", "\ud800x"]
    vectors = embedding.ngrams(texts)
    assert vectors.shape == (len(texts), embedding.DIMENSIONS) and vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(texts)))
    assert vectors[0] @ vectors[1] > 0.7 > 0.3 > vectors[0] @ vectors[2]
    assert (embedding.ngrams([texts[0]])[0] == vectors[0]).all()
    assert 2 ** (32 - int(embedding.SHIFT)) == 2 * embedding.DIMENSIONS


def test_neighbours_find_almost_all_of_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "CELL_ROWS", 32)
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(20, 16))
    vectors = centres[draw.integers(0, 20, 1200)] + 0.3 * draw.normal(size=(1200, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    index = Neighbours[int]()
    for row, vector in enumerate(vectors[:1000]):
        index.add(row, vector)
    for row in range(0, 1000, 3):
        index.remove(row)
    kept = np.array([row for row in range(1000) if row % 3])
    found = 0
    for query in vectors[1000:]:
        rows, cosines = index.nearest(query, 5)
        assert cosines == pytest.approx(vectors[rows] @ query, abs=1e-5)
        exact = kept[np.argsort(vectors[kept] @ query)[-5:]]
        found += len(set(rows) & set(exact.tolist()))
    assert found / 1000 > 0.9


def test_a_full_cell_beside_a_full_cell_is_halved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "CELL_ROWS", 4)
    vectors = np.random.default_rng(0).normal(size=(400, 16))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    index = Neighbours[int]()
    for row, vector in enumerate(vectors):
        index.add(row, vector)
    assert sum(row in index.nearest(vector, 1)[0] for row, vector in enumerate(vectors)) > 360


def test_neighbours_survive_equal_vectors_and_being_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "CELL_ROWS", 4)
    index, vector = Neighbours[int](), np.array([0.6, 0.8], dtype=np.float32)
    assert len(index.nearest(vector, 3)[0]) == 0
    for _ in range(3):
        for row in range(50):
            index.add(row, vector if row % 5 else np.zeros(2, dtype=np.float32))
        rows, cosines = index.nearest(vector, 3)
        assert len(set(rows)) == 3 and cosines == pytest.approx([1, 1, 1])
        for row in range(50):
            index.remove(row)
        assert index.nearest(vector, 3)[0] == []
