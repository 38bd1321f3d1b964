"""All methods through llama.cpp: on the same weights and seeds the texts are those of the transformers pair."""

import gc
from pathlib import Path

import pytest
import torch
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

import sprinter
from sprinter.decode.spec import METHODS as REGISTERED
from sprinter.decode.spec import parse_method
from sprinter.errors import UserError
from sprinter.models.convert import convert_gguf
from sprinter.models.pair import builtin_heads, builtin_paths

pytest.importorskip("gguf", reason=NO_GGUF)
pytest.importorskip("llama_cpp", reason=NO_LLAMA)

PROMPT = "The city was founded in the year"
METHODS = [
    "autoregressive", "speculative(gamma=3)", "sprinter(tau=0.5)", "sprinter(tau=0.9)", "opt(epsilon=0.2)", "fuzzy",
    "lookup", "specdec++", "draft-only", "certain(signal=margin, threshold=0.5)", "online(tau=0.3, after=3)",
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and draft of the built-in pair, in full precision and in eight bits."""
    root = tmp_path_factory.mktemp("builtin")
    for which in ("target", "draft"):
        for dtype in ("f32", "q8_0"):
            convert_gguf(builtin_paths()[which], root / f"{which}-{dtype}.gguf", dtype)
    return root


def load(files: Path, dtype: str, **changes: object) -> sprinter.Pair:
    given = {
        "draft": files / f"draft-{dtype}.gguf",
        "gate": builtin_paths()["gate"],
        "heads": builtin_heads(),
    }
    return sprinter.load_pair(files / f"target-{dtype}.gguf", **(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair(files: Path) -> sprinter.Pair:
    return load(files, "f32")


def ids(
    pair: sprinter.Pair, method: str, seed: int = 0, temperature: float = 1.0, new: int = 24
) -> list[int]:
    out = pair.generate(PROMPT, method=method, seed=seed, temperature=temperature, max_new_tokens=new)
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_the_transformers_pair(
    pair: sprinter.Pair, builtin_pair: sprinter.Pair, method: str
) -> None:
    for seed in range(2):
        assert ids(pair, method, seed) == ids(builtin_pair, method, seed)


def runs_here(name: str) -> bool:
    """Whether llama.cpp can run it: heads on the target it cannot."""
    method = parse_method(name)
    return not (method.drafter.by_heads or method.accept.needs)


@pytest.mark.parametrize("method", sorted(filter(runs_here, REGISTERED.names())))
def test_greedy_texts_are_those_of_the_transformers_pair(
    pair: sprinter.Pair, builtin_pair: sprinter.Pair, method: str
) -> None:
    greedy = ids(pair, method, temperature=0.0)
    assert greedy == ids(builtin_pair, method, temperature=0.0)
    if parse_method(method).lossless(greedy=True):
        assert greedy == ids(builtin_pair, "autoregressive", temperature=0.0)


def test_the_meter_reads_the_same(pair: sprinter.Pair, builtin_pair: sprinter.Pair) -> None:
    one, other = (
        each.generate(PROMPT, method="sprinter(tau=0.3)", seed=4, max_new_tokens=24, meter="complete")
        for each in (pair, builtin_pair)
    )
    assert one.stats.trusted == other.stats.trusted > 0
    assert one.stats.flops_passes == other.stats.flops_passes
    for a, b in zip(one.tokens, other.tokens, strict=True):
        assert a.origin == b.origin
        assert a.drift == pytest.approx(b.drift, abs=1e-4)


@pytest.mark.parametrize("method", ["speculative(gamma=4)", "lookup"])
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_greedy_speculation_gives_the_targets_own_text(files: Path, dtype: str, method: str) -> None:
    here = load(files, dtype)
    assert ids(here, method, temperature=0.0, new=60) == ids(here, "autoregressive", temperature=0.0, new=60)


@pytest.mark.parametrize("method", ["tree", "specinfer(drafts=3)", "traversal", "static-tree", "cape"])
@pytest.mark.parametrize("draft", ["llamacpp", "torch"])
def test_greedy_trees_give_the_targets_own_text(files: Path, method: str, draft: str) -> None:
    here = load(files, "f32", **({"draft": builtin_paths()["draft"]} if draft == "torch" else {}))
    made = here.generate(PROMPT, method=method, temperature=0.0, max_new_tokens=60)
    plain = here.generate(PROMPT, method="autoregressive", temperature=0.0, max_new_tokens=60)
    assert [one.id for one in made.tokens] == [one.id for one in plain.tokens]
    assert made.stats.target_calls < plain.stats.target_calls


def test_trees_in_batches_are_those_of_single_texts(files: Path) -> None:
    here = load(files, "f32")
    prompts = [PROMPT, f"{PROMPT} and then", "It"]
    together = here.generate_batch(prompts, method="specinfer(drafts=2)", seed=[3, 4, 5], max_new_tokens=30)
    for prompt, seed, made in zip(prompts, (3, 4, 5), together, strict=True):
        alone = here.generate(prompt, method="specinfer(drafts=2)", seed=seed, max_new_tokens=30)
        assert [one.id for one in made.tokens] == [one.id for one in alone.tokens]


def test_many_rows_of_trees_share_the_sequences(files: Path) -> None:
    """Eight rows of the engine take default trees; more rows than sequences serve are not asked for, or refused."""
    here = load(files, "f32")
    prompts = [f"{PROMPT} {i}" for i in range(12)]
    alone = [
        [one.id for one in here.generate(prompt, method="tree", seed=i, max_new_tokens=20).tokens]
        for i, prompt in enumerate(prompts)
    ]
    made = here.generate_batch(prompts, method="tree", seed=list(range(12)), max_new_tokens=20)
    assert [[one.id for one in text.tokens] for text in made] == alone
    engine = sprinter.Engine(here)
    numbers = [
        engine.add(prompt, method="tree", seed=i, max_new_tokens=20) for i, prompt in enumerate(prompts[:9])
    ]
    numbers.append(engine.add(PROMPT, method="autoregressive", max_new_tokens=20))
    done = engine.finish()
    assert [[one.id for one in done[number].tokens] for number in numbers[:9]] == alone[:9]
    with pytest.raises(UserError, match="a row of the engine has room for 31"):
        engine.add(PROMPT, method="tree(expand=20,depth=3,nodes=60)")
    with pytest.raises(UserError, match=r"llama\.cpp holds 256 sequences, .* too few for 12 row"):
        here.generate_batch(prompts, method="tree", rows=12, max_new_tokens=20)


def test_mixed_pairs(files: Path, builtin_pair: sprinter.Pair) -> None:
    paths = builtin_paths()
    wanted = ids(builtin_pair, "sprinter(tau=0.5)")
    assert ids(load(files, "f32", draft=paths["draft"]), "sprinter(tau=0.5)") == wanted
    mixed = sprinter.load_pair(paths["target"], draft=files / "draft-f32.gguf", gate=paths["gate"])
    assert ids(mixed, "sprinter(tau=0.5)") == wanted


def test_runners_are_used_again(files: Path) -> None:
    here = load(files, "f32")
    first = [ids(here, "sprinter(tau=0.5)", seed) for seed in range(3)]
    assert [ids(here, "sprinter(tau=0.5)", seed) for seed in range(3)] == first
    assert len(here._runtime.targets._free) == 1


def test_batches_of_texts(pair: sprinter.Pair) -> None:
    prompts = [PROMPT, "The river", "In the year 1850, the old town was"]
    together = pair.generate_batch(prompts, method="sprinter(tau=0.5)", seed=[1, 2, 3], max_new_tokens=16)
    for prompt, seed, out in zip(prompts, (1, 2, 3), together, strict=True):
        alone = pair.generate(prompt, method="sprinter(tau=0.5)", seed=seed, max_new_tokens=16)
        assert [token.id for token in out.tokens] == [token.id for token in alone.tokens]


def test_nothing_is_compiled(files: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be compiled: llamacpp runs it; use compile=False"):
        load(files, "f32", compile=True)


def test_streams_at_the_same_time(pair: sprinter.Pair) -> None:
    wanted = [ids(pair, "sprinter(tau=0.5)", seed) for seed in (1, 2)]
    streams = [
        pair.stream(PROMPT, method="sprinter(tau=0.5)", seed=seed, max_new_tokens=24) for seed in (1, 2)
    ]
    texts: list[list[int]] = [[], []]
    for _ in range(24):
        for stream, text in zip(streams, texts, strict=True):
            text.append(next(stream).id)
    assert texts == wanted


def test_what_does_not_fit_is_refused(pair: sprinter.Pair, files: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"exceed the context of the target .*target-f32\.gguf, 1024 tokens: use"
    ):
        pair.generate(PROMPT, max_new_tokens=1024)
    other = tmp_path / "other-draft.gguf"
    with pytest.raises(
        UserError, match=r"the gate reads hidden states of size 192, draft .*f32\.gguf' has size 576"
    ):
        load(files, "f32", draft=files / "target-f32.gguf")
    data = (files / "draft-f32.gguf").read_bytes()
    stamp = pair.models.draft.model.fingerprint.encode()  # type: ignore[union-attr]
    other.write_bytes(data.replace(stamp, b"0" * 64))
    with pytest.raises(UserError, match="the gate was made for other weights of draft"):
        load(files, "f32", draft=other)


def test_threads_follow_torch(pair: sprinter.Pair) -> None:
    runner = pair._runtime.targets.take(16)
    assert runner._llama.llama_n_threads(runner._context) == torch.get_num_threads()  # type: ignore[attr-defined]
    pair._runtime.targets.give_back(runner)


@pytest.mark.slow
def test_ten_thousand_rounds_of_decoding_without_growth(tmp_path: Path) -> None:
    """Texts one after another on the same runners: neither the process nor what the pool keeps grows."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        pytest.skip("the memory of the process cannot be read here")
    saved_llama(tmp_path / "target", 1)
    saved_llama(tmp_path / "draft", 2, num_hidden_layers=1)
    here = sprinter.load_pair(converted(tmp_path / "target"), draft=converted(tmp_path / "draft"))
    rounds, sizes = 0, []
    while rounds < 10_000:
        for seed in range(20):
            out = here.generate("the thing", method="speculative(gamma=1)", seed=seed, max_new_tokens=80)
            rounds += out.stats.rounds
        gc.collect()
        sizes.append(int(statm.read_text().split()[1]) * 4096)
    assert len(sizes) > 5 and max(sizes[2:]) - sizes[1] < 2**20
    assert len(here._runtime.targets._free) == len(here._runtime.drafts._free) == 1  # type: ignore[union-attr]
