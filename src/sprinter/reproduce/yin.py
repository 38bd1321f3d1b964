"""A Theoretical Perspective for Speculative Decoding Algorithm (Yin et al. 2024): Tables 1 and 2."""

from __future__ import annotations

from sprinter.bench.statistics import ratio_of_ratios, ratio_of_sums
from sprinter.reproduce.answers import Answers, difference, duel
from sprinter.reproduce.claims import Check, Claim, PaperTable, cell
from sprinter.reproduce.study import Paper, Study

__all__ = ["YIN"]

EPSILONS, SMALLER = (0.1, 0.2, 0.4, 0.8), (0.001, 0.01)
PAPER = {0.1: "53; 54.5", 0.2: "53.5; 53", 0.4: "57.5; 53.5", 0.8: "52.5; 55"}
HEAD = (
    "method", "prompts won, %", "paper: reward model; GPT-4", "comparisons won, %", "log-likelihood a token", "drift",
    "calls a token", "tokens/s",
)  # fmt: skip


def answers(study: Study, part: str, specs: dict[str, str]) -> dict[str, Answers]:
    """Several answers of each method to each prompt."""
    suite = study.suite("vicuna", study.prompts)
    return study.answers(part, suite, specs, 1.0, repeats=study.repeats, quality=True)


def row(name: str, ours: Answers, theirs: Answers, paper: str) -> list[str]:
    """One arm's line."""
    won, compared = duel(ours, theirs)
    likely, drift, calls = (
        ratio_of_sums(*of) for of in (ours.log_likelihood, ours.drift, (ours.calls, ours.tokens))
    )
    speed = f"{ours.tokens.sum() / ours.seconds.sum():.1f}"
    return [name, cell(won, 1), paper, cell(compared, 1), cell(likely), cell(drift, 3), cell(calls), speed]


def told(study: Study, found: Answers) -> str:
    """What was run."""
    answers_each = "an answer" if study.repeats == 1 else f"{study.repeats} answers"
    return (
        f"{found.prompts} questions of Vicuna-bench, {answers_each} each, {study.new_tokens} new tokens, "
        "temperature 1. Each answer of a method is compared with each of the other's. The judge is the target's "
        "log-likelihood a token. It favours sharp texts, and what UNO draws twice from the target is sharp; so "
        "drift is shown too."
    )


def table_1(study: Study) -> list[PaperTable]:
    """Decoding-OPT against Decoding-UNO."""
    epsilons = (*SMALLER, *EPSILONS)
    specs = {
        f"{rule} ε={e:g}": f"{rule.lower()}(epsilon={e}, gamma=5)"
        for e in epsilons
        for rule in ("OPT", "UNO")
    }
    found = answers(study, "opt and uno", specs)
    rows, wins, closer, calls = [], {}, [], []
    for e in epsilons:
        opt, uno = (found[f"{rule} ε={e:g}"] for rule in ("OPT", "UNO"))
        beaten = "; ".join(f"{100 - float(one):g}" for one in PAPER[e].split("; ")) if e in PAPER else "–"
        rows += [row(f"OPT ε={e:g}", opt, uno, PAPER.get(e, "–")), row(f"UNO ε={e:g}", uno, opt, beaten)]
        wins[e] = Check(f"ε={e:g}, prompts won, %", duel(opt, uno)[0], 50.0)
        closer.append(Check(f"ε={e:g}, drift less UNO's", difference(opt.drift, uno.drift), 0.0, above=False))
        each = ratio_of_ratios((opt.calls, opt.tokens), (uno.calls, uno.tokens))
        calls.append(Check(f"ε={e:g}, calls over UNO's", each, 1.05, above=False))
    claims = [
        Claim("OPT wins at every ε: 52.5 to 57.5 % of the prompts.", tuple(wins[e] for e in EPSILONS)),
        Claim("Beyond the paper: OPT wins at smaller ε too.", tuple(wins[e] for e in SMALLER)),
        Claim("The reason (Theorem 4): OPT is nearer to the target's law.", (*closer,)),
        Claim("OPT makes no more target calls; required here: at most 5 % more.", (*calls,)),
    ]
    first = found["OPT ε=0.1"]
    return [PaperTable("Table 1", told(study, first), HEAD, rows, claims, first.prompts)]


def table_2(study: Study) -> list[PaperTable]:
    """The target alone against the draft alone: whether the judge can tell them apart."""
    found = answers(study, "target and draft", {"target": "autoregressive", "draft": "draft-only"})
    target, draft = found["target"], found["draft"]
    rows = [
        row("target alone", target, draft, "64.5; 69"),
        row("draft alone", draft, target, "35.5; 31"),
    ]
    won = duel(target, draft)[0]
    checks = (Check("prompts won, %", won, 50.0), Check("as many as in the paper, %", won, 64.5))
    claim = Claim(
        "The target alone wins 64.5 % (reward model) and 69 % (GPT-4): the judge sees the gap.", checks
    )
    return [PaperTable("Table 2", told(study, target), HEAD, rows, [claim], target.prompts)]


YIN = Paper(
    "A Theoretical Perspective for Speculative Decoding Algorithm (Yin et al. 2024)",
    "As in the paper γ is 5, and both methods answer each prompt several times. A method wins a prompt if its answers "
    "win more than half of the comparisons; a draw counts half. Vicuna-bench takes the place of Alpaca-Farm. UNO draws "
    "its replacement from the target, as the paper's text says; the listing in the appendix draws it from the draft. "
    "`sprinter theory` has the theorems and figures.",
    {"table-2": table_2, "table-1": table_1},
    {"prompts": 40, "tuning_prompts": 8, "new_tokens": 32, "repeats": 4},
)
"""The paper's protocol."""
