"""The Pareto plane: target calls against drift, exact methods at drift 0 and the dials of lossy ones."""

import draw

import sprinter

METHODS = {
    "exact": ["autoregressive", "speculative(gamma=2)", "speculative(gamma=4)", "svip", "block(gamma=4)"],
    "sprinter, a trained gate": [f"sprinter(tau={tau})" for tau in (0.5, 0.6, 0.7, 0.8)],
    "certain, entropy": [f"certain(threshold={nats})" for nats in (1, 2, 3)],
    "fuzzy acceptance": [f"fuzzy(threshold={most})" for most in (0.1, 0.2, 0.4)],
    "a coin": [f"coin(rate={rate})" for rate in (0.2, 0.4, 0.6, 0.8)],
}
pair = sprinter.load_pair()
prompts = [
    "Once upon a time, there was a little", "The old mill stood by", "One morning a small bird", "Tom and Anna",
    "One day, a girl", "The big dog was", "It was raining", "Mother said",
]  # fmt: skip
points: dict[str, list[tuple[float, float]]] = {title: [] for title in METHODS}
for title, specs in METHODS.items():
    for spec in specs:
        outs = pair.generate(prompts, method=spec, max_new_tokens=48, seed=1)
        count = sum(len(out.tokens) for out in outs)
        drift = sum((out.stats.mean_drift or 0.0) * len(out.tokens) for out in outs) / count
        points[title].append((drift, sum(out.stats.target_calls for out in outs) / count))
draw.chart("pareto", points, "mean drift", "target calls a token", lines=METHODS.keys() - {"exact"})
