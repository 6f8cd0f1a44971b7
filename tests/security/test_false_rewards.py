"""Answers that earned a full reward although they were wrong, and right ones that earned none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.envs.rewards.dataset_rule import DatasetRule


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"5\sqrt{3}", "5"),
        (r"2^{2019}-1", "2"),
        (r"10\pi", "10"),
        ("3x", "3"),
        ("1,2,3", "1.2"),
        (r"(-\infty, 3)", "3"),
        (r"\frac{\pi}{4}", "4"),
        ("x^2-3x+2", "2"),
        ("1/2", "1"),
        ("12", "1"),
        (r"\boxed{\frac{3}{4}}", "3"),
        ("The answer is 12", "2"),
    ],
)
def test_a_right_answer_of_latex_is_read_as_a_whole(right: str, wrong: str) -> None:
    pytest.importorskip("math_verify")
    from penstock.envs.rewards.math import Math

    reward, payload = Math(), {"answer": right}
    for form in (f"The answer is {wrong}", rf"\boxed{{{wrong}}}"):
        assert reward.score(form, payload) == 0.0
    expression = right.removeprefix(r"\boxed{").removesuffix("}") if right.startswith(r"\boxed") else right
    assert reward.score(f"${expression.rpartition('is ')[2]}$", payload) == 1.0


@pytest.mark.parametrize(
    ("question", "right", "repeated"),
    [
        ("What is $2^{10}+3^5$?", "1267", "$2^{10}+3^5$"),
        ("What is $2^{10}+3^5$?", "1267", r"\boxed{3^5 + 2^{10}}"),
        (r"What is $23 \cdot 47$?", "1081", r"$47 \cdot 23$"),
        ("Calculate 23*47", "1081", "23*47"),
        ("What is 23*47?", "1081", r"\boxed{47 \times 23}"),
        ("Compute 23 × 47.", "1081", r"$23 \cdot 47$"),
        ("Evaluate `2^10-3^5`", "781", r"\boxed{2^{10}-3^5}"),
        (r"Compute $\binom{5}{2}$.", "10", r"$\binom{5}{2}$"),
        (r"Compute \(\cos \frac{\pi}{6}\).", r"\frac{\sqrt{3}}{2}", r"$\cos \frac{\pi}{6}$"),
        ("Factor $x^2+3x+2$.", "(x+1)(x+2)", "$2 + x^2 + 3x$"),
        ("Expand $(x+1)(x+2)$.", "x^2+3x+2", "$(x+1)(x+2)$"),
        ("What is $2^{10}$?", "1024", r"\boxed{y=2^{10}}"),
        ("What is $2^{10}$?", "1024", r"\boxed{2^{10}=2^{10}}"),
        ("What is $2^{10}$?", "1024", r"\boxed{\{2^{10}\}}"),
        ("What is $2^{10}$?", "1024", r"\boxed{2^{10}, 2^{10}}"),
        (r"Simplify $\frac{462}{1078}$.", r"\frac{3}{7}", r"\boxed{\frac{462}{1078}}"),
        (r"What is $\max(1,2,3)$?", "3", r"\boxed{\max(1,2,3)}"),
        (r"What is $\{1,2\}\cup\{2,3\}$?", r"\{1,2,3\}", r"$\{1,2\}\cup\{2,3\}$"),
        ("How much is it?", r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix}\int_0^1 2x dx\\2\end{pmatrix}$"),
        ("How much is it?", r"\frac{1}{3}", r"$\int_0^1 x^2 \, dx$"),
        ("How much is it?", "5050", r"$\sum_{n=1}^{100} n$"),
        ("How much is it?", "2", r"$\lim_{x\to 0}\frac{\sin(2x)}{x}$"),
    ],
)
def test_a_repeated_question_is_no_answer(question: str, right: str, repeated: str) -> None:
    pytest.importorskip("math_verify")
    from penstock.envs.rewards.math import Math

    reward, payload = Math(), {"question": question, "answer": right}
    assert reward.score(repeated, payload) == 0.0
    assert reward.score(f"${right}$", payload) == 1.0


@pytest.mark.parametrize(
    ("question", "right", "given"),
    [
        ("Which is larger, $3/2$ or $4/3$?", "1.5", "3/2"),
        (r"Which is larger, $\sqrt{2}$ or $1$?", r"\sqrt{2}", r"$\sqrt{2}$"),
        ("If $x=5$, what is $x$?", "5", "$x=5$"),
        ("How many subsets do ten things have?", "1024", "$2^{10}$"),
        (r"What is the limit of $1/x^2$ at 0?", r"\infty", r"\boxed{\infty}"),
        ("How much is a half in percent?", r"50\%", r"\boxed{0.5}"),
        ("How much is a half?", "0.5", r"\boxed{50\%}"),
        (r"For $0<x<\pi/2$, what is the bound?", r"\frac{\pi}{2}", r"$\pi/2$"),
        ("A town has 1,000 people. How many?", "1000", r"\boxed{1,000}"),
        (r"An angle is $60^\circ$. How large is it?", "60", r"$60^\circ$"),
        ("Choose $a+b+c$ or $a-b$.", "c+b+a", "$a+b+c$"),
        (r"What is left to do?", r"\int_0^1 f(x) \, dx", r"$\int_0^1 f(x) \, dx$"),
    ],
)
def test_an_answer_may_stand_in_its_question(question: str, right: str, given: str) -> None:
    pytest.importorskip("math_verify")
    from penstock.envs.rewards.math import Math

    assert Math().score(given, {"question": question, "answer": right}) == 1.0


@pytest.mark.parametrize(
    ("dataset", "wrong"), [("game_of_life_halting", "x"), ("coin_flip", "0"), ("complex_arithmetic", "nan")]
)
def test_a_mistaken_rule_pays_only_right_answers(dataset: str, wrong: str) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    reward = DatasetRule()
    for task in reasoning_gym.create_dataset(dataset, seed=11, size=8):
        payload: dict[str, Any] = task
        assert reward.score(wrong, payload) < 1.0
        assert reward.score(str(payload["answer"]), payload) == 1.0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"6.63 \times 10^{-34}", "0.0"),
        ("10^{-10}", "0.0000001"),
        (r"\frac{1}{13983816}", "0.0"),
        ("e^{-20}", "0.0"),
        ("x = 10^{-9}", "0.0"),
        (r"\{10^{-9}\}", r"\{0.0\}"),
    ],
)
def test_a_small_number_is_not_zero(right: str, wrong: str) -> None:
    pytest.importorskip("math_verify")
    from penstock.envs.rewards.math import Math

    reward = Math()
    assert reward.score(rf"\boxed{{{wrong}}}", {"answer": right}) == 0.0
    assert reward.score(rf"\boxed{{{right}}}", {"answer": right}) == 1.0


@pytest.mark.parametrize(
    ("right", "rounded"), [(r"\frac{1}{3}", "0.333333"), (r"\pi", "3.141593"), ("10^{-7}", "0.0000001"), ("0", "0.0")]
)
def test_a_rounded_number_is_right(right: str, rounded: str) -> None:
    pytest.importorskip("math_verify")
    from penstock.envs.rewards.math import Math

    assert Math().score(rf"\boxed{{{rounded}}}", {"answer": right}) == 1.0


@pytest.mark.parametrize(
    ("given", "reward"), [("0", 0.0), ("-0.00006", 0.0), ("6e-5", 0.0), ("6.1e-5", 1.0), ("0.00006104", 1.0)]
)
def test_a_rare_event_is_not_impossible(given: str, reward: float) -> None:
    pytest.importorskip("reasoning_gym")
    task = {"answer": "6.103515625e-05", "metadata": {"source_dataset": "coin_flip"}}
    assert (DatasetRule().score(given, task) == 1.0) == (reward == 1.0)


def test_the_first_decimals_are_no_number() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    reward = DatasetRule()
    for task in reasoning_gym.create_dataset("decimal_arithmetic", seed=11, size=20):
        right = str(task["answer"])
        assert reward.score(right, task) == 1.0
        if len(right.partition(".")[2]) > 4:
            assert reward.score(f"{float(right):.3f}", task) == 0.0


def nans(task: dict[str, Any]) -> str:
    return json.dumps([float("nan")] * task["metadata"]["numbers"])


def almost(task: dict[str, Any]) -> str:
    return json.dumps([float(each) + 0.5 for each in task["metadata"]["sorted_numbers"]])


def polynomial(form: str) -> Callable[[dict[str, Any]], str]:
    return lambda task: form.format(task["metadata"]["polynomial_expr"])


def integral(form: str) -> Callable[[dict[str, Any]], str]:
    return lambda task: form.format(**task["metadata"])


WRONG: list[tuple[str, str | Callable[[dict[str, Any]], str]]] = [
    ("game_of_life", str([[0] * 10] * 10)),
    ("gsm_symbolic", lambda task: f"-{task['answer']}"),
    ("gsm_symbolic", lambda task: f"It is -{task['answer']}."),
    ("number_sorting", nans),
    ("number_sorting", almost),
    *(("puzzle24", wrong) for wrong in ("6*4*1*1", "1*1*1*1*0x18", "2_4")),
    ("puzzle24", lambda task: "2_4+(x-x)*" + "*".join(map(str, task["metadata"]["numbers"]))),
    ("puzzle24", lambda task: "24**1+0*" + "*".join(map(str, task["metadata"]["numbers"]))),
    *(
        ("polynomial_multiplication", polynomial(form))
        for form in ("expand({})", "Poly({}).as_expr()", "({}).expand()")
    ),
    ("puzzle24", lambda task: "*".join(map(str, task["metadata"]["numbers"])) + "* *1"),
    ("countdown", lambda task: "{:#x}+(x-x)*".format(task["metadata"]["target"]) + sum_of(task)),
    *(
        (dataset, integral(form))
        for dataset in ("simple_integration", "intermediate_integration")
        for form in (
            "Integral({integrand}, {variable})",
            "integrate({integrand}, {variable})",
            "({integrand}).integrate({variable})",
            "Subs(Integral({integrand}, {variable}), C, 1)",
            "S('I'+'n'+'t'+'e'+'g'+'r'+'a'+'l')({integrand}, {variable})",
            "diff(Integral(Integral({integrand}, {variable}), {variable}), {variable})",
        )
    ),
]


def sum_of(task: dict[str, Any]) -> str:
    return "(" + "+".join(map(str, task["metadata"]["numbers"])) + ")"


@pytest.mark.parametrize(("dataset", "wrong"), WRONG)
def test_a_rule_pays_for_no_answer_that_evades_the_question(
    dataset: str, wrong: str | Callable[[dict[str, Any]], str]
) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for task in reasoning_gym.create_dataset(dataset, seed=11, size=3):
        answer = wrong if isinstance(wrong, str) else wrong(task)
        assert DatasetRule().score(answer, task) == 0.0


@pytest.mark.parametrize(
    "dataset",
    [
        "game_of_life",
        "gsm_symbolic",
        "number_sorting",
        "puzzle24",
        "countdown",
        "simple_integration",
        "prime_factorization",
        "polynomial_multiplication",
    ],
)
def test_a_rule_pays_for_the_answers_of_its_tasks(dataset: str) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    for task in reasoning_gym.create_dataset(dataset, seed=11, size=8):
        assert DatasetRule().score(str(task["answer"]), task) == 1.0


@pytest.mark.parametrize(
    ("answer", "numbers", "reward"), [("7*7/2*1", [1, 2, 7, 7], 0.0), ("6*(5-1)/1", [1, 1, 5, 6], 1.0)]
)
def test_what_makes_24_is_exactly_24(answer: str, numbers: list[int], reward: float) -> None:
    pytest.importorskip("reasoning_gym")
    task = {"metadata": {"source_dataset": "puzzle24", "numbers": numbers}}
    assert DatasetRule().score(answer, task) == reward


def test_a_solution_of_an_integral_is_paid_where_the_dataset_has_none() -> None:
    pytest.importorskip("reasoning_gym")
    metadata = {"source_dataset": "intermediate_integration", "integrand": "-x**2*cos(x)", "variable": "x"}
    task = {"answer": "-Integral(x**2*cos(x), x) + C", "metadata": metadata}
    for right in ("-x**2*sin(x) - 2*x*cos(x) + 2*sin(x) + C", "2*sin(x) - x**2*sin(x) - 2*x*cos(x) + K1"):
        assert DatasetRule().score(right, task) == 1.0
    assert DatasetRule().score(task["answer"], task) == 0.0


@pytest.mark.parametrize(("answer", "reward"), [("12", 0.0), ("1 × 12", 0.0), ("-1 × -12", 0.0), ("2 × 6", 0.5)])
def test_a_number_is_not_its_own_factors(answer: str, reward: float) -> None:
    pytest.importorskip("reasoning_gym")
    task = {"answer": "2 × 2 × 3", "metadata": {"source_dataset": "prime_factorization", "number": 12}}
    assert DatasetRule().score(answer, task) == reward
    assert DatasetRule().score("2 × 3 × 2 ×", task) == 1.0
    assert DatasetRule().score("13", {"answer": "13", "metadata": task["metadata"] | {"number": 13}}) == 1.0
