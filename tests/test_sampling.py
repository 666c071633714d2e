"""From logits to tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.sampling import Draw, sample
from scheduling.request import Sampling


def draws(rows: int, sampling: Sampling, **fixed: int) -> list[Draw]:
    return [
        Draw(row, sampling, fixed.get("seed", row), fixed.get("index", 0), fixed.get("position", 5))
        for row in range(rows)
    ]


def test_temperature_0_in_a_batch_with_sampled_ones_is_the_exact_argmax() -> None:
    """Case C13."""
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    mixed = [Draw(row, Sampling(temperature=0.0 if row % 2 else 1.3, top_p=0.9), row, 0, 0) for row in range(64)]
    tokens = [s.token for s in sample(logits, mixed)]
    assert [tokens[row] for row in range(1, 64, 2)] == logits.argmax(-1)[1::2].tolist()
    assert tokens[::2] != logits.argmax(-1)[::2].tolist()


def test_a_draw_depends_on_seed_choice_and_position_and_on_nothing_else() -> None:
    logits = torch.zeros(1, 10_000)
    warm = Sampling(temperature=1.0)

    def token(seed: int, index: int, position: int) -> int:
        return sample(logits, [Draw(0, warm, seed, index, position)])[0].token

    assert token(1, 0, 0) == token(1, 0, 0)
    assert len({token(seed, index, position) for seed in range(3) for index in range(3) for position in range(3)}) == 27
    together = torch.cat([torch.randn(1, 10_000), logits])
    assert sample(together, [Draw(1, warm, 1, 0, 0)])[0].token == token(1, 0, 0)


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    counts = Counter(sample(logits, [Draw(0, Sampling(temperature=0.7), 3, 0, i)])[0].token for i in range(4000))
    expected = torch.softmax(logits[0] / 0.7, -1)
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.025)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def tokens(top_p: float) -> set[int]:
        return {sample(logits, [Draw(0, Sampling(temperature=1.0, top_p=top_p), 0, 0, i)])[0].token for i in range(400)}

    assert tokens(0.4) == {0}
    assert tokens(0.7) == {0, 1}
    assert tokens(0.9) == {0, 1, 2}
    assert tokens(1.0) == {0, 1, 2, 3}


def test_logprobs_come_from_the_raw_logits() -> None:
    """Case C15: temperature and top-p change the choice, not what is reported of it."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    raw = torch.log_softmax(logits[0], -1)
    sampled = sample(logits, [Draw(0, Sampling(temperature=0.3, top_p=0.5, logprobs=3), 4, 0, 0)])[0]
    assert sampled.logprob == pytest.approx(float(raw[sampled.token]))
    assert [token for token, _ in sampled.top] == raw.topk(3).indices.tolist()
    assert sample(logits, draws(1, Sampling(logprobs=0)))[0].top == ()
    assert sample(logits, draws(1, Sampling()))[0].logprob is None


def test_nan_logits_are_an_error_that_names_the_rows() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = float("nan")
    with pytest.raises(ValueError, match=r"NaN logits in rows \[1\]"):
        sample(logits, draws(3, Sampling()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("n", 0),
        ("logprobs", -1),
    ],
)
def test_impossible_sampling_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]
