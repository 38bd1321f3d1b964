"""The budget dial: a bound on the mean drift, what of it a text spends, and what that buys."""

import draw

import sprinter

pair = sprinter.load_pair()
prompts = [
    "Once upon a time, there was a little", "The old mill stood by", "One morning a small bird", "Tom and Anna",
    "One day, a girl", "The big dog was", "It was raining", "Mother said",
]  # fmt: skip
budgets = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2)
spent, calls = [], []
for budget in budgets:
    outs = pair.generate(
        prompts, method="certain(threshold=3, tail=3)", budget=budget, max_new_tokens=64, seed=1
    )
    drifts = [out.stats.mean_drift or 0.0 for out in outs]
    assert max(drifts) <= budget + 1e-6  # the bound holds for each text
    spent.append((budget, sum(drifts) / len(drifts)))
    calls.append((budget, sum(out.stats.target_calls for out in outs) / sum(len(out.tokens) for out in outs)))
series = {"mean drift": spent, "the bound": [(one, one) for one in budgets], "target calls a token": calls}
draw.chart("budget", series, "budget", "mean drift, target calls a token")
