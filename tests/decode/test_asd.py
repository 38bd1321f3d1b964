"""ASD's conditions, read off its author's statement, and the account that it keeps of a text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.engine.conftest import double_pair

from sprinter.decode import Asd, Fixed, Judge, Method, TargetCall, Verdict, check_accept
from sprinter.decode.conformance import _declared_law, check_same_law, joint_law
from sprinter.decode.draft import Control
from sprinter.decode.enumerate import MarkovPair
from sprinter.decode.spec import parse_method

P = torch.tensor([[0.5, 0.4, 0.1], [0.6, 0.3, 0.1], [0.45, 0.45, 0.1], [0.2, 0.7, 0.1]], dtype=torch.float64)
Q = torch.full((3, 3), 1 / 3, dtype=torch.float64)
R = [math.log(0.5 / 0.4), math.log(0.6 / 0.3)]
"""Regrets of token 1 at the first two positions."""


def kept(rule: Asd, tokens: list[int]) -> int:
    ending, law_after = rule.ends(tokens, P, Q)
    k = int(ending.argmax())
    assert ending.sum() == ending[k] == 1
    law = law_after(k)
    assert torch.equal(law, P[k]) if k == len(tokens) else law[P[k].argmax()] == 1
    return k


@pytest.mark.parametrize(
    ("rule", "tokens", "stay"),
    [(Asd(), [0, 0, 0], 3), (Asd(), [2, 0, 0], 0), (Asd(share=1.0), [1, 1, 0], 3),
     (Asd(most=1, share=1.0), [1, 1, 0], 1), (Asd(most=0), [1, 0, 0], 0), (Asd(total=0.0), [1, 0, 0], 0),
     (Asd(total=0.0), [0, 0, 1], 2),
     (Asd(share=R[0] / 3 + 1e-9), [1, 0, 0], 3), (Asd(share=R[0] / 3 - 1e-9), [1, 0, 0], 0),
     (Asd(share=R[1] / 2 + 1e-9), [0, 1, 0], 3), (Asd(share=R[1] / 2 - 1e-9), [0, 1, 0], 1),
     (Asd(total=sum(R) + 1e-9, share=1.0), [1, 1, 0], 3), (Asd(total=sum(R) - 1e-9, share=1.0), [1, 1, 0], 1)],
)  # fmt: skip
def test_each_condition(rule: Asd, tokens: list[int], stay: int) -> None:
    """The last position has a tie: the second of its tokens is a mismatch without regret."""
    assert kept(rule, tokens) == stay


def test_regret_is_that_of_the_raw_law_and_an_impossible_token_never_stays() -> None:
    tokens, cold = [1, 0, 0], P**4 / (P**4).sum(-1, keepdim=True)
    rule = Asd(share=R[0] / 3 + 1e-9)
    assert int(rule.ends(tokens, cold, Q)[0].argmax()) == 0
    assert int(rule.ends(tokens, cold, Q, Control(P, Q))[0].argmax()) == 3
    none = P.clone()
    none[0, 1] = 0.0
    assert int(Asd(math.inf, math.inf, 9).ends(tokens, none, Q)[0].argmax()) == 0


@pytest.mark.parametrize("rule", [Asd(0.4, 1.0, 2), Asd(0.4, 0.2, 1), Asd(8.0, 0.5, 1), Asd(0.0)])
def test_texts_have_the_declared_law(rule: Asd) -> None:
    check_accept(rule)


class Forgetful(Asd):
    """A mutant whose account starts again with each draft."""

    def after(self, call: TargetCall, verdict: Verdict) -> Judge:
        return self


def test_the_account_is_of_the_text() -> None:
    pair, given = MarkovPair(seed=1), (0.7, 10.0, 2)
    laws = [
        joint_law(Method(accept=rule, stop=Fixed(2)), pair, 4) for rule in (Asd(*given), Forgetful(*given))
    ]
    check_same_law(laws[0], _declared_law(Asd(*given), pair, 2, 4), "the account, round by round")
    with pytest.raises(AssertionError):
        check_same_law(*laws, "an account of each draft")


def regret_of(model: torch.nn.Module, prompt: list[int], text: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + text])).logits[0].double()
    rows = logits[len(prompt) - 1 : -1]
    return [float(row.max() - row[x]) for row, x in zip(rows, text, strict=True)]


@pytest.mark.parametrize("total", [0.0, 0.5, 3.0, math.inf])
def test_greedy_texts_follow_the_rule_round_by_round(total: float) -> None:
    """Against the conditions in plain Python, on two random models."""
    pair, prompt, new, gamma = double_pair(), [3, 1, 4, 1, 5], 40, 5
    rule = Asd(total, 1.0, 2)
    out = pair.generate(
        prompt, method=Method(accept=rule, stop=Fixed(gamma)), max_new_tokens=new, temperature=0.0
    )
    draft = pair.models.draft.model  # type: ignore[union-attr]
    text, left = list[int](), total
    while len(text) < new:
        tokens = list[int]()
        for _ in range(min(gamma, new - len(text) - 1)):
            with torch.inference_mode():
                tokens.append(
                    int(draft(input_ids=torch.tensor([prompt + text + tokens])).logits[0, -1].argmax())
                )
        regrets = regret_of(pair.models.target.model, prompt, text + tokens)[len(text) :]
        stay, spent, misses = 0, 0.0, 0
        for i, regret in enumerate(regrets):
            spent, misses = spent + regret, misses + (regret > 0)
            if regret > 0 and (misses > 2 or spent > left or regret > 1.0 * (len(tokens) - i)):
                break
            stay += 1
        left -= sum(regrets[:stay])
        text += tokens[:stay]
        with torch.inference_mode():
            law = pair.models.target.model(input_ids=torch.tensor([prompt + text])).logits[0, -1]
        text.append(int(law.argmax()))
    assert [token.id for token in out.tokens] == text
    spent = sum(regret_of(pair.models.target.model, prompt, text))
    assert spent <= total + 1e-9 and (spent > 1 or total < math.inf)
    assert out.stats.lossless == (total == 0)


def test_the_preset() -> None:
    method = parse_method("asd(total=2.0, share=0.5, most=1, gamma=3)")
    assert method.accept == Asd(2.0, 0.5, 1) and not method.lossless(True)
    assert replace(method, accept=Asd(0.0)).lossless(True)
