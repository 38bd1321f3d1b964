"""Kinds of pictures that ``figures.py`` draws: panels, which draw into axes, and figures, which are made of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from sprinter.decode import ACCEPT, AcceptRule, Drafter, Judge, Model, Purpose, Root, parse_method
from sprinter.decode.accept import TargetCall, Verdict
from sprinter.decode.draft import AskDraft, Draft, Record
from sprinter.decode.enumerate import ChainDriver
from sprinter.decode.grow import grow_from
from sprinter.decode.loop import Limits, decode
from sprinter.decode.sequence import Tree
from sprinter.laws import overlap, tv_distance
from sprinter.plots import COLOURS
from sprinter.random import AddressedDraws

Panel = Callable[[Axes], set[str] | None]
"""Draws into axes; returns the kinds of boxes that need a legend."""
Drawing = Callable[[], Figure]
BLUE, ORANGE, SKY, GREEN, RED, PURPLE, GREY, INK, PALE = (
    COLOURS[name] for name in ("blue", "orange", "sky", "green", "red", "purple", "grey", "ink", "grid")
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# The small example that the accept rules' left panels share
P = torch.tensor([0.30, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.02], dtype=torch.float64)
Q = torch.tensor([0.20, 0.30, 0.08, 0.04, 0.16, 0.02, 0.12, 0.08], dtype=torch.float64)


def panels(
    *parts: Panel, height: float = 3.1, words: dict[str, str] | None = None, side: str = ""
) -> Drawing:
    """A figure 8 inches wide, panels from left to right, and a legend of the boxes in them."""

    def draw() -> Figure:
        fig, axes = plt.subplots(1, len(parts), figsize=(8, height), layout="constrained", squeeze=False)
        kinds: set[str] = set()
        for ax, part in zip(axes.flat, parts, strict=True):
            kinds |= part(ax) or set()
        legend_of(fig, kinds, words, side)
        return fig

    return draw


def said(
    ax: Axes, title: str, x: str = "", y: str = "", legend: str = "", bare: bool = False, **limits: Any
) -> None:
    """Title, labels and limits of a panel; ``bare``: without ticks and frame."""
    ax.set(xlabel=x, ylabel=y, title=title, **limits, **({"xticks": (), "yticks": ()} if bare else {}))
    if bare:
        ax.spines[:].set_visible(False)
    if legend:
        ax.legend(loc=legend)


# --- random laws, and texts of the real loop --------------------------------------------------------------------------
@dataclass(frozen=True)
class Pair:
    """Random laws after a prefix, by its hash. Where the target is sure, the draft agrees more: as models do."""

    vocab: int = 8
    seed: int = 0
    noise: float = 1.0
    _memory: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)
    known_answers: dict[Any, Any] = field(default_factory=dict, compare=False)

    def laws(self, prefix: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """p and q, each ``[vocab]``, float64."""
        if prefix not in self._memory:
            digest = hashlib.sha256(f"{self.seed}{prefix}".encode()).digest()
            chance = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            sizes = (1, self.vocab, self.vocab)
            sharp, z, e = (torch.randn(n, generator=chance, dtype=torch.float64) for n in sizes)
            logits = 2.2 * (0.5 * sharp).exp() * z
            self._memory[prefix] = torch.softmax(logits, -1), torch.softmax(logits + self.noise * e, -1)
        return self._memory[prefix]

    def p(self, prefix: tuple[int, ...]) -> Tensor:
        return self.laws(prefix)[0]

    def q(self, prefix: tuple[int, ...]) -> Tensor:
        return self.laws(prefix)[1]

    def score(self, head: str, text: tuple[int, ...]) -> float:
        """A head that estimates the overlap of p and q after a prefix (SpecDec++'s: min(1, p/q) of a text's last
        token), with an error that depends on the text."""
        if head == "specdec++":
            p, q = self.laws(text[:-1])
            true = min(1.0, float(p[text[-1]] / q[text[-1]]))
        else:
            true = float(overlap(*self.laws(text)))
        digest = hashlib.sha256(f"{'gate' if head == 'disco' else head}{self.seed}{text}".encode()).digest()
        return min(1.0, max(0.0, true + 0.3 * (int.from_bytes(digest[:6]) / 2**48 - 0.5)))


@cache
def law_pairs(total: int = 400) -> tuple[Tensor, Tensor]:
    """p and q of many prefixes, ``[total, 32]`` each."""
    both = [Pair(32, seed=1, noise=1.7).laws((i,)) for i in range(total)]
    return torch.stack([p for p, _ in both]), torch.stack([q for _, q in both])


class Followed(NamedTuple):
    """One decoding: its record, what was drafted round by round, and the signals of each draft token."""

    record: Record
    drafted: dict[int, list[int]]
    signals: dict[int, list[dict[str, float]]]


def follow(spec: str, length: int, seed: int = 0) -> Followed:
    """Decode with the real loop on a Pair, and record its driver's answers."""
    method, record, prompt, draws = parse_method(spec), Record(), (0,), AddressedDraws(seed)
    driver: Any = ChainDriver(Pair(), draws, needs_raw=method.accept.needs_raw, drafter=method.drafter)  # type: ignore[arg-type]
    loop = decode(prompt, method, Limits(length), draws, record, complete=True)
    out, request = Followed(record, {}, {}), next(loop, None)
    while request is not None:
        sequence, answer = request.sequence, driver.answer(request)
        if isinstance(request, AskDraft) and isinstance(answer, Draft):
            out.drafted.setdefault(sequence.round, []).extend(answer.tokens)
            row = {name: float(values[0]) for name, values in answer.signals.items() if len(values)}
            row["uniform"] = draws.uniform(sequence.round, len(sequence), Purpose.TRUST)
            out.signals.setdefault(sequence.round, []).append(row)
        try:
            request = loop.send(answer)
        except StopIteration:
            request = None
    record.count()
    return out


# --- boxes ------------------------------------------------------------------------------------------------------------
KINDS = {  # of a box: face, edge, letter, line style
    "trusted": (ORANGE, ORANGE, "black", "-"), "accepted": (SKY, SKY, "black", "-"),
    "refused": ("white", RED, RED, "-"), "dropped": ("white", GREY, GREY, ":"),
    "discarded": ("white", PURPLE, PURPLE, "--"), "replacement": (RED, RED, "white", "-"),
    "bonus": (BLUE, BLUE, "white", "-"), "target": (INK, INK, "white", "-"),
}  # fmt: skip
WORDS = {"target": "the target's own", "discarded": "discarded by the stop rule"}


def box(
    ax: Axes, x: float, y: float, token: int, kind: str, width: float = 0.86, height: float = 0.74
) -> None:
    """Draw one token. A rejected one is struck through."""
    face, edge, ink, line = KINDS[kind]
    ax.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, fc=face, ec=edge, ls=line, lw=1.1))
    ax.text(x, y, LETTERS[token], ha="center", va="center_baseline", color=ink, fontsize=8)
    for near, far in ((0.5, 0.22), (-0.22, -0.5)) if kind == "refused" else ():  # a gap where the letter is
        ax.plot([x + width * near, x + width * far], [y + height * near, y + height * far], color=RED, lw=0.9)


def legend_of(fig: Figure, kinds: set[str], words: dict[str, str] | None = None, side: str = "") -> None:
    """A legend of the boxes, below the panels."""
    if shown := [kind for kind in KINDS if kind in kinds]:
        handles = [Rectangle((0, 0), 1, 1, fc=KINDS[k][0], ec=KINDS[k][1], ls=KINDS[k][3]) for k in shown]
        labels = [(words or WORDS).get(kind, kind) for kind in shown]
        place = f"outside lower {side or 'center'}"
        fig.legend(handles, labels, loc=place, ncols=len(labels), columnspacing=1.2)


def legend_below(ax: Axes, side: str = "left") -> None:
    """A panel's legend, below it."""
    handles, labels = ax.get_legend_handles_labels()
    ax.figure.legend(handles, labels, loc=f"outside lower {side}", ncols=len(labels), columnspacing=1.2)


def rounds(title: str, spec: str, count: int = 8, seed: int = 0, first: bool = True, **style: Any) -> Panel:
    """The first rounds of a text, one per row: draft tokens, their verdicts, and the target's tokens."""

    def draw(ax: Axes) -> set[str]:
        followed, seen = follow(spec, 12 * count, seed), set[str]()
        for round in range(1, count + 1):
            final = [token for token in followed.record.tokens if token.round == round]
            drafted, own = followed.drafted.get(round, []), [token.origin.value for token in final]
            added = own.pop() if own[-1] in ("replacement", "bonus", "target") else None
            rest = len(drafted) - len(own)
            if rest and added == "replacement":
                own += ["refused", *["dropped"] * (rest - 1)]
            own += ["discarded"] * (len(drafted) - len(own))
            for i, (x, kind) in enumerate(zip(drafted, own, strict=True)):
                box(ax, i + 1, round, x, kind)
            if added is not None:
                box(ax, len(drafted) + 1.25, round, final[-1].id, added)
            seen |= {*own, *([added] if added else ())}
        width = max(len(followed.drafted.get(r, [])) for r in range(1, count + 1)) + 2
        ax.set(xlim=(0.4, max(width, 7)), ylim=(count + 0.6, 0.4), yticks=range(1, count + 1))
        ax.set(xlabel="token of the round", ylabel="round" if first else "")
        ax.set_xticks(range(1, width - 1, 1 if width < 14 else 2))
        ax.set_title(title, **style)
        return seen

    return draw


# --- accept: a position -----------------------------------------------------------------------------------------------
class Curve(NamedTuple):
    """A rule's curve as its parameter varies; some values are marked. ``rule``: a spec with {}, or a function."""

    rule: str | Callable[[float], AcceptRule]
    values: Sequence[float]
    label: str
    marks: Mapping[float, str] = MappingProxyType({})
    color: str = GREEN
    offset: tuple[int, int] = (6, 4)
    line: Any = "-"
    side: str = "left"

    def at(self, value: float) -> tuple[float, float]:
        return cost(accept(self.rule.format(value)) if isinstance(self.rule, str) else self.rule(value))


def accept(spec: str) -> Any:
    """The accept rule of a spec."""
    return parse_method(f"accept={spec}").accept


def cost(rule: AcceptRule, laws: tuple[Tensor, Tensor] | None = None) -> tuple[float, float]:
    """Mean P(reject) and mean TV(π, p) over the law pairs."""
    p, q = laws or law_pairs()
    kept = (q * rule.keep(p, q)).sum(-1)
    return float((1 - kept).mean()), float(tv_distance(rule.law(p, q), p).mean())


def plane(*curves: Curve, ceiling: float | None = None, right: float = 1.02) -> Panel:
    """The plane of P(reject) and TV(π, p), with Theorem 5's line."""

    def draw(ax: Axes) -> None:
        far = float(tv_distance(*law_pairs()).mean())
        ax.fill([0, far, 0], [0, 0, far], color=PALE, lw=0)
        ax.plot([0, far], [far, 0], color=GREY, lw=1.4)
        ax.annotate("no rule\nreaches here", (right * 0.015, far * 0.05), color="#666666", fontsize=7.5)
        ax.set(xlim=(0, right), ylim=(0, ceiling or far * 1.12))
        for one in curves:
            points = [one.at(value) for value in one.values]
            ax.plot(*zip(*points, strict=True), color=one.color, lw=2, ls=one.line, label=one.label)
            for value, text in one.marks.items():
                at = one.at(value)
                ax.plot(*at, "o", color=one.color, ms=5, mec="white", mew=0.6)
                shift, align = ((6, 5), "left") if at[1] < 0.01 else (one.offset, one.side)
                ax.annotate(text, at, shift, textcoords="offset points", fontsize=8, color=INK, ha=align)
        title = "Trade: means over 400 random pairs of laws"
        said(ax, title, "P(reject) of a draft token", "TV(π, p)", "upper right")

    return draw


def example(rule: str | AcceptRule, title: str, panel: Panel) -> Drawing:
    """The keep probability b above; below, p and q as bars and π as diamonds. A panel to the right."""

    def draw() -> Figure:
        fig = plt.figure(figsize=(8, 3.3), layout="constrained")
        grid = fig.add_gridspec(2, 2, height_ratios=(1, 3))
        ax_b, ax, right = (fig.add_subplot(grid[at]) for at in ((0, 0), (1, 0), (slice(None), 1)))
        own: Any = accept(rule) if isinstance(rule, str) else rule
        b, law, places = own.keep(P, Q), own.law(P, Q), range(len(P))
        ax_b.bar(places, b, width=0.8, color=PALE, ec=GREY, lw=0.6)
        ax_b.set(ylim=(0, 1.05), yticks=(0, 1), ylabel="keep b", xticks=(), title=title)
        ax.bar([i - 0.2 for i in places], P, width=0.38, color=BLUE, label="p, target")
        ax.bar([i + 0.2 for i in places], Q, width=0.38, color=ORANGE, label="q, draft")
        ax.plot(
            places, law, "D", color=INK, ms=4.5, mfc="white", label="π, this rule", clip_on=False, zorder=4
        )
        ax.set_xticks(places, list(LETTERS[: len(P)]))
        ax.set(ylabel="probability", xlabel=f"token      TV(π, p) = {float(tv_distance(law, P)):.2f}")
        ax.legend(loc="upper right")
        panel(right)
        return fig

    return draw


def trade(spec: str, *curves: Curve, **limits: float) -> Drawing:
    """A rule on the example, and curves in the plane."""
    return example(spec, spec, plane(*curves, **limits))


# --- accept: a chain, several drafts ----------------------------------------------------------------------------------
LENGTHS = range(1, 9)


@cache
def chains() -> tuple[Tensor, Tensor, Tensor]:
    """200 drafts of up to 15 tokens: tokens ``[200, 16]``, p and q ``[200, 16, V]``."""
    p, q = (laws.view(200, 16, -1) for laws in law_pairs(3200))
    chance = torch.Generator().manual_seed(5)
    return torch.stack([torch.multinomial(laws, 1, generator=chance).squeeze(-1) for laws in q]), p, q


def staying(rule: Any, n: int) -> Tensor:
    """Chance that at least k = 1 ... n tokens of each draft stay, ``[drafts, n]``."""
    tokens, p, q = chains()
    if isinstance(rule, AcceptRule):
        return rule.keep(p, q).gather(-1, tokens[..., None]).squeeze(-1)[:, :n].cumprod(-1)
    ends = [rule.ends(x[:n].tolist(), a[: n + 1], b[:n])[0] for x, a, b in zip(tokens, p, q, strict=True)]
    return torch.stack(ends).flip(-1).cumsum(-1).flip(-1)[:, 1:]


@cache
def by_length(rules: tuple[tuple[str, Any], ...]) -> list[tuple[str, str, str, str, list[Tensor]]]:
    """Label, colour, line and mark of each rule, and ``staying`` by the draft's length."""
    looks = zip(rules, (GREEN, GREY, PURPLE), ("-", "--", ":"), "os^", strict=False)
    return [(name, c, ls, m, [staying(rule, n) for n in LENGTHS]) for (name, rule), c, ls, m in looks]


def kept_by_length(rules: Mapping[str, Any]) -> Panel:
    """Draft tokens kept a round against the draft's length, at most three rules."""

    def draw(ax: Axes) -> None:
        for label, color, line, mark, stays in by_length(tuple(rules.items())):
            kept = [float(one.sum(-1).mean()) for one in stays]
            ax.plot(LENGTHS, kept, line, marker=mark, color=color, ms=4, label=label)
        y = "draft tokens kept a round"
        said(ax, "200 drafts, random laws", "draft length", y, "best", ylim=(0, None))

    return draw


def judged_chains(rules: Mapping[str, Any], chain: int) -> Drawing:
    """One draft on the left; draft tokens kept a round against the draft's length on the right."""

    def one_draft(ax: Axes) -> None:
        for label, color, line, mark, stays in by_length(tuple(rules.items())):
            ax.plot(LENGTHS, stays[-1][chain], line, marker=mark, color=color, ms=4, label=label)
        said(ax, "One draft of 8 tokens", "k", "chance that k tokens stay, or more", "best", ylim=(0, 1.03))

    return panels(one_draft, kept_by_length(rules))


class Listening(AddressedDraws):
    """Draws that remember which candidate was tried with what chance."""

    tried: dict[tuple[int, int], tuple[float, bool]]

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        kept = super().keep(chances, round, position, row)
        self.tried[row, position - 1] = (chances[0], kept[0])
        return kept


def several_round(name: str, drafts: int, round: int, pair: Pair) -> tuple[Tree, Verdict, dict[Any, Any]]:
    """One judged round of independent drafts of 4 tokens, and what was tried, by row and depth."""
    draws = Listening(7)
    draws.tried = {}
    growth = Model(drafts=drafts).growth(Root(draws, round, 1, 4))
    paths = grow_from(growth, lambda path: pair.q((round, *path)))
    tree, _ = growth.finish()
    p = torch.stack([pair.p((round, *path)) for path in paths.values()])
    return tree, ACCEPT.get(name)().judge(TargetCall(tree, p, None, draws, round, 1)), draws.tried


# --- trees ------------------------------------------------------------------------------------------------------------
FOREST = Pair(12, seed=5)
"""The laws that trees grow on."""


def judged(
    rule: Judge, drafter: Drafter, depth: int, seed: int, start: int = 0, blind: bool = False
) -> tuple[Tree, Verdict, Any]:
    """One tree on random laws, its verdict, and each node's q at its parent.

    Args:
        blind: the drafter has the mean law after all paths of a node's length, as a head that sees no path.
    """
    pair, text, draws = FOREST, (start, seed), AddressedDraws(seed)

    def mean(depth: int, path: tuple[int, ...] = ()) -> Tensor:
        own = pair.q((*text, *path))
        after = [p * mean(depth - 1, (*path, x)) for x, p in enumerate(own)] if depth else []
        return torch.stack(after).sum(0) if depth else own

    growth = drafter.growth(Root(draws, 1, len(text), depth))
    means = [mean(d) for d in range(depth)] if blind else []
    paths = grow_from(growth, lambda path: means[len(path)] if blind else pair.q((*text, *path)))
    kept = growth.kept()
    tree, _ = growth.finish()
    p = torch.stack([pair.p((*text, *paths[node])) for node in (-1, *kept)])
    sure = [float(pair.q((*text, *paths[node][:-1]))[paths[node][-1]]) for node in kept]
    return tree, rule.judge(TargetCall(tree, p, None, draws, 1, len(text))), sure


def tree(drafter: Drafter, rule: Judge, depth: int, seed: int, title: str) -> Panel:
    """Nodes by level; the path that stays is filled, and what follows it stands behind it."""

    def draw(ax: Axes) -> None:
        (grown, verdict, sure), place, leaves = judged(rule, drafter, depth, seed), dict[int, float](), 0
        children, depths = grown.children(), [0, *grown.depths()]

        def lay(node: int) -> float:
            nonlocal leaves
            own = [lay(child) for child in children[node + 1]]
            leaves += not own
            place[node] = sum(own) / len(own) if own else -float(leaves)
            return place[node]

        lay(-1)
        for node, parent in enumerate(grown.parents or ()):
            ends = (depths[parent + 1], depths[node + 1])
            ax.plot(ends, (place[parent], place[node]), color=GREY, lw=0.4 + 3 * sure[node], zorder=1)
        for node in range(-1, len(grown.tokens)):
            ink, face, edge = ("white", GREEN, GREEN) if node in verdict.path else (INK, PALE, GREY)
            ax.text(
                depths[node + 1], place[node], LETTERS[grown.tokens[node]] if node >= 0 else "text", ha="center",
                va="center", fontsize=8, color=ink, zorder=2,
                bbox={"boxstyle": "round,pad=0.25", "fc": face, "ec": edge},
            )  # fmt: skip
        last = verdict.path[-1] if verdict.path else -1
        at, told = (depths[last + 1], place[last]), f"then {LETTERS[verdict.token]}"
        ax.annotate(told, at, (10, -11), textcoords="offset points", fontsize=8, color=BLUE)
        said(ax, title, "level", xlim=(-0.4, max(depths) + 0.6), ylim=(-leaves - 0.7, -0.2), yticks=())
        ax.set_xticks(range(max(depths) + 1))
        ax.spines["left"].set_visible(False)

    return draw


def sizes(*lines: tuple[Any, ...]) -> Panel:
    """Accepted tokens a round against the size of the tree: label, rule, drafters, colour, mark, and True where the
    drafter's laws do not see the path."""

    def draw(ax: Axes) -> None:
        for label, rule, drafters, color, mark, *blind in lines:
            made = [
                [judged(rule, one, one.levels or 3, seed, 1, bool(blind)) for seed in range(300)]
                for one in drafters
            ]
            nodes = [sum(len(grown.tokens) for grown, *_ in rounds) / 300 for rounds in made]
            kept = [sum(verdict.accepted for _, verdict, _ in rounds) / 300 for rounds in made]
            ax.plot(nodes, kept, marker=mark, color=color, ms=4, label=label)
        x, y = "nodes of the tree", "accepted draft tokens a round"
        said(ax, "300 rounds on random laws, 3 levels", x, y, "lower right")

    return draw


# --- stop, trust ------------------------------------------------------------------------------------------------------
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10)
"""Draft lengths of ``speculative``, with which other stop rules are compared."""


def steps(form: str, values: Sequence[float]) -> Panel:
    """The plane of draft steps and target calls: a method as a parameter varies, and fixed lengths."""

    def draw(ax: Axes) -> None:
        fixed = {"speculative(gamma={})": (COUNTS, GREY, "--s")}
        for one, (dial, color, line) in {**fixed, form: (values, GREEN, "-o")}.items():
            spots = [dialled(one.format(value))[:2] for value in dial]
            label = "fixed lengths 1 to 10" if color == GREY else re.sub(r"=\{.*", "", one.rpartition("(")[2])
            ax.plot(*zip(*spots, strict=True), line, color=color, ms=4, label=label)
            for value, spot in zip(dial, spots, strict=True):
                if color == GREEN and value in (dial[0], dial[-1]):
                    ax.annotate(f"{value:g}", spot, (5, 4), textcoords="offset points", fontsize=8)
        y = "target calls a token"
        said(ax, "Drafting against calls, random laws", "draft steps a token", y, "best", ylim=(0, None))

    return draw


def stopping(form: str, value: float, *others: float, seed: int = 0) -> Drawing:
    """Left: what the rule's parameter trades. Right: rounds of the method at ``value``."""
    spec = form.format(value)
    return panels(
        steps(form, sorted((value, *others))), rounds(spec, spec, 8, seed), height=3.5, side="right"
    )


@cache
def dialled(spec: str) -> tuple[float, float, float]:
    """Draft steps a token, target calls a token, mean drift: the real loop on random laws."""
    followed = follow(spec, 600, seed=4)
    stats, drafted = followed.record.stats, sum(len(tokens) for tokens in followed.drafted.values())
    return drafted / stats.new_tokens, stats.target_calls / stats.new_tokens, float(stats.mean_drift or 0.0)
