"""The prefix cache: what two texts share is read once, and no text changes by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
import torch
from tests.engine import disturbed
from tests.engine.conftest import VOCAB, double_pair, tiny_llama
from tests.engine.disturbed import runner_maker
from tests.engine.test_disturbed import disturb
from tests.engine.test_failures import hooked, nan_at
from tests.engine.test_target_states import Watcher
from tests.models.tiny import tiny, word_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import sprinter
from sprinter.decode import Fixed, Method
from sprinter.decode.sequence import ReadState, common_prefix
from sprinter.engine import pool, prefix
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.prefix import DEFAULT, OFF, HeldText, PrefixCache
from sprinter.errors import BatchError, SprinterError, UserError
from sprinter.models.kernels import quantise, runs
from sprinter.models.pair import LoadedModel, LoadedPair

BLOCK = 4
METHODS = (
    "autoregressive", "draft-only", "speculative(gamma=3)", "sprinter(tau=0.5)", "svip(h=0.4)", "lookup(n=2, gamma=4)",
    "drafter=lookup(least=1,otherwise=model),stop=fixed(gamma=2)", "specdec++", "disco", "batch(drafts=2, gamma=3)",
    "specinfer(drafts=3, gamma=2)", "typical(gamma=3)",
)  # fmt: skip
SYSTEM = [5, 3, 8, 1, 9, 4, 2, 7, 7, 6, 11]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "BLOCK", BLOCK)


def pair_of(cache: PrefixCache, models: LoadedPair | None = None) -> sprinter.Pair:
    """A pair with caches of its own; by default in float64 with all heads."""
    pair = double_pair()
    if models is not None:
        return sprinter.Pair(models, prefix_cache=cache)
    return sprinter.Pair(pair.models, None, list(pair.heads.values()), cache)


def single() -> LoadedPair:
    return LoadedPair(tiny_llama(1, layers=2), tiny_llama(2), None)


def facts(out: sprinter.Generation) -> tuple[Any, ...]:
    """Tokens, and drifts to the last bit, which show every bit of both models' laws."""
    tokens = [(token.id, token.origin, token.round, token.drift) for token in out.tokens]
    stats = out.stats
    return tokens, stats.target_calls, stats.draft_steps, stats.target_tokens, stats.flops_tokens


def chat(pair: sprinter.Pair, method: str, turns: int = 4, **options: Any) -> Iterator[sprinter.Generation]:
    """A conversation: each prompt is the text so far and three more tokens."""
    text = list(SYSTEM)
    for turn in range(turns):
        settings = {"method": method, "max_new_tokens": 6, "seed": turn, "meter": "complete"} | options
        out = pair.generate(text, **settings)
        yield out
        text += [*(token.id for token in out.tokens), 3 + turn, 10 + turn, 2]


@pytest.mark.parametrize("kind", ["row", "captured", "crop"])
def test_no_text_of_a_conversation_changes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "make_runner", runner_maker(kind))
    here, fresh = pair_of(DEFAULT), pair_of(OFF)
    for method in METHODS[:9] if kind == "crop" else METHODS:
        made = list(chat(here, method))
        assert list(map(facts, made)) == list(map(facts, chat(fresh, method))), method
        lengths = [out.prompt_tokens for out in made]
        reused = [out.stats.cached_tokens for out in made[1:]]
        assert reused == [(length - 1) // BLOCK * BLOCK for length in lengths[:-1]], method
        here.clear_prefix_cache()


def test_laws_are_the_same_to_the_bit_in_float32() -> None:
    here, fresh = pair_of(DEFAULT, single()), pair_of(OFF, single())
    for seed in range(6):
        options = {"seed": seed, "max_new_tokens": 5 + seed}
        made = list(chat(here, "speculative(gamma=3)", **options))
        assert list(map(facts, made)) == list(map(facts, chat(fresh, "speculative(gamma=3)", **options)))
        assert sum(out.stats.cached_tokens for out in made) > sum(len(out.tokens) for out in made)


def quantised(seed: int, layers: int) -> LoadedModel:
    """A random Llama whose layers our own kernels run: a token is the same in every forward pass."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=160, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    quantise(model, "int8")
    return LoadedModel(model, f"quantised-{seed}", None, 160, VOCAB, 64, ())


def test_our_kernels_reuse_what_was_generated_to_the_bit() -> None:
    models = LoadedPair(quantised(1, 2), quantised(2, 1), None)
    assert runs(models.target.model)  # type: ignore[arg-type]
    here, fresh = pair_of(DEFAULT, models), pair_of(OFF, models)
    everything = pair_of(PrefixCache(reuse="all"), models)
    for method in (one for one in METHODS if one not in ("sprinter(tau=0.5)", "specdec++", "disco")):
        made = list(chat(here, method))
        assert list(map(facts, made)) == list(map(facts, chat(fresh, method))), method
        reused = [out.stats.cached_tokens for out in made[1:]]
        if "drafts=" in method:  # what was read as a tree is read again
            assert all(found >= len(SYSTEM) - 1 for found in reused), method
        else:  # all that the target has read
            assert all(found >= out.prompt_tokens for found, out in zip(reused, made, strict=False)), method
            assert reused == [out.stats.cached_tokens for out in chat(everything, method)][1:], method
        if method == "autoregressive":
            assert reused == [out.prompt_tokens + 5 for out in made[:-1]]
        here.clear_prefix_cache()
        everything.clear_prefix_cache()


def test_all_reuses_what_was_generated() -> None:
    here, fresh = pair_of(PrefixCache(reuse="all")), pair_of(OFF)
    for method in METHODS:
        made = list(chat(here, method))
        tokens = [[token.id for token in out.tokens] for out in made]
        assert tokens == [[token.id for token in out.tokens] for out in chat(fresh, method)], method
        for before, out in pairwise(made):
            # all but what a last round wrote and nobody read
            assert out.stats.cached_tokens >= before.prompt_tokens, method
        here.clear_prefix_cache()
    made = list(chat(here, "autoregressive"))
    assert [out.stats.cached_tokens for out in made[1:]] == [out.prompt_tokens + 5 for out in made[:-1]]


def test_one_row_grows_with_its_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn needs longer rows than the one before: what they hold moves along."""
    monkeypatch.setattr(pool, "_GRAIN", 8)
    for kind in ("row", "crop"):
        with monkeypatch.context() as patch:
            patch.setattr(pool, "make_runner", runner_maker(kind))
            here, fresh = pair_of(DEFAULT), pair_of(OFF)
            made = list(chat(here, "speculative(gamma=3)"))
            assert list(map(facts, made)) == list(map(facts, chat(fresh, "speculative(gamma=3)")))
            assert all(out.stats.cached_tokens and out.stats.draft_cached_tokens for out in made[1:])
            assert len(here._runtime.targets._free) == 1, "the shorter ones are superseded"


@pytest.mark.parametrize("kind", ["steady", "all"])
def test_a_row_goes_on_after_a_text_that_a_stop_token_ended(kind: str) -> None:
    """Draft tokens that the last round rejected do not stay in the row, so that the next turn continues in it."""
    models = LoadedPair(quantised(1, 2), quantised(2, 1), None) if kind == "steady" else None
    here, fresh = pair_of(DEFAULT if models else PrefixCache(reuse="all"), models), pair_of(OFF, models)
    talk, rejected = list(SYSTEM), 0
    for turn in range(6):
        how: dict[str, Any] = {"method": "speculative(gamma=5)", "max_new_tokens": 12, "seed": turn}
        stop = fresh.generate(talk, **how).tokens[4].id
        out = here.generate(talk, stop_token_ids=[stop], **how)
        assert out.finish_reason == "stop"
        rejected += out.tokens[-1].origin == sprinter.Origin.REPLACEMENT
        talk += [*(token.id for token in out.tokens), 3 + turn]
        for models_pool in (here._runtime.targets, here._runtime.drafts):
            (runner,) = models_pool._free
            held = models_pool._held[runner]
            assert held.continues(0, talk), "what the row holds is a beginning of the next prompt"
            assert held.shared(0, talk) >= len(SYSTEM) - 1
    assert rejected, "a last round had draft tokens behind its end"


def test_conversations_with_one_beginning_keep_their_own_rows() -> None:
    here, fresh = pair_of(DEFAULT), pair_of(OFF)
    prompts = [[*SYSTEM, *([end] * 6)] for end in (12, 13, 14)]
    for turn in range(3):
        for prompt in prompts:
            out = here.generate(prompt, max_new_tokens=3)
            assert facts(out) == facts(fresh.generate(prompt, max_new_tokens=3))
            first = turn == 0 and prompt[-1] == 12
            before = len(prompt) - 5 if turn else 0 if first else len(SYSTEM)
            assert out.stats.cached_tokens == before // BLOCK * BLOCK
            prompt += [2, turn, 9, 1]


def test_the_text_that_was_idle_longest_is_forgotten_first() -> None:
    probe = pair_of(DEFAULT, single())
    probe.generate([1] * 20, max_new_tokens=2)
    each = probe._runtime.targets._idle.total_bytes
    here = pair_of(PrefixCache(2 * each + 1), single())
    texts = {name: [number] * 20 for name, number in {"a": 1, "b": 2, "c": 3}.items()}

    def cached(name: str) -> int:
        out = here.generate(texts[name], max_new_tokens=2)
        assert 0 < here._runtime.targets._idle.total_bytes <= 2 * each + 1
        return out.stats.cached_tokens

    assert [cached(name) for name in "abbaca"] == [0, 0, 16, 16, 0, 16]
    assert cached("b") == 0, "c took its rows"
    assert cached("a") == 16 and cached("c") == 0
    here.clear_prefix_cache()
    assert cached("a") == 0
    small = pair_of(PrefixCache(each // 4), single())
    assert [small.generate([1] * 20, max_new_tokens=2).stats.cached_tokens for _ in range(2)] == [0, 0]
    assert small._runtime.targets._idle.total_bytes == 0


def test_nothing_is_reused_without_a_cache() -> None:
    fresh = pair_of(OFF)
    assert not any(
        out.stats.cached_tokens or out.stats.draft_cached_tokens for out in chat(fresh, "speculative")
    )
    outs = fresh.generate_batch([SYSTEM, SYSTEM], max_new_tokens=4)
    assert not any(out.stats.cached_tokens for out in outs)


def test_streams_at_the_same_time_have_rows_of_their_own() -> None:
    here, fresh = pair_of(DEFAULT), pair_of(OFF)
    wanted = [facts(fresh.generate(SYSTEM, max_new_tokens=9, seed=seed)) for seed in range(4)]
    here.generate(SYSTEM, max_new_tokens=2)
    with (
        here.stream(SYSTEM, max_new_tokens=9, seed=0) as one,
        here.stream(SYSTEM, max_new_tokens=9, seed=1) as two,
    ):
        for _ in range(4):
            next(one), next(two)
        assert [facts(one.finish()), facts(two.finish())] == wanted[:2]
    made: dict[int, tuple[Any, ...]] = {}

    def work(seed: int) -> None:
        for _ in range(3):
            made[seed] = facts(here.generate(SYSTEM, max_new_tokens=9, seed=seed))

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [made[seed] for seed in range(4)] == wanted


@pytest.mark.parametrize("reuse", ["exact", "all"])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_what_a_failed_request_wrote_is_not_reused(which: str, reuse: str) -> None:
    here, wanted = pair_of(PrefixCache(reuse=reuse)), facts(pair_of(OFF).generate(SYSTEM, max_new_tokens=9))
    layer = getattr(here.models, which).model.model.layers[-1].self_attn
    failed = 0
    for module in (layer.k_proj, layer.v_proj):
        for call in range(1, 7):
            with hooked(module, nan_at(call, 0)):
                try:
                    here.generate(SYSTEM, max_new_tokens=9)
                except SprinterError:
                    failed += 1
            assert facts(here.generate(SYSTEM, max_new_tokens=9)) == wanted
    assert failed > 5


def broken_at(call: int) -> Callable[..., None]:
    """An interrupt of the n-th call from now on."""
    calls = [0]

    def hook(*_: object) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt

    return hook


def test_what_an_interrupted_request_wrote_is_not_reused() -> None:
    here, wanted = pair_of(DEFAULT), facts(pair_of(OFF).generate(SYSTEM, max_new_tokens=9))
    for call in range(1, 9):
        model: Any = here.models.target.model
        with (
            hooked(model.model.layers[0].self_attn.k_proj, broken_at(call)),
            pytest.raises(KeyboardInterrupt),
        ):
            here.generate([*SYSTEM, *SYSTEM], max_new_tokens=30, method="autoregressive", seed=call)
        assert facts(here.generate(SYSTEM, max_new_tokens=9)) == wanted


def test_cached_keys_of_other_weights_are_not_reused_after_a_reload() -> None:
    here = pair_of(DEFAULT)
    list(chat(here, "speculative(gamma=3)"))
    model: Any = here.models.target.model
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    here.reload()
    fresh = sprinter.Pair(here.models, None, list(here.heads.values()), OFF)
    out = here.generate(SYSTEM, max_new_tokens=9)
    assert facts(out) == facts(fresh.generate(SYSTEM, max_new_tokens=9))
    assert (out.stats.cached_tokens, out.stats.draft_cached_tokens) == (0, 0)
    assert here.generate(SYSTEM, max_new_tokens=9).stats.cached_tokens == len(SYSTEM) // BLOCK * BLOCK


def test_a_drafter_that_reads_hidden_states_sees_the_whole_prompt() -> None:
    pair = sprinter.load_pair(tiny("llama"), tokenizer=word_tokenizer(), compile=False)
    drafter = Watcher()
    method = Method(drafter=drafter, stop=Fixed(2))
    outs = [pair.generate(SYSTEM, method=method, max_new_tokens=6) for _ in range(2)]
    assert [out.stats.cached_tokens for out in outs] == [0, 0]
    assert all(len(states[0]) == len(text) - 1 for text, states in drafter.seen)
    assert pair.generate(SYSTEM, max_new_tokens=2).stats.cached_tokens == len(SYSTEM) // BLOCK * BLOCK


def test_a_batch_reads_a_common_prefix_once() -> None:
    here, fresh = pair_of(DEFAULT), pair_of(OFF)
    prompts = [[*SYSTEM, *SYSTEM, end] for end in range(8)]
    for method in ("speculative(gamma=3)", "sprinter(tau=0.5)", "batch(drafts=2, gamma=3)"):
        options: dict[str, Any] = {"method": method, "max_new_tokens": 8, "seed": list(range(8))}
        wanted = [[t.id for t in out.tokens] for out in fresh.generate_batch(prompts, **options)]
        for order in (list(range(8)), [5, 2, 7, 0, 1, 6, 3, 4]):
            here.clear_prefix_cache()
            options["seed"] = order
            outs = here.generate_batch([prompts[i] for i in order], **options)
            assert [[t.id for t in out.tokens] for out in outs] == [wanted[i] for i in order]
            for name in ("cached_tokens", "draft_cached_tokens"):
                reused = sorted(getattr(out.stats, name) for out in outs)
                assert reused[0] == 0 and reused[1] >= 20, (method, name)
        again = here.generate_batch([prompts[i] for i in order], **options)
        assert all(out.stats.cached_tokens >= 20 for out in again), "the rows were kept for the next batch"


def test_rows_of_an_engine_are_continued() -> None:
    here, fresh = pair_of(DEFAULT), pair_of(OFF)
    method = {"method": "speculative(gamma=3)"}  # the default's texts depend on the number of rows
    texts = [[*SYSTEM, end, end] for end in (12, 13, 14)]
    with sprinter.Engine(here, rows=3, max_len=90) as engine:
        for turn in range(3):
            numbers = [engine.add(text, max_new_tokens=5, seed=turn, **method) for text in reversed(texts)][
                ::-1
            ]
            done = engine.finish()
            for text, number in zip(texts, numbers, strict=True):
                wanted = fresh.generate(text, max_new_tokens=5, seed=turn, **method)
                assert [t.id for t in done[number].tokens] == [t.id for t in wanted.tokens]
                if turn:
                    before = len(text) - 8
                    assert done[number].stats.cached_tokens >= (before - 1) // BLOCK * BLOCK
                text += [*(t.id for t in wanted.tokens), 9, 1, turn]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_text_that_reads_nothing_in_a_row_leaves_it_alone(cancelled: bool) -> None:
    """The draft's row of another conversation, while the target alone writes or a request is cancelled at once."""
    here = pair_of(DEFAULT)
    with sprinter.Engine(here, rows=1, max_len=90) as engine:
        engine.add(SYSTEM, method="speculative(gamma=3)", max_new_tokens=4)
        engine.finish()
        number = engine.add([7, 7, 7, 7], method="autoregressive", max_new_tokens=4)
        if cancelled:
            engine.cancel(number)
        engine.finish()
        number = engine.add([*SYSTEM, 9, 1], method="speculative(gamma=3)", max_new_tokens=4)
        assert engine.finish()[number].stats.draft_cached_tokens > 0


def test_a_row_that_failed_gives_nothing_to_the_next_request() -> None:
    here, fresh = pair_of(DEFAULT), pair_of(OFF)
    wanted = [t.id for t in fresh.generate(SYSTEM, method="speculative", max_new_tokens=9).tokens]
    model: Any = here.models.target.model
    failed = 0
    with sprinter.Engine(here, rows=2, max_len=40) as engine:
        for call in range(1, 6):
            with hooked(model.model.layers[0].self_attn.v_proj, nan_at(call, call)):
                for _ in range(2):
                    engine.add(SYSTEM, method="speculative", max_new_tokens=9)
                try:
                    engine.finish()
                except BatchError:
                    failed += 1
            numbers = [engine.add(SYSTEM, method="speculative", max_new_tokens=9) for _ in range(2)]
            done = engine.finish()
            assert [[t.id for t in done[number].tokens] for number in numbers] == [wanted, wanted]
    assert failed >= 3


def test_disturbed_requests_with_common_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, interrupts and cancelled requests, while rows reuse what others read."""
    whole = [(5 * i * i + 3 * i) % 24 for i in range(30)]
    drawn = disturbed.random_request

    def alike(*args: Any) -> dict[str, Any]:
        one = drawn(*args)
        return one | {"prompt": whole[: max(9, len(one["prompt"]))]}

    monkeypatch.setattr(disturbed, "random_request", alike)
    reused = []
    begin = EagerBackend.begin_text

    def noting(rows: EagerBackend, view: ReadState, prefix: Sequence[int]) -> None:
        begin(rows, view, prefix)
        reused.append(view.read)

    monkeypatch.setattr(EagerBackend, "begin_text", noting)
    counts = disturb(60, 5, 8, often=3.0)
    assert counts["survived"] >= 20 and counts["failed"] >= 3 and counts["interrupted"] >= 5
    assert sum(map(bool, reused)) > len(reused) / 3


def test_bad_settings() -> None:
    with pytest.raises(UserError, match=r"prefix_cache_bytes=-1 is out of range: give a whole number >= 0"):
        sprinter.load_pair(prefix_cache_bytes=-1)
    with pytest.raises(UserError, match=r"prefix_reuse='some' is unknown: use 'exact' or 'all'"):
        sprinter.load_pair(prefix_reuse="some")


def test_json_names_the_tokens_that_were_reused() -> None:
    here = pair_of(DEFAULT)
    here.generate(SYSTEM, max_new_tokens=2)
    stats = here.generate(SYSTEM, max_new_tokens=2).to_dict()["stats"]
    assert stats["cached_tokens"] == stats["draft_cached_tokens"] == 8


def test_the_record_of_a_row() -> None:
    text = HeldText()
    text.add(0, [1, 2, 3, 4, 5], finite=False)
    assert text.usable("all") == 0, "not checked yet"
    text.checked = 5
    text.add(5, [6], finite=False)
    assert (text.usable("exact"), text.usable("all")) == (BLOCK, 5)
    text.end([1, 2, 3, 4, 5, 6, 7, 8, 8], chained=7)
    assert (text.usable("exact"), text.usable("all")) == (BLOCK, 9)
    text.add(12, [5], finite=True)
    assert len(text.tokens) == 9, "slots before it were never recorded"
    text.cut(3)
    assert (text.usable("exact"), text.usable("all"), text.tokens) == (0, 3, [1, 2, 3])
    steady = HeldText(True)
    steady.add(0, [1, 2, 3, 4, 5, 6], finite=True)
    steady.end([1, 2, 3, 4, 5, 6, 7, 8, 8, 5], chained=7)
    assert (steady.usable("exact"), steady.usable("all")) == (7, 10), "a tree's nodes were read beside others"
    steady.end([1, 2, 3, 4, 5, 6, 7, 8], chained=None)
    assert steady.usable("exact") == 8
    assert common_prefix([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 0]) == 5
    assert common_prefix([], [VOCAB]) == 0


def test_another_kind_of_attention_needs_other_runners() -> None:
    pair, prompt = pair_of(DEFAULT, single()), [*SYSTEM, 1, 2]
    before = pair.generate(prompt, max_new_tokens=6, temperature=0.0)
    for model in (pair.models.target.model, pair.models.draft.model):  # type: ignore[union-attr]
        model.set_attn_implementation("eager")
    pair.reload()
    again = pair.generate(prompt, max_new_tokens=6, temperature=0.0)
    assert again.stats.cached_tokens == 0
    assert [token.id for token in again.tokens] == [token.id for token in before.tokens]
