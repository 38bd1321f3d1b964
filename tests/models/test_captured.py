"""The captured runner: whatever is fed, forgotten and copied, it says what the uncached pass says."""

import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.models.eager_units import captured
from tests.models.test_runners import Told
from tests.models.tiny import fresh, tiny, uncached

from sprinter.errors import UserError
from sprinter.models import memory
from sprinter.models.capture.attention import own_attention_kernel
from sprinter.models.capture.compiled import _SOURCES, Recipe, cache_dir
from sprinter.models.capture.compiled import _key as compiled_key
from sprinter.models.capture.kernels import own_products
from sprinter.models.capture.runner import PASS, CapturedRunner, Unit
from sprinter.models.capture.trace import own_attention
from sprinter.models.capture.units import CompiledUnits
from sprinter.models.choose import capture_kind
from sprinter.models.runner import make_runner

pytestmark = pytest.mark.timeout(1800)  # to compile takes minutes where others use the cores as well

KINDS = [
    "gpt2", "llama", "qwen2", "gpt_neox", "llama-eager", "qwen2-sliding", "gemma2", "gemma3", "mistral", "opt",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPRINTER_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield cache_dir()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_captured_pass_equals_the_uncached_pass_in_random_programs(kind: str, batch: int) -> None:
    runner = captured(kind, batch, 40)
    told = Told(runner, kind, seed=batch)
    for _ in range(40):
        told.anything()
    assert runner._units.calls["pass"] > 10  # type: ignore[attr-defined]


def _programs(kind: str, *batches: int) -> None:
    for batch in batches:
        told = Told(make_runner(tiny(kind), batch=batch, max_len=40, compile=True), kind, seed=batch)
        for _ in range(40):
            told.anything()
        told.rewind([0] * batch)
        told.extend([1] * batch)


def _some_rows(kind: str, runner: CapturedRunner) -> None:
    """Passes over some rows, in any order, against the row runner."""
    row, draw = make_runner(tiny(kind), batch=4, max_len=40), random.Random(7)
    for runner_ in (row, runner):
        runner_.extend(torch.arange(20).view(4, 5))
    for _ in range(12):
        rows = draw.sample(range(4), draw.randint(1, 4))
        counts = [draw.randint(0, 3) for _ in rows]
        tokens = torch.tensor([[draw.randrange(61) for _ in range(3)] for _ in rows])
        one, other = (each.extend(tokens, counts, rows=rows) for each in (row, runner))
        assert one.logits is not None and other.logits is not None
        for i, count in enumerate(counts):
            torch.testing.assert_close(other.logits[i, :count], one.logits[i, :count], rtol=1e-4, atol=1e-4)
        assert runner.lengths == row.lengths
        lengths = [max(3, length - draw.randint(0, 4)) for length in row.lengths]
        row.rewind(lengths)
        runner.rewind(lengths)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])
def test_passes_over_some_rows(kind: str) -> None:
    runner = captured(kind, 4, 40)
    _some_rows(kind, runner)
    assert runner._units.calls["pass"] > 5  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def compiled_pass(own_cache: Path) -> Path:
    """The one unit that the quick tests compile: passes of ``tiny("llama")`` over any number of tokens."""
    told = Told(make_runner(tiny("llama"), batch=3, max_len=40, compile=True), "llama", seed=3)
    for _ in range(40):
        told.anything(reads=False)
    told.rewind([0] * 3)
    told.extend([1] * 3)
    (path,) = own_cache.glob("pass-any*.pt2")
    assert not list(own_cache.glob("*.part"))
    return path


def _twin(batch: int = 2) -> CapturedRunner:
    """A runner of a model with the weights of ``tiny("llama")``, which uses what lies on the disk."""
    twin = fresh("llama")
    twin.load_state_dict(tiny("llama").state_dict())
    return CapturedRunner(twin, batch, 40, {"": None}, CompiledUnits(twin, {"": None}, may_compile=False))


def test_compiled_code_is_read_back(compiled_pass: Path, caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode():
        assert _twin().run(PASS, torch.ones(2, 3, dtype=torch.long), None) is not None
    assert not caplog.records


def test_compiled_code_of_weights_that_are_gone_is_not_run(compiled_pass: Path) -> None:
    runner, tokens = _twin(), torch.tensor([[3, 9, 11]] * 2)
    assert runner.run(PASS, tokens, None) is not None
    runner.model.load_state_dict(fresh("llama").state_dict())
    runner.rewind([0, 0])
    assert runner.run(PASS, tokens, None) is None
    logits = runner.extend(tokens).logits
    assert logits is not None
    torch.testing.assert_close(logits[0], uncached(fresh("llama"), [3, 9, 11])[0], rtol=1e-4, atol=1e-4)
    runner.model.load_state_dict(tiny("llama").state_dict())
    runner.rewind([0, 0])
    made = runner.run(PASS, tokens, None)
    assert made is not None
    torch.testing.assert_close(made[0][0], uncached(tiny("llama"), [3, 9, 11])[0], rtol=1e-4, atol=1e-4)


def test_damaged_code_is_not_run(
    own_cache: Path, compiled_pass: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, and it is gone."""
    sound = compiled_pass.read_bytes()
    compiled_pass.write_bytes(sound[:-100] + bytes(100))
    runner = _twin()
    assert runner.run(PASS, torch.ones(2, 2, dtype=torch.long), None) is None
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and "it is not what was written" in line.getMessage()
    assert not compiled_pass.exists()
    runner.extend(torch.ones(2, 2, dtype=torch.long))  # eagerly
    assert runner.lengths == [2, 2]
    compiled_pass.write_bytes(sound)
    assert _twin().run(PASS, torch.ones(2, 2, dtype=torch.long), None) is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "gpt_neox", "llama-eager", "gemma2", "mistral"])
def test_compiled_code_of_all_architectures_and_both_shapes(kind: str) -> None:
    _programs(kind, 1, 3)
    runner = make_runner(tiny(kind), batch=4, max_len=40, compile=True)
    assert isinstance(runner, CapturedRunner)
    _some_rows(kind, runner)


def test_other_weights_are_other_code() -> None:
    runner = make_runner(fresh("gpt2"), max_len=20, compile=None)
    assert isinstance(runner, CapturedRunner)
    assert runner.run(PASS, torch.ones(1, 1, dtype=torch.long), None) is None
    assert runner.lengths == [0]
    runner.extend(torch.ones(1, 3, dtype=torch.long))
    assert runner.lengths == [3]


def test_a_failing_compilation_is_one_clear_line() -> None:
    class Broken(Unit):
        def forward(self, run: object, extras: object) -> tuple[torch.Tensor, ...]:
            raise NotImplementedError("no such thing")

    runner = make_runner(fresh("gpt2"), max_len=20, compile=True)
    assert isinstance(runner, CapturedRunner)
    with pytest.raises(UserError, match=r"GPT2LMHeadModel cannot be compiled \(no such thing\): use compile"):
        runner.run(Broken("broken"), torch.ones(1, 2, dtype=torch.long), None)
    assert not list(cache_dir().glob("broken*"))


def test_misuse_of_run_changes_nothing() -> None:
    runner = captured("llama", 2, 8)
    runner.extend(torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="would hold 9 tokens"):
        runner.run(PASS, torch.ones(2, 4, dtype=torch.long), None)
    assert runner.lengths == [5, 5]


def test_what_cannot_be_captured_says_why() -> None:
    assert capture_kind(tiny("llama")) == ("compiled", "compiled code, kept on disk")
    kind, reason = capture_kind(tiny("gpt_neo"))
    assert kind == "none" and "crop runner" in reason
    with pytest.raises(UserError, match="cannot be compiled: the crop runner serves it"):
        make_runner(tiny("gpt_neo"), max_len=8, compile=True)
    assert make_runner(tiny("gpt_neo"), max_len=8, compile=None).name == "crop"
    assert make_runner(tiny("llama"), max_len=8).name == "row"
    quantised = fresh("llama")
    quantised.lm_head.weight = torch.nn.Parameter(torch.ones(61, 32, dtype=torch.int8), requires_grad=False)
    assert capture_kind(quantised) == ("none", "its weights are quantised")
    assert make_runner(quantised, max_len=8, compile=None).name == "row"
    double = fresh("llama").double()
    assert capture_kind(double) == ("none", "it is in float64, and compiled attention is in float32")
    assert make_runner(double, max_len=8, compile=None).name == "row"


def test_a_torch_that_is_too_old_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.1+cpu")
    with pytest.raises(
        UserError, match=r"torch 2.8.1\+cpu is installed, and compiled code needs 2.9 or newer; use"
    ):
        make_runner(tiny("llama"), max_len=8, compile=True)
    assert make_runner(tiny("llama"), max_len=8, compile=None).name == "row"
    monkeypatch.setattr(torch, "__version__", "2.13.0a0+git1")
    assert capture_kind(tiny("llama"))[0] == "compiled"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on import
def test_the_compiler_knows_our_kernels_for_a_while_only() -> None:
    import torch._inductor.compile_fx
    from torch._inductor.codegen.cpp_micro_gemm import micro_gemm_configs
    from torch._inductor.lowering import lowerings

    before, op = dict(micro_gemm_configs), torch.ops.sprinter.attention.default
    with own_products(), own_attention_kernel():
        assert next(iter(micro_gemm_configs)).__name__ == "Product" and op in lowerings
        assert len(micro_gemm_configs) == len(before) + 1
    assert list(micro_gemm_configs.items()) == list(before.items()) and op not in lowerings


def test_caches_that_do_not_fit_are_refused_with_the_largest_batch() -> None:
    model = tiny("llama")
    runner = make_runner(model, batch=2, max_len=16)
    runner.extend(torch.ones(2, 3, dtype=torch.long))
    held = sum(x.numel() * x.element_size() for x in runner._cache.buffers())  # type: ignore[attr-defined]
    assert 2 * memory.cache_bytes(model, 16) == held
    budget = 7 * memory.cache_bytes(model, 100)
    memory.check_memory([model], 7, 100, budget)
    with pytest.raises(UserError, match="use a batch of 7 or less"):
        memory.check_memory([model], 8, 100, budget)
    with pytest.raises(UserError, match="use a batch of 3 or less"):
        memory.check_memory([model, model], 4, 100, budget)
    with pytest.raises(UserError, match="use shorter rows"):
        memory.check_memory([model], 1, 1000, budget)
    memory.check_memory([model], 1, 16)
    with pytest.raises(UserError, match="rows of 16 tokens need"):
        memory.check_memory([model], 10**9, 16)


@pytest.mark.slow
def test_ten_thousand_rounds_do_not_grow() -> None:
    runner = make_runner(tiny("llama"), max_len=40, compile=True)
    three, one = torch.ones(1, 3, dtype=torch.long), torch.ones(1, 1, dtype=torch.long)

    def rounds(n: int) -> int:
        for _ in range(n):
            runner.rewind([0])
            runner.extend(three)
            runner.extend(one)
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * 4096

    before = rounds(500)
    assert rounds(10_000) - before < 2**20


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_bfloat16_compiles_in_both_shapes(n: int) -> None:
    model = fresh("llama").bfloat16()
    runner = make_runner(model, max_len=40, compile=True)
    assert isinstance(runner, CapturedRunner)
    made = runner.run(PASS, torch.ones(1, n, dtype=torch.long), None)
    assert made is not None
    eager = make_runner(model, max_len=40).extend(torch.ones(1, n, dtype=torch.long)).logits
    torch.testing.assert_close(made[0], eager, rtol=0.05, atol=0.05)


def test_a_model_that_was_moved_has_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(recipe: Recipe, may_compile: bool) -> None:
        asked.append(compiled_key(recipe))

    monkeypatch.setattr("sprinter.models.capture.units.find_compiled", find)
    for place in ("here", "there"):
        model = fresh("llama")
        model.load_state_dict(tiny("llama").state_dict())
        model.config._name_or_path = place
        make_runner(model, max_len=20, compile=None).extend(torch.ones(1, 3, dtype=torch.long))
    assert len(asked) == 2 and asked[0] == asked[1]


@pytest.mark.parametrize("kind", ["llama", "qwen2-sliding", "gemma2"])
def test_passes_of_other_threads_go_on_as_before_while_a_model_is_traced(kind: str) -> None:
    model, tokens = fresh(kind), torch.arange(2, 8)[None]
    with torch.inference_mode():
        wanted = model(tokens).logits
        with own_attention(model), ThreadPoolExecutor(1) as other:
            told = other.submit(torch.inference_mode()(lambda: model(tokens).logits)).result()
    assert torch.equal(told, wanted)


def test_heads_are_part_of_what_compiled_code_depends_on() -> None:
    assert {"head.py", "features.py", "networks.py", "calibration.py"} <= {path.name for path in _SOURCES}
    assert [path for path in _SOURCES if not path.is_file()] == []
