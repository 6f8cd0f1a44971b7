from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.context_parallel import Context
from penstock.trainer.packing import MicroBatch, TokenTable, equal_passes, flatten, micro_batches

CPU = torch.device("cpu")
SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.booleans(), min_size=0, max_size=12)), min_size=1, max_size=20
)


def table_of(samples: list[tuple[int, list[bool]]]) -> TokenTable:
    """A sample is (prompt family, mask of the response); token ids are distinct between samples but for prompts."""
    ids, masks = [], []
    for number, (family, response) in enumerate(samples):
        prompt = list(range(100 * family, 100 * family + 2 + family))
        ids.append(np.asarray(prompt + [1000 * (number + 1) + i for i in range(len(response))]))
        masks.append(np.asarray([False] * len(prompt) + response))
    return TokenTable.build(ids, flatten(masks, np.bool_))


def context(micro: MicroBatch, token: int) -> list[int]:
    """Every token id the model has seen when it predicts `token`, the prediction itself last."""
    row, last = int(micro.rows[token]), int(micro.columns[token])
    if micro.boundaries is not None:
        start = max(end for end in micro.boundaries.ends.tolist() if end <= last)
        assert int(micro.boundaries.positions[0, last]) == last - start
        return [*micro.inputs[row, start : last + 1].tolist(), int(micro.chosen[token])]
    prefix = micro.prefixes[micro.prefix_rows[row], : int(micro.prefix_widths[row])].tolist()
    return prefix + micro.inputs[row, : last + 1].tolist() + [int(micro.chosen[token])]


@given(
    samples=SAMPLES,
    max_tokens=st.sampled_from([1, 16, 64, 10_000]),
    share=st.booleans(),
    pack=st.booleans(),
    assigned=st.none() | st.integers(0, 99),
)
def test_every_trained_token_is_predicted_once_from_its_own_past(
    samples: list[tuple[int, list[bool]]], max_tokens: int, share: bool, pack: bool, assigned: int | None
) -> None:
    table = table_of(samples)
    if assigned is not None:  # samples are assigned to passes
        table = replace(table, passes=np.random.default_rng(assigned).integers(0, 3, len(samples)))
    seen: list[int] = []
    for micro in micro_batches(table, max_tokens, CPU, share_prefixes=share, pack=pack):
        fed = micro.prefixes.numel() + micro.inputs.numel()
        num_samples = micro.inputs.shape[0] if micro.boundaries is None else len(micro.boundaries.lengths)
        assert fed <= max_tokens or num_samples == 1 or (pack and assigned is not None)
        if micro.boundaries is not None:
            assert fed == sum(micro.boundaries.lengths) == micro.boundaries.ends[-1] > 0, "no padding"
            assert table.passes is None or len(set(table.passes[micro.samples])) == 1
        for token, (place, sample) in enumerate(zip(micro.tokens.tolist(), micro.samples.tolist(), strict=True)):
            start = int(table.starts[sample])
            assert context(micro, token) == table.token_ids[start : place + 1].tolist()
            seen.append(place)
    assert sorted(seen) == np.flatnonzero(table.trained).tolist()


@given(samples=SAMPLES, max_tokens=st.sampled_from([16, 64]), size=st.integers(2, 4))
def test_ranks_that_share_a_pass_have_all_of_it_together(
    samples: list[tuple[int, list[bool]]], max_tokens: int, size: int
) -> None:
    table = table_of(samples)
    alone = list(micro_batches(table, max_tokens, CPU, share_prefixes=False, pack=True))
    contexts = [Context(size, index, group=None) for index in range(size)]  # type: ignore[arg-type]
    parts = [list(micro_batches(table, max_tokens, CPU, share_prefixes=False, pack=True, context=c)) for c in contexts]
    for whole, *shared in zip(alone, *parts, strict=True):
        assert whole.boundaries is not None
        num_tokens, width = whole.inputs.shape[1], shared[0].inputs.shape[1]
        assert 0 <= size * width - num_tokens < size, "less padding than ranks"
        together = torch.cat([part.inputs for part in shared], dim=1)
        assert torch.equal(together[:, :num_tokens], whole.inputs)
        positions = torch.cat([part.boundaries.positions for part in shared if part.boundaries], dim=1)
        assert torch.equal(positions[:, :num_tokens], whole.boundaries.positions)
        columns = torch.cat([part.columns + index * width for index, part in enumerate(shared)])
        assert torch.equal(columns, whole.columns)
        assert torch.equal(torch.cat([part.chosen for part in shared]), whole.chosen)
        for part in shared:
            assert part.tokens.tolist() == whole.tokens.tolist()
            assert part.counts == tuple(len(each.columns) for each in shared)
            assert part.boundaries is not None and sum(part.boundaries.lengths) == size * width


def test_a_first_token_carries_no_loss() -> None:
    table = TokenTable.build([np.asarray([1, 2])], np.asarray([True, True]))
    assert table.trained.tolist() == [False, True]


def test_padding_does_not_dominate() -> None:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(3.0, 1.0, 400).astype(int) + 3, 800)
    masks = [np.arange(length) >= 2 for length in lengths]
    table = TokenTable.build(
        [np.arange(length) + 1000 * i for i, length in enumerate(lengths)], flatten(masks, np.bool_)
    )
    fed = sum(micro.inputs.numel() for micro in micro_batches(table, 8192, CPU, share_prefixes=True))
    assert fed < 1.15 * table.widths.sum()


def test_a_shared_prompt_is_fed_once() -> None:
    prompt = list(range(50))
    ids = [np.asarray([*prompt, 100 + i, 200 + i]) for i in range(8)]
    masks = [np.asarray([False] * 50 + [True, True])] * 8
    table = TokenTable.build(ids, flatten(masks, np.bool_))
    (micro,) = micro_batches(table, 8192, CPU, share_prefixes=True)
    assert micro.prefixes.shape == (1, 49)
    assert micro.inputs.shape == (8, 2)  # the prompt's last token, which predicts the first answer token, and one more


@given(widths=st.lists(st.integers(1, 1000), max_size=60), max_tokens=st.integers(1, 3000), num_ranks=st.integers(1, 9))
def test_ranks_have_the_same_number_of_passes_and_each_sample_is_in_one(
    widths: list[int], max_tokens: int, num_ranks: int
) -> None:
    costs = np.asarray(widths, dtype=np.float64) ** 2
    rounds = equal_passes(costs, np.asarray(widths, dtype=np.int64), max_tokens, num_ranks)
    assert all(len(ranks) == num_ranks for ranks in rounds)
    assert sorted(sample for ranks in rounds for samples in ranks for sample in samples) == list(range(len(widths)))
    for ranks in rounds:
        assert any(ranks), "no round is empty"
        for samples in ranks:
            assert sum(widths[sample] for sample in samples) <= max_tokens or len(samples) == 1


def test_passes_that_are_made_together_cost_about_the_same() -> None:
    draw = np.random.default_rng(0)
    widths = np.minimum(draw.lognormal(np.log(7000), 1.0, 1024), 32_768).astype(np.int64)
    rounds = equal_passes(widths.astype(np.float64), widths, 32_768, 64)
    loads = np.asarray([[widths[samples].sum() for samples in ranks] for ranks in rounds])
    assert loads.sum() / (64 * loads.max(axis=1).sum()) > 0.9
    assert loads.sum(axis=0).min() > 0.9 * loads.sum(axis=0).max()
    fewest = -(-widths.sum() // (64 * 32_768))
    assert len(rounds) <= fewest + 1


@pytest.mark.parametrize("share", [True, False])
def test_nothing_trained_is_nothing_fed(share: bool) -> None:
    table = table_of([(0, [False, False]), (1, [])])
    for pack in (False, True):
        assert list(micro_batches(table, 64, CPU, share_prefixes=share, pack=pack)) == []
