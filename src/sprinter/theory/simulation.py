"""The papers' numerical figures: closed forms and Monte Carlo estimates from the real decode loop, as JSON values.

Yin et al. 2024: Figure 2 (rejections at horizon T, batches, the scaling with M), 3 (batch improvement), 4 (the Pareto
front), 5 (a longer horizon). SPRINTER: Figures 5 and 6 (tokens trusted, stopping time).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.accept import Batch, Exact, Opt, Uno
from sprinter.decode.checks import at_least
from sprinter.decode.drafter import Model
from sprinter.decode.spec import Method
from sprinter.decode.stop import Fixed, Untrusted
from sprinter.errors import UserError
from sprinter.laws import tv_distance
from sprinter.theory.chains import (
    MarkovChain,
    batch_rejections,
    expected_rejections,
    mean_overlap,
    speculative_counts,
)
from sprinter.theory.front import bernoulli_improvement, best_loss, rejection, uniform_improvement
from sprinter.theory.montecarlo import ChainRun, ClassGate, estimate, simulate
from sprinter.theory.sequential import expected_stop_time, expected_trusted
from sprinter.theory.speculation import expected_tokens

__all__ = ["Setting", "batch_gain", "front_example", "rejections", "run_all", "trusted_tokens"]

Say = Callable[[str, int, int], None]
"""Progress callback: (what is simulated, texts done, texts in total)."""
_LEVEL = 0.99
_MANY = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)
_EPSILONS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.4)
_RATES = tuple(i / 20 for i in range(21))


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a simulation.

    Attributes:
        states, horizon, seed: parameters of the random chain (``MarkovChain.random``).
        drafts: numbers of drafts M.
        runs: texts per curve.
        long: horizon of the longer simulation (Figure 5), with a quarter of the texts; 0 leaves it out.

    Raises:
        UserError: a value is out of range.
    """

    states: int = 7
    horizon: int = 50
    seed: int = 10
    drafts: tuple[int, ...] = (4, 5)
    runs: int = 500
    long: int = 100

    def __post_init__(self) -> None:
        at_least("states", self.states, 2)
        at_least("horizon", self.horizon, 2)
        at_least("runs", self.runs, 8)
        at_least("long", self.long, 0)
        if any(not 2 <= m <= 8 for m in self.drafts):
            raise UserError(
                f"drafts={','.join(map(str, self.drafts))} is out of range: give batch sizes from 2 to 8"
            )


def run_all(setting: Setting, say: Say = lambda what, done, wanted: None) -> dict[str, Any]:
    """Data of every figure, and a list of all comparisons of a closed form with its simulation."""
    chain = MarkovChain.random(setting.states, setting.horizon, setting.seed)
    data: dict[str, Any] = {
        "rejections": rejections(chain, setting.drafts, setting.runs, setting.seed, say),
        "batch_gain": batch_gain(),
        "front": front_example(chain, setting.runs, setting.seed, say),
        "trusted": trusted_tokens(setting.runs, setting.seed, say),
    }
    if setting.long:
        longer = MarkovChain.random(setting.states, setting.long, setting.seed)
        data["longer"] = rejections(longer, (2,), max(8, setting.runs // 4), setting.seed, say)
    checks = [one for part in data.values() for one in part.get("checks", [])]
    held = sum(one["low"] <= one["closed"] <= one["high"] for one in checks)
    return {**data, "level": _LEVEL, "comparisons": len(checks), "within_interval": held}


# --- rejections ------------------------------------------------------------------------------------------------------
def rejections(chain: MarkovChain, drafts: tuple[int, ...], runs: int, seed: int, say: Say) -> dict[str, Any]:
    """Theorems 1 and 3 and short drafts on a chain: running means of simulations, closed forms, the scaling with M."""
    curves, checks = [], []
    for m in (1, *drafts):
        name = f"T={chain.horizon}, M={m}"
        closed = batch_rejections(chain, m)
        run = _simulate(chain, _to_horizon(chain.horizon, m), runs, seed, name, say)
        curves.append({"drafts": m, "closed": closed, **_running(run.rejections)})
        checks.append(_check(f"Theorem {1 if m == 1 else 3}: rejections, {name}", closed, run.rejections))
    short = _simulate(chain, Method(stop=Fixed(5)), runs, seed, f"T={chain.horizon}, gamma=5", say)
    counts = speculative_counts(chain, 5)
    checks.append(_check("rejections, gamma=5", counts.rejections, short.rejections))
    checks.append(_check("target calls, gamma=5", counts.target_calls, short.target_calls))
    alpha, limit = mean_overlap(chain), batch_rejections(chain, None)
    gammas = sorted({g for g in (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, chain.horizon) if g <= chain.horizon})
    full = speculative_counts(chain, chain.horizon, to_horizon=True)
    return {
        "horizon": chain.horizon,
        "states": chain.states,
        "overlap": alpha,
        "curves": curves,
        "scaling": {
            "drafts": list(_MANY),
            "rejections": [batch_rejections(chain, m) for m in _MANY],
            "limit": limit,
        },
        "short": {
            "gamma": gammas,
            "target_calls": [speculative_counts(chain, g).target_calls for g in gammas],
            "rejections": [speculative_counts(chain, g).rejections for g in gammas],
            "leviathan_calls": [chain.horizon / float(expected_tokens(alpha, g)) for g in gammas],
            "theorem_1_rejections": expected_rejections(chain),
            "theorem_1_target_calls": full.target_calls,
            "gamma_5": {"calls_over_theorem_1": counts.target_calls / full.target_calls, **counts._asdict()},
        },
        "checks": checks,
    }


def _to_horizon(horizon: int, drafts: int) -> Method:
    accept = Exact() if drafts == 1 else Batch()
    return Method(stop=Fixed(horizon), accept=accept, drafter=Model(drafts=drafts), to_horizon=True)


def _simulate(chain: MarkovChain, method: Method, runs: int, seed: int, name: str, say: Say) -> ChainRun:
    return simulate(chain, method, runs, seed=seed, progress=lambda done, wanted: say(name, done, wanted))


def _running(values: Tensor, points: int = 60) -> dict[str, Any]:
    """Mean of the first n values with its interval, at up to ``points`` values of n."""
    at = sorted({int(n) for n in torch.linspace(2, len(values), min(points, len(values) - 1))})
    means = [estimate(values[:n], _LEVEL) for n in at]
    return {"runs": at, "mean": [m.mean for m in means], "low": [m.low for m in means],
            "high": [m.high for m in means]}  # fmt: skip


def _check(what: str, closed: float, values: Tensor) -> dict[str, Any]:
    return {"what": what, "closed": closed, "runs": len(values), **estimate(values, _LEVEL)._asdict()}


# --- one position ----------------------------------------------------------------------------------------------------
def batch_gain() -> dict[str, Any]:
    """Number of rejections that M drafts save at one position, in closed form (Figure 3)."""
    drafts = list(range(1, 21))
    bernoulli = {
        u: bernoulli_improvement(u, 0.5, torch.tensor(drafts)).tolist() for u in (0.6, 0.75, 0.9, 1.0)
    }
    uniform = {r: uniform_improvement(r, torch.tensor(drafts)).tolist() for r in (1.5, 2.0, 4.0, 10.0)}
    return {"drafts": drafts, "bernoulli": bernoulli, "uniform": uniform, "bernoulli_target": 0.5}


def front_example(chain: MarkovChain, runs: int, seed: int, say: Say) -> dict[str, Any]:
    """Theorem 5 on the chain's first position: OPT and UNO at several slacks, by formula and in the loop (Figure 4)."""
    one = MarkovChain(chain.p[:1], chain.q[:1], chain.start)
    p, q = one.p[0], one.q[0]
    points, checks = [], []
    for i, epsilon in enumerate(_EPSILONS):
        b = Opt(epsilon).keep(p, q)
        row: dict[str, Any] = {
            "epsilon": epsilon,
            "reject": _over(one, rejection(q, b)),
            "loss": _over(one, best_loss(p, q, b)),
        }
        for name, rule in (("opt", Opt(epsilon)), ("uno", Uno(epsilon))):
            method = Method(stop=Fixed(1), accept=rule, to_horizon=True)
            run = _simulate(one, method, 5 * runs, seed + i, f"{name}, epsilon={epsilon}", say)
            closed = _over(one, rule.drift(p, q))
            row[name] = {"drift": closed, "measured_reject": float(run.rejections.mean()),
                         "measured_drift": float(run.drift.mean())}  # fmt: skip
            checks.append(_check(f"{name} at epsilon={epsilon}: rejection", row["reject"], run.rejections))
            checks.append(_check(f"{name} at epsilon={epsilon}: drift", closed, run.drift))
        points.append(row)
    return {"tv": _over(one, tv_distance(p, q)), "points": points, "checks": checks}


def _over(chain: MarkovChain, values: Tensor) -> float:
    """Mean over the prompt."""
    return float((chain.start * values).sum())


# --- SPRINTER's figures ----------------------------------------------------------------------------------------------
def trusted_tokens(runs: int, seed: int, say: Say) -> dict[str, Any]:
    """Theorems 3.3 and 3.4 over η_TP at two η_FP (Figures 5 and 6), and simulations of some points in the loop.

    The simulated texts are long enough for all runs but a share of 1e-6.
    """
    r, t_draft = 5, 0.1
    rates, curves, checks = torch.tensor(_RATES, dtype=torch.float64), [], []
    chain = _picture(r, r + 20)
    for k, fp in enumerate((0.0, 0.5)):
        points = []
        for i, tp in enumerate((0.2, 0.5, 0.8, 0.95)):
            method = Method(trust=ClassGate(tp, fp), stop=Untrusted())
            run = _simulate(chain, method, runs, seed + 10 * k + i, f"eta_TP={tp}, eta_FP={fp}", say)
            check = _check(
                f"Theorem 3.3 at ({tp}, {fp}), r={r}", float(expected_trusted(tp, fp, r)), run.first_trusted
            )
            checks.append(check)
            points.append({"eta_tp": tp, **{key: check[key] for key in ("mean", "low", "high")}})
        curves.append({
            "eta_fp": fp, "points": points,
            "trusted": expected_trusted(rates, fp, r).tolist(),
            "stop_time": expected_stop_time(rates, fp, r, t_draft).tolist(),
        })  # fmt: skip
    return {"r": r, "t_draft": t_draft, "eta_tp": list(_RATES), "curves": curves, "checks": checks}


def _picture(r: int, length: int) -> MarkovChain:
    """The theorems' model: r acceptable positions (p = q), then only unacceptable tokens (q one-hot, p not)."""
    half, sure = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    q = torch.stack([half if n < r else sure for n in range(length)]).unsqueeze(1).expand(length, 2, 2)
    return MarkovChain(half.expand(length, 2, 2), q, sure)
