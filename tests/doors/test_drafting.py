"""Our draft model beside another engine's target: rows, and draft steps that requests share."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sprinter.decode.adjust import Adjustments
from sprinter.decode.spec import parse_method
from sprinter.doors.drafting import DraftedRequest, DraftModel
from sprinter.doors.rules import HostedRequest
from sprinter.errors import UserError
from sprinter.laws import Sampling, process
from sprinter.models.pair import builtin_paths
from sprinter.random import AddressedDraws

PATHS = builtin_paths()
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(PATHS["target"], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft() -> DraftModel:
    paths = {name: str(path) for name, path in PATHS.items()}
    return DraftModel(
        paths["draft"], vocab=8200, rows=2, context=64, tokenizer=paths["target"], gate=paths["gate"]
    )


def _begin(
    draft: DraftModel, spec: str, prompt: list[int], adjust: Adjustments | None = None
) -> DraftedRequest:
    method = parse_method(spec).settle(draft.taus)
    return draft.request(HostedRequest(prompt, method, 12, (), AddressedDraws(), 6), GREEDY, adjust)


def _step(target: PreTrainedModel, one: DraftedRequest) -> None:
    """A target pass of an engine whose vocabulary is larger than the draft's."""
    hosted, start = one.hosted, one.hosted.sequence.scored
    with torch.inference_mode():
        text = torch.tensor([hosted.sequence.tokens[: start + 1] + hosted.draft])
        logits = torch.nn.functional.pad(target(text).logits[0, start:], (0, 8), value=-torch.inf)
    hosted.score(process(logits, GREEDY))


def test_requests_share_rows_and_write_the_targets_text(target: PreTrainedModel, draft: DraftModel) -> None:
    """Three requests take turns in two rows, as where the engine sets one aside."""
    prompts = [
        AutoTokenizer.from_pretrained(PATHS["target"]).encode(text) for text in ("The river", "In 1914", "A")
    ]
    specs = ["speculative(gamma=3)", "svip(h=0.6)", "lookup"]
    served = {
        i: _begin(draft, spec, prompt) for i, (spec, prompt) in enumerate(zip(specs, prompts, strict=True))
    }
    turn = 0
    while left := [(i, one) for i, one in served.items() if not one.hosted.over]:
        now = (left[turn % len(left) :] + left)[: min(2, len(left))]
        now, turn = list(dict(now).items()), turn + 1
        draft.draft(now)
        for _, one in now:
            _step(target, one)
    for i, one in served.items():
        draft.end(i)
        wanted = target.generate(
            torch.tensor([prompts[i]]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert one.hosted.sequence.tokens == wanted[0].tolist(), specs[i]
    assert sum(one.hosted.record.stats.target_calls for one in served.values()) < 36


def test_a_gate_is_asked_and_what_is_forbidden_is_not_drafted(
    target: PreTrainedModel, draft: DraftModel
) -> None:
    usual, without = (
        _begin(draft, "sprinter(tau=0)", [100, 101, 102], adjust)
        for adjust in (None, Adjustments(min_new_tokens=12, ends=tuple(range(2, 8192, 2))))
    )
    for name, one in (("a", usual), ("b", without)):
        draft.draft([(name, one)])
        _step(target, one)
        draft.end(name)
    assert usual.hosted.report()["trusted"] > 0 and usual.hosted.record.tokens[0].gate_score is not None
    assert all(token % 2 for token in without.hosted.sequence.tokens[3:-1])
    assert not all(token % 2 for token in usual.hosted.sequence.tokens[3:-1])


def test_a_draft_that_fails_ends_no_request(
    target: PreTrainedModel, draft: DraftModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits of one request are not finite: it goes on as the target writes, and the other one is drafted for."""
    sick, well = (_begin(draft, "speculative(gamma=3)", [100, 101, last]) for last in (102, 103))
    words = draft._backend.runner.model.get_input_embeddings()
    poison = words.register_forward_hook(
        lambda _, given, made: made.masked_fill((given[0] == 102).unsqueeze(-1), torch.nan)
    )
    try:
        while not (sick.hosted.over and well.hosted.over):
            going = [one for one in (("sick", sick), ("well", well)) if not one[1].hosted.over]
            draft.draft(going)
            for _, one in going:
                _step(target, one)
    finally:
        poison.remove()
        draft.end("sick")
        draft.end("well")
    for one, last in ((sick, 102), (well, 103)):
        wanted = target.generate(
            torch.tensor([[100, 101, last]]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert one.hosted.sequence.tokens == wanted[0].tolist()
    assert sick.error is not None and well.error is None and caplog.text.count("without drafts") == 1
    assert sick.hosted.record.stats.target_calls == 12 > well.hosted.record.stats.target_calls
    later = _begin(draft, "speculative(gamma=3)", [200, 201, 202]), _begin(draft, "svip", [203])
    draft.draft([*enumerate(later)])  # nothing is left of it in the rows
    assert all(one.error is None and one.hosted.draft for one in later)
    for i in range(2):
        draft.end(i)


def test_what_a_method_lacks_is_said(draft: DraftModel) -> None:
    with pytest.raises(UserError, match="reads a disco head: give one"):
        draft.request(HostedRequest((0,), parse_method("disco"), 2, (), AddressedDraws(), 2), GREEDY)
    with pytest.raises(UserError, match="holds texts of 1024 tokens, and the engine's have up to 4096"):
        DraftModel(str(PATHS["draft"]), vocab=8192, rows=1, context=4096)


def test_a_copy_needs_no_model_and_ends_before_what_is_forbidden() -> None:
    copier, adjust = DraftModel(None, vocab=8, rows=1, context=64), Adjustments(min_new_tokens=3, ends=(5,))
    for adjustments, wanted in ((None, [5, 1, 2]), (adjust, [])):
        hosted = HostedRequest(
            (1, 2, 5, 1, 2, 5, 1), parse_method("lookup"), 12, (5,), AddressedDraws(), 3, 3
        )
        one = copier.request(hosted, GREEDY, adjustments)
        copier.draft([("a", one)])
        hosted.score(torch.eye(8)[[2]])  # the first token is the target's
        copier.draft([("a", one)])
        assert hosted.draft == wanted
    with pytest.raises(UserError, match="drafts with a model: give one"):
        copier.request(HostedRequest((0,), parse_method("svip"), 2, (), AddressedDraws(), 2), GREEDY)
