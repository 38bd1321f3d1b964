"""Fuzzy Speculative Decoding (Holsman et al. 2025): Tables 1 to 3, Figures 2 and 3, Appendices C to E."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sprinter.bench.sample import Suite
from sprinter.bench.statistics import BootstrapInterval, bootstrap, ratio_of_ratios, ratio_of_sums
from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.errors import SprinterError, UserError
from sprinter.laws import entropy, kl_divergence, one_hot, overlap, tv_distance
from sprinter.reproduce.answers import Answers, Quotient, difference, percent
from sprinter.reproduce.claims import ENOUGH, Check, Claim, PaperTable, cell
from sprinter.reproduce.study import Paper, Study

__all__ = ["FSD"]

SUITES = {"GSM8K": "gsm8k", "CSQA": "commonsenseqa", "MMLU": "mmlu", "HumanEval": "humaneval"}
LENGTHS = (5, 10, 15, 20)
CLOSE_TO_ALL = 0.95  # kept tokens, from which on drafts are of the next length (Appendix D)
THRESHOLDS = (
    0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0,
)  # fmt: skip
JS = "js_reference"  # what the published code computes under the name of JS
LOW, MIDDLE, HIGH = LEVELS = ("FSD (Low)", "FSD (Med.)", "FSD (High)")
DRAFT, TARGET, SD, COMMON, RANDOM = "draft alone", "target alone", "SD", "FSD, one T", "random"
FIFTH, TENTH = 0.2, 0.1  # of the gap between target and draft
KEPT = (0.3, 0.5, 0.7, 0.9)
EDGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
SHARES = {"CSQA": "75.7 → 84.6", "GSM8K": "81.5 → 91.4", "MMLU": "78.7 → 87.5", "HumanEval": "81.5 → 91.4"}
OVER_SD = {  # tokens/s over SD's: Llama3.1 8B/70B; Gemma2 2B/27B; Qwen2.5 7B/32B
    "GSM8K": {LOW: "1.16; 1.14; 1.23", MIDDLE: "1.26; 1.20; 1.29", HIGH: "1.31; 1.33; 1.26"},
    "CSQA": {LOW: "1.07; 1.21; 1.15", MIDDLE: "1.30; 1.37; 1.39", HIGH: "1.44; 1.52; 1.49"},
    "MMLU": {LOW: "1.08; 1.09; 1.13", MIDDLE: "1.15; 1.27; 1.22", HIGH: "1.19; 1.32; 1.29"},
    "HumanEval": {LOW: "1.09; 1.10; 1.13", MIDDLE: "1.13; 1.14; 1.13", HIGH: "1.15; 1.15; 1.16"},
}
ALEN = {  # accepted tokens a round, the same pairs
    "GSM8K": {SD: "9.7; 5.7; 6.6", LOW: "11.8; 6.8; 8.2", MIDDLE: "12.4; 7.1; 9.2", HIGH: "13.5; 11.1; 9.3"},
    "CSQA": {SD: "1.96; 2.07; 2.7", LOW: "3.32; 2.5; 3.3", MIDDLE: "4.3; 3.2; 6.6", HIGH: "8.14; 3.9; 6.9"},
    "MMLU": {SD: "3.37; 2.7; 3.2", LOW: "3.9; 2.9; 3.7", MIDDLE: "4.1; 3.5; 4.0", HIGH: "4.2; 3.7; 4.46"},
    "HumanEval": {SD: "7.6; 3.7; 3.7", LOW: "8.5; 4.02; 4.3", MIDDLE: "8.6; 4.2; 4.4", HIGH: "8.9; 4.3; 4.6"},
}
ACCURACY = {  # per cent, the same pairs
    "GSM8K": {DRAFT: "84.6; 57.5; 89.9", TARGET: "94.9; 90.7; 94.9", SD: "95.1; 90.8; 95.1",
              LOW: "95.2; 89.6; 94.7", MIDDLE: "94.3; 88.5; 94.2", HIGH: "93.1; 86.1; 94.0"},
    "CSQA": {DRAFT: "73.8; 64.6; 80.2", TARGET: "83.6; 83.0; 86.9", SD: "84.1; 83.1; 86.8",
             LOW: "84.0; 82.3; 86.6", MIDDLE: "83.7; 81.6; 86.1", HIGH: "82.1; 79.5; 85.9"},
    "MMLU": {DRAFT: "72.2; 55.2; 71.9", TARGET: "86.2; 75.3; 82.7", SD: "84.8; 76.8; 82.2",
             LOW: "84.0; 75.6; 82.0", MIDDLE: "83.0; 75.4; 81.6", HIGH: "82.6; 74.2; 81.7"},
    "HumanEval": {DRAFT: "63.2; 40.9; 68.1", TARGET: "79.1; 75.6; 80.9", SD: "77.4; 76.2; 82.1",
                  LOW: "78.9; 78.7; 81.9", MIDDLE: "77.6; 77.8; 79.0", HIGH: "77.4; 75.8; 78.3"},
}  # fmt: skip


@dataclass(frozen=True)
class Laws:
    """What both laws say at the positions of the target's own texts, ``[N]`` each; ``texts``: which text.

    Attributes:
        loss: what a token drawn from the draft costs in expected log-likelihood, E_p ln p − E_q ln p; also where drafts
            are greedy, since a likeliest token would be a gain by it.
        tv, overlap: between p and what the draft's token is drawn from: one-hot where drafts are greedy.
    """

    texts: NDArray[np.int64]
    loss: NDArray[np.float64]
    tv: NDArray[np.float64]
    overlap: NDArray[np.float64]
    divergences: Mapping[str, NDArray[np.float64]]

    def by_text(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums a text."""
        return np.bincount(self.texts, weights=values).astype(float)

    def lost(self, kept: NDArray[np.float64]) -> Quotient:
        """Loss where the draft's tokens are kept, and the whole loss: their ratio is a share of the gap."""
        return self.by_text(self.loss * kept), self.by_text(self.loss)

    def mean(self, values: NDArray[np.float64]) -> Quotient:
        """Of a value a position."""
        return self.by_text(values), self.by_text(np.ones(len(values)))

    def keeping(self, divergence: str, share: float) -> NDArray[np.float64]:
        """Chance that a position keeps the draft's token: the share of least divergence, or the same everywhere."""
        if divergence == "chance":
            return np.full(len(self.tv), share)
        values = self.divergences[divergence]
        return (values <= np.quantile(values, share)).astype(float)


def chosen(study: Study) -> list[str]:
    """Data sets that are measured."""
    return [name for name, suite in SUITES.items() if not study.suites or suite in study.suites]


def laws(study: Study, name: str, *, tuning: bool = False) -> Laws:
    """One text of the target a prompt, both laws along it, temperature 1."""

    def read() -> Laws:
        count, skip = (study.tuning, 0) if tuning else (max(ENOUGH, study.prompts), study.tuning)
        suite = study.suite(SUITES[name], count, skip)
        found = study.laws(suite, f"{name}: ")
        p, q = found.raw_p.double(), found.raw_q.double()
        drawn = q
        if study.chats:  # greedy drafts; a group of tokens is none
            drawn = one_hot(q if found.outcomes is None else q.masked_fill(found.outcomes < 0, 0.0))
        loss = kl_divergence(q, p) + entropy(q) - entropy(p)  # −E_q ln p + E_p ln p
        texts = np.repeat(np.arange(len(found.lengths)), found.lengths)
        named = {name: of(p, q).numpy() for name, of in DIVERGENCES.items()}
        return Laws(texts, loss.numpy(), tv_distance(p, drawn).numpy(), overlap(p, drawn).numpy(), named)

    return study.once(("laws", name, tuning), read)


def levels(found: Laws) -> dict[str, float]:
    """T at three levels: SD's acceptance, the last T that loses a fifth of the gap or less, and one between.

    Where SD's acceptance costs a fifth already, the next two thresholds.
    """
    divergence = found.divergences[JS]
    shares = np.array([(divergence < t).mean() for t in THRESHOLDS])
    losses = np.array([(found.loss * (divergence < t)).sum() / found.loss.sum() for t in THRESHOLDS])
    low = min(int(np.abs(shares - found.overlap.mean()).argmin()), len(THRESHOLDS) - 3)
    high = max(int((losses <= FIFTH).sum()) - 1, low + 2)
    return dict(zip(LEVELS, (THRESHOLDS[i] for i in (low, (low + high) // 2, high)), strict=True))


def one_threshold(found: Sequence[Laws]) -> float:
    """The last T that loses at most a tenth of the gap, all data sets together."""
    loss = np.concatenate([one.loss for one in found])
    divergence = np.concatenate([one.divergences[JS] for one in found])
    fitting = [t for t in THRESHOLDS if (loss * (divergence < t)).sum() <= TENTH * loss.sum()]
    return max(fitting, default=THRESHOLDS[0])


def longest(study: Study, suite: Suite) -> int:
    """Longest answer: the suite's own where the pair answers questions, else the paper's usual one here."""
    return study.settings.new_tokens or (suite.new_tokens if study.chats else study.new_tokens)


def amount(study: Study) -> str:
    """How long answers are."""
    whole = study.chats and study.settings.new_tokens is None
    return "answers as long as the suite's" if whole else f"{study.new_tokens} new tokens"


def drafted(study: Study, gamma: int, accept: str) -> str:
    """A method by the paper's drafts (greedy, Appendix D) where the pair answers questions, else by drawn ones."""
    if not study.chats:
        return f"stop=fixed(gamma={gamma}),accept={accept}"
    return f"drafter=model(greedy=true),stop=fixed(gamma={gamma}),accept={accept}"


def drawn_or_greedy(study: Study) -> str:
    """How drafts and replacements are chosen, and what is not scored."""
    if not study.chats:
        return "drawn drafts (greedy ones would be a gain by the log-likelihood)"
    code = "; HumanEval is scored with --run-code" if "HumanEval" in chosen(study) else ""
    return f"greedy drafts, drawn replacements{code}"


def sd_runs(study: Study, name: str) -> dict[int, Answers]:
    """Exact decoding at each L, on the prompts to tune on."""

    def run() -> dict[int, Answers]:
        arms = {str(n): drafted(study, n, "exact") for n in LENGTHS}
        suite = study.suite(SUITES[name], study.tuning)
        found = study.answers(f"{name} L", suite, arms, 1.0, new_tokens=longest(study, suite))
        return {int(n): one for n, one in found.items()}

    return study.once(("sd", name), run)


def lengths(study: Study) -> list[PaperTable]:
    """Table 1: SD at each L, speed and the draft's share."""
    rows, rising, slower = [], [], []
    for name in chosen(study):
        found = sd_runs(study, name)
        shares = {n: (one.drafted, one.tokens) for n, one in found.items()}
        rows.append(
            [
                name,
                "tokens/s",
                *(f"{found[n].tokens.sum() / found[n].seconds.sum():.1f}" for n in LENGTHS),
                "–",
            ]
        )
        each = [cell(percent(ratio_of_sums(*shares[n])), 1) for n in LENGTHS]
        rows.append([name, "draft's share, %", *each, SHARES[name]])
        rising.append(Check(f"{name}, 15 less 5, points", percent(difference(shares[15], shares[5])), 0))
        slower.append(Check(f"{name}, speed at 15 over 5", found[15].speed_over(found[5]), 1.1, above=False))
    claims = [
        Claim("The draft's share grows with L, by 5 to 10 points from 5 to 15.", (*rising,)),
        Claim(
            "Each text has an optimal L: longer is hardly faster; required here: at 15 less than 1.1 times.",
            (*slower,),
        ),
    ]
    told = f"Exact decoding, {study.tuning} prompts a data set, {amount(study)}. Paper: from L = 5 to 15."
    head = ("data set", "", *(f"L={n}" for n in LENGTHS), "paper")
    return [PaperTable("Table 1", told, head, rows, claims, study.tuning)]


def runs(study: Study, name: str) -> dict[str, Answers]:
    """Every arm of Tables 2 and 3 on one data set."""

    def run() -> dict[str, Answers]:
        found, tried = laws(study, name, tuning=True), sd_runs(study, name)
        gamma = max(LENGTHS, key=lambda n: tried[n].tokens.sum() / tried[n].seconds.sum())
        thresholds = levels(found)
        if len(chosen(study)) > 1:
            thresholds[COMMON] = one_threshold([laws(study, one, tuning=True) for one in chosen(study)])
        kept = {arm: float((found.divergences[JS] < t).mean()) for arm, t in thresholds.items()}
        specs = {DRAFT: "draft-only", TARGET: "autoregressive", SD: drafted(study, gamma, "exact")}
        specs |= {
            arm: drafted(study, longer(gamma, kept[arm]), f"fuzzy(threshold={t})")
            for arm, t in thresholds.items()
        }
        rate = kept[MIDDLE]
        specs[RANDOM] = drafted(study, longer(gamma, rate), f"random(rate={rate:.3f})")
        suite = study.suite(SUITES[name], study.prompts, study.tuning)
        most = longest(study, suite)
        return study.answers(name, suite, specs, 1.0, new_tokens=most, repeats=study.repeats, quality=True)

    return study.once(("runs", name), run)


def fewest(found: Iterable[Mapping[str, Answers]]) -> int:
    """Prompts of the smallest data set."""
    return min(arms[SD].prompts for arms in found)


def longer(gamma: int, kept: float) -> int:
    """L for a method that keeps this share of its drafts: the next length where it keeps close to all."""
    further = [n for n in LENGTHS if n > gamma]
    return further[0] if further and kept >= CLOSE_TO_ALL else gamma


def with_scores(study: Study) -> list[str]:
    """Data sets whose answers have a score; HumanEval's accuracy needs its programs to be run.

    Raises:
        UserError: there is none.
    """
    found = [
        name for name in chosen(study) if name != "HumanEval" or not study.chats or study.settings.run_code
    ]
    if not found:
        raise UserError("HumanEval alone has no accuracy unless its programs are run: give --run-code")
    return found


def score(study: Study, one: Answers) -> Quotient:
    """Accuracy where the pair answers questions, else the target's log-likelihood a token.

    Raises:
        SprinterError: no answer has it.
    """
    found = one.quality("exact_match") or one.quality("pass_at_1") if study.chats else one.log_likelihood
    if found is None:
        raise SprinterError(f"no answer by {one.spec} has an accuracy")
    return found


def joined(parts: Sequence[Quotient]) -> Quotient:
    """All data sets together."""
    return np.concatenate([top for top, _ in parts]), np.concatenate([bottom for _, bottom in parts])


def of_gap(one: Quotient, base: Quotient, target: Quotient, draft: Quotient) -> BootstrapInterval:
    """What ``one`` scores less than ``base``, as a share of the gap between target and draft."""

    def statistic(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        mine, theirs, t, d = (
            top[rows].sum(-1) / bottom[rows].sum(-1) for top, bottom in (one, base, target, draft)
        )
        return np.asarray((theirs - mine) / (t - d))

    return bootstrap(statistic, len(one[0]))


def over_allocation(
    one: Sequence[Quotient], target: Sequence[Quotient], draft: Sequence[Quotient]
) -> BootstrapInterval:
    """Score beyond that of whole texts by target or draft, mixed to be as fast (section 5.3).

    Args:
        one, target, draft: (score, seconds a token) of each.
    """

    def statistic(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        (s, t), (st, tt), (sd, td) = (
            [top[rows].sum(-1) / bottom[rows].sum(-1) for top, bottom in of] for of in (one, target, draft)
        )
        share = (td - t) / (td - tt)  # below 0: slower than the target alone
        return np.asarray(s - (sd + np.clip(share, 0, 1) * (st - sd)))

    return bootstrap(statistic, len(one[0][0]))


def levels_table(study: Study) -> list[PaperTable]:
    """Table 2 and Figure 2: quality and speed at three levels; Appendix E: random acceptance."""
    found = {name: runs(study, name) for name in chosen(study)}
    rows = []
    for name, arms in found.items():
        for arm, one in arms.items():
            shown = "–"
            if name in with_scores(study):
                value = ratio_of_sums(*score(study, one))
                shown = cell(percent(value), 1) if study.chats else cell(value)
            share = "–" if arm in (DRAFT, TARGET) else cell(ratio_of_sums(one.drafted, one.rounds))
            rows.append([
                name, arm, f"`{one.spec}`", shown, ACCURACY[name].get(arm, "–"),
                cell(ratio_of_sums(*one.drift), 3), cell(one.speed_over(arms[SD])), OVER_SD[name].get(arm, "–"), share,
                ALEN[name].get(arm, "–"),
            ])  # fmt: skip

    def whole(arm: str) -> Quotient:
        return joined([score(study, found[name][arm]) for name in with_scores(study)])

    def seconds(arm: str) -> Quotient:
        return joined([(found[name][arm].seconds, found[name][arm].tokens) for name in with_scores(study)])

    def faster(arm: str) -> BootstrapInterval:
        return ratio_of_ratios(seconds(SD), seconds(arm))

    target, draft, sd = whole(TARGET), whole(DRAFT), whole(SD)
    gap = Check("score of the target less the draft's", difference(target, draft), 0.0)
    missing = (
        ""
        if gap.outcome
        else "target and draft do not differ significantly by this score, so there is no gap to lose"
    )

    def loses(arm: str, most: float, least: float) -> tuple[Check, ...]:
        lost = Check("loss, share of the gap", of_gap(whole(arm), sd, target, draft), most, above=False)
        return lost, Check("speed over SD", faster(arm), least)

    both = [(whole(arm), seconds(arm)) for arm in (TARGET, DRAFT)]
    better = [
        Check(f"{arm}, score", over_allocation((whole(arm), seconds(arm)), *both), 0.0) for arm in LEVELS
    ]
    drifts = [joined([found[name][arm].drift for name in with_scores(study)]) for arm in (MIDDLE, RANDOM)]
    chance = (
        Check("FSD (Med.) less random, score", difference(whole(MIDDLE), whole(RANDOM)), 0.0),
        Check("FSD (Med.) less random, drift", difference(*drifts), 0.0, above=False),
    )
    claims = [
        Claim("The target is better than the draft (a condition for what follows).", (gap,)),
        Claim(
            "FSD (Low) has SD's accuracy (required here: at most a tenth of the gap less), 1.07 to 1.23 times as fast.",
            loses(LOW, TENTH, 1.07), missing,
        ),
        Claim(
            "FSD (High) loses about a fifth of the gap and is 1.15 to 1.52 times as fast.", loses(HIGH, FIFTH, 1.15),
            missing,
        ),
        Claim("Figure 2: FSD is better than whole texts by target or draft at its speed.", (*better,), missing),
        Claim("Appendix E: random acceptance at the same rate does significantly worse.", chance),
    ]  # fmt: skip
    what = "accuracy, %" if study.chats else "log-likelihood a token"
    head = (
        "data set",
        "arm",
        "method",
        what,
        "paper",
        "drift",
        "speed over SD",
        "paper",
        "kept a round",
        "paper",
    )
    counts = ", ".join(f"{name} {arms[SD].prompts}" for name, arms in found.items())
    told = f"Prompts: {counts}. Temperature 1, {amount(study)}, {drawn_or_greedy(study)}. Paper: three pairs."
    return [PaperTable("Table 2, Figure 2 and Appendix E", told, head, rows, claims, fewest(found.values()))]


def common(study: Study) -> list[PaperTable]:
    """Table 3: one threshold for all data sets."""
    paper = {"GSM8K": "−0.4; −0.4; −1.2", "CSQA": "−0.4; −0.4; −0.8", "MMLU": "−0.2; −0.7; −2.0",
             "HumanEval": "−0.2; 0.2; 1.6"}  # fmt: skip
    rows, quality, speed = [], [], []
    for name in chosen(study):
        arms = runs(study, name)
        if COMMON not in arms:
            rows.append([name, "–", "–", paper[name], "–"])
            continue
        one, sd = arms[COMMON], arms[SD]
        told = "–"
        if name in with_scores(study):
            apart = difference(score(study, one), score(study, sd))
            shown, least = (percent(apart), -2.0) if study.chats else (apart, -0.05)
            quality.append(Check(f"{name}, score less SD's", shown, least))
            told = cell(shown)
        rows.append([name, f"`{one.spec}`", told, paper[name], cell(one.speed_over(sd))])
        speed.append(Check(f"{name}, speed", one.speed_over(sd), 1.0))
    why = "" if speed else "one data set was asked for (--suite)"
    claims = [
        Claim(
            "One T keeps about SD's accuracy; required here: at most 2 points (0.05 nats a token) less.",
            (*quality,),
            why,
        ),
        Claim("It is faster than SD (1.08 to 1.26 times) on every data set.", (*speed,), why),
    ]
    what = "accuracy less SD's, points" if study.chats else "log-likelihood less SD's"
    told = (
        "The paper's pairs have T of 0.4, 0.3 and 0.7. Here T is the last that loses at most a tenth of the gap in "
        "expected log-likelihood on the tuning prompts of all data sets. Paper: Qwen2.5, Llama3.1, Gemma2."
    )
    head = ("data set", "method", what, "paper", "speed over SD")
    prompts = fewest(runs(study, name) for name in chosen(study))
    return [PaperTable("Table 3", told, head, rows, claims, prompts)]


def spread(study: Study) -> list[PaperTable]:
    """Figure 3: how divergences are spread; Appendix C: which divergence keeps quality best."""
    found = {name: laws(study, name) for name in chosen(study)}
    rows, means, losses = [], dict[str, Quotient](), []
    better: list[Check] = []
    chance: list[Check] = []
    for name, one in found.items():
        js = one.divergences["js"]
        means[name] = one.mean(js)
        ends = zip(EDGES, (*EDGES[1:], np.inf), strict=True)
        shares = [f"{((js >= low) & (js < high)).mean():.2f}" for low, high in ends]
        rows.append(
            [
                name,
                *shares,
                cell(ratio_of_sums(*means[name]), 3),
                cell(ratio_of_sums(*one.mean(one.overlap)), 3),
            ]
        )
        for divergence in (*DIVERGENCES, "chance"):
            lost = [one.lost(one.keeping(divergence, share)) for share in KEPT]
            drifts = [(one.tv * one.keeping(divergence, share)).mean() for share in KEPT]
            shown = [f"{cell(ratio_of_sums(*q))} · {d:.3f}" for q, d in zip(lost, drifts, strict=True)]
            losses.append([name, divergence, *shown])
        for rival, kept in (("kl", better), ("kl_reversed", better), ("tv", better), ("chance", chance)):
            apart = difference(*(one.lost(one.keeping(d, 0.7)) for d in (JS, rival)))
            kept.append(Check(f"{name}, less {rival}'s", apart, 0.0, above=False))
    easier = [
        Check(f"{a} less {b}", _apart(means[a], means[b]), 0.0, above=False)
        for a in ("GSM8K", "HumanEval") for b in ("CSQA", "MMLU") if a in means and b in means
    ]  # fmt: skip
    why = "" if easier else "only one side was asked for (--suite)"
    claims = [Claim("GSM8K and HumanEval have lower divergences than CSQA and MMLU.", (*easier,), why)]
    more = [
        Claim("JS keeps quality best; required here: it loses least at 70 % kept.", (*better,)),
        Claim("Tokens that are kept by chance lose more.", (*chance,)),
    ]
    prompts = min(int(one.texts[-1]) + 1 for one in found.values())
    told = (
        f"{prompts} prompts a data set, {study.new_tokens} tokens drawn from the target, temperature 1; laws of "
        "large vocabularies have the most probable tokens, and groups of the rest."
    )
    bins = [f"from {low:g}" for low in EDGES]
    cells = (
        f"{told} Cells: share of the gap in expected log-likelihood that is lost · mean drift, where the draft's "
        "tokens are kept at the positions of least divergence. js_reference is the published code's JS."
    )
    return [
        PaperTable("Figure 3", told, ("data set", *bins, "mean JS", "SD accepts"), rows, claims, prompts),
        PaperTable(
            "Appendix C",
            cells,
            ("data set", "divergence", *(f"{share:.0%} kept" for share in KEPT)),
            losses,
            more,
            prompts,
        ),
    ]


def _apart(a: Quotient, b: Quotient) -> BootstrapInterval:
    """Mean of one data set less that of another, whose prompts are others: drawn from all of them, unpaired."""
    left = [np.concatenate([part, np.zeros(len(b[0]))]) for part in a]
    right = [np.concatenate([np.zeros(len(a[0])), part]) for part in b]
    return difference((left[0], left[1]), (right[0], right[1]))


FSD = Paper(
    "Fuzzy Speculative Decoding (Holsman et al. 2025)",
    "The protocol is Appendix D's. L, the draft length, is the one of 5, 10, 15 and 20 that is fastest for exact "
    "decoding (SD). A method that keeps almost all draft tokens gets the next longer one. T_SD is the threshold that "
    "accepts as much as SD. From there T rises until a fifth of the gap between target and draft is lost. L and "
    "thresholds are chosen on other prompts. Thresholds from 0.01 to 1 are compared by both models' laws along the "
    "target's own texts. The divergence is the published code's JS.",
    {"lengths": lengths, "levels": levels_table, "one-threshold": common, "divergences": spread},
    {"prompts": 30, "tuning_prompts": 20, "new_tokens": 48, "repeats": 1},
    tuple(SUITES.values()),
)
"""The paper's protocol."""
