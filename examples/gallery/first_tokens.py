"""First tokens: how far each target call gets, decoded plainly, exactly with a draft, and with trust."""

import draw

import sprinter

pair = sprinter.load_pair()
lines = {}
for method in ("autoregressive", "speculative(gamma=4)", "sprinter(tail=5)"):
    out = pair.generate("Once upon a time, there was a little", method=method, max_new_tokens=48, seed=1)
    print(f"{method}: {out.text!r}\n{out.stats.summary}")
    rounds = range(out.tokens[-1].round + 1)
    lines[method] = [(done, sum(token.round <= done for token in out.tokens)) for done in rounds]
draw.chart("first_tokens", lines, "target calls", "tokens of the text")
