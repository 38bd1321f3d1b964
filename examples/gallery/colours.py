"""Colours by origin: who wrote each token, by an exact method and by a lossy one."""

import draw

import sprinter

pair = sprinter.load_pair()
prompt = "Once upon a time, there was a little"
shown = {}
for method in ("speculative(gamma=4)", "sprinter(tail=3)"):
    out = pair.generate(prompt, method=method, max_new_tokens=64, seed=3)
    stats = out.stats
    title = f"{method}: {stats.tokens_per_target_call:.2f} tokens a target call, mean drift {stats.mean_drift:.3f}"
    shown[title] = [(prompt, ""), *((token.text, token.origin.value) for token in out.tokens)]
draw.texts("colours", shown)
