"""Chi-square tests on the built-in pair: the law of the first two tokens is the target's."""

import math

import pytest
import torch

import sprinter
from sprinter.laws import Sampling, process

PROMPT, TOP_K, RUNS = "The city was founded in the year", 4, 500
SAMPLING = Sampling(temperature=0.9, top_k=TOP_K)


@pytest.fixture(scope="module")
def exact_law(builtin_pair: sprinter.Pair) -> dict[tuple[int, int], float]:
    """p(x1, x2) over the 16 texts that top-k leaves, by multiplication of uncached laws."""
    model, ids = builtin_pair.models.target.model, builtin_pair.tokenizer(PROMPT)["input_ids"]

    def law(text: list[int]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, -1].double()
        values = process(logits, SAMPLING)
        return {int(x): float(values[x]) for x in values.nonzero().flatten()}

    return {(a, b): pa * pb for a, pa in law(ids).items() for b, pb in law([*ids, a]).items()}


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(χ² > statistic)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.statistical
@pytest.mark.parametrize(
    "method", ["speculative(gamma=2)", "sprinter(tau=1.0)", "specinfer(drafts=2, gamma=2)"]
)
def test_first_two_tokens_have_the_targets_law(
    builtin_pair: sprinter.Pair, exact_law: dict[tuple[int, int], float], method: str
) -> None:
    """False alarm: 1 in 1,000 a method; the seeds are fixed."""
    counts = dict.fromkeys(exact_law, 0)
    accepted = 0
    texts = builtin_pair.generate_batch(
        [PROMPT] * RUNS, rows=50, seed=[*range(RUNS)],
        method=method, max_new_tokens=3, temperature=0.9, top_k=TOP_K,
    )  # fmt: skip
    for out in texts:
        counts[out.tokens[0].id, out.tokens[1].id] += 1
        accepted += out.stats.accepted
    assert 0.1 * RUNS < accepted < 1.95 * RUNS, (
        "drafts must be accepted and refused, or this test shows nothing"
    )
    cells = [(counts[text], RUNS * chance) for text, chance in exact_law.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    pooled = [cell for cell in cells if cell[1] >= 5] + (
        [tuple(map(sum, zip(*rare, strict=True)))] if rare else []
    )
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pooled)
    assert len(pooled) >= 6
    assert chi_square_tail(statistic, len(pooled) - 1) > 1e-3


def test_the_chi_square_test_would_notice(
    builtin_pair: sprinter.Pair, exact_law: dict[tuple[int, int], float]
) -> None:
    """The draft's own law lies so far from the target's that the same count would fail."""
    model, ids = builtin_pair.models.draft.model, builtin_pair.tokenizer(PROMPT)["input_ids"]
    with torch.inference_mode():
        q = process(model(torch.tensor([ids])).logits[0, -1].double(), SAMPLING)
    first: dict[int, float] = {}
    for (a, _), chance in exact_law.items():
        first[a] = first.get(a, 0.0) + chance
    distance = RUNS * sum((float(q[a]) - chance) ** 2 / chance for a, chance in first.items())
    assert math.isfinite(distance) and chi_square_tail(distance, len(first) - 1) < 1e-6
