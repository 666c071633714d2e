"""From logits to tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine.sampling import Draw, Sampled, sample
from scheduling.request import Sampling


def draws(rows: int, sampling: Sampling) -> list[list[Draw]]:
    return [[Draw(sampling, seed=row, index=0, position=5)] for row in range(rows)]


def one(logits: torch.Tensor, sampling: Sampling, seed: int = 0, index: int = 0, position: int = 0) -> Sampled:
    """One draw from one row."""
    return sample(logits, [[Draw(sampling, seed, index, position)]])[0][0]


def test_temperature_0_in_a_batch_with_sampled_ones_is_the_exact_argmax() -> None:
    """Case C13."""
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(1))
    mixed = [[Draw(Sampling(temperature=0.0 if row % 2 else 1.3, top_p=0.9), row, 0, 0)] for row in range(64)]
    tokens = [drawn.token for (drawn,) in sample(logits, mixed)]
    assert [tokens[row] for row in range(1, 64, 2)] == logits.argmax(-1)[1::2].tolist()
    assert tokens[::2] != logits.argmax(-1)[::2].tolist()


def test_a_draw_depends_on_seed_choice_and_position_and_on_nothing_else() -> None:
    logits = torch.zeros(1, 10_000)
    warm = Sampling(temperature=1.0)

    def token(seed: int, index: int, position: int) -> int:
        return one(logits, warm, seed, index, position).token

    assert token(1, 0, 0) == token(1, 0, 0)
    assert len({token(seed, index, position) for seed in range(3) for index in range(3) for position in range(3)}) == 27
    together = torch.cat([torch.randn(1, 10_000), logits])
    assert sample(together, [[], [Draw(warm, 1, 0, 0)]])[1][0].token == token(1, 0, 0)


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(3)) + 40
    assert one(logits, Sampling(temperature=temperature)).token == int(logits.argmax())


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    counts = Counter(one(logits, Sampling(temperature=0.7), 3, 0, i).token for i in range(4000))
    expected = torch.softmax(logits[0] / 0.7, -1)
    for token in range(4):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.025)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def tokens(top_p: float) -> set[int]:
        return {one(logits, Sampling(temperature=1.0, top_p=top_p), position=i).token for i in range(400)}

    assert tokens(0.4) == {0}
    assert tokens(0.7) == {0, 1}
    assert tokens(0.9) == {0, 1, 2}
    assert tokens(1.0) == {0, 1, 2, 3}


def test_logprobs_come_from_the_raw_logits() -> None:
    """Case C15: temperature and top-p change the choice, not what is reported of it."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    raw = torch.log_softmax(logits[0], -1)
    sampled = one(logits, Sampling(temperature=0.3, top_p=0.5, logprobs=3), seed=4)
    assert sampled.logprob == pytest.approx(float(raw[sampled.token]))
    assert [token for token, _ in sampled.top] == raw.topk(3).indices.tolist()
    assert one(logits, Sampling(logprobs=0)).top == ()
    assert one(logits, Sampling()).logprob is None


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


def test_nothing_is_sorted_where_nothing_is_cut_and_little_where_top_p_is_soon_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[int] = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, k: (looked_at.append(k), topk(self, k))[1])
    logits = torch.zeros(1, 50_000)
    one(logits, Sampling(temperature=1.0))
    assert looked_at == []
    peaked = logits.clone()
    peaked[0, :10] = 30.0
    assert one(peaked, Sampling(temperature=1.0, top_p=0.9)).token < 10
    assert looked_at == [1024]
    one(logits, Sampling(temperature=1.0, top_p=0.9))  # a flat distribution needs them all
    assert looked_at == [1024, 1024, 50_000]


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((1, 8), float("-inf"))
    logits[0, 2] = logits[0, 5] = 0.0
    for top_p in (1.0, 0.999):
        drawn = {one(logits, Sampling(temperature=1.0, top_p=top_p), position=i).token for i in range(200)}
        assert drawn == {2, 5}
