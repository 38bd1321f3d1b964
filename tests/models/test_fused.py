"""Fused layers for NVIDIA GPUs: equal to transformers' own, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.models.fake_cuda import fake_cuda
from tests.models.tiny import fresh, tiny
from tests.models.told import Told
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.cli.doctor import _pass_kind
from sprinter.models import choose
from sprinter.models import fused_trial as trial
from sprinter.models.capture import graphs
from sprinter.models.capture.graphs import GraphUnits
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.capture.trace import RowPass
from sprinter.models.choose import _choose, make_runner
from sprinter.models.fused_trial import fused
from sprinter.models.kernels import round_linears
from sprinter.models.reduced_vocab import cut_output

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels import families
from sprinter_kernels import fused as layers
from sprinter_kernels import fused_plan as plan
from sprinter_kernels.fused import fused_layers, why_not_fused
from sprinter_kernels.fused_plan import COLUMNS, ROWS, product_plan, stages, tokens_block

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is installed on Linux alone")
ON_GPU = torch.cuda.is_available()
_NO_NORMS: Any = (layers.Norms(*[None] * 8), None)
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "mistral", "gpt2", "phi3")
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SLOTS = 80


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels take seconds for each ten tokens: without a GPU, nine tokens are many already."""
    if not ON_GPU:
        monkeypatch.setattr(layers, "MOST", 8)
        monkeypatch.setattr(trial, "_rows", lambda: (1, 2))


def model_of(kind: str) -> PreTrainedModel:
    """Its norms and biases are not the ones and zeros that they begin as."""
    model, chance = fresh(kind), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=chance)
    return model.to(DEVICE)  # type: ignore[arg-type]


def run_pass(
    model: PreTrainedModel,
    tokens: Tensor,
    starts: list[int],
    rows: list[int] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logits, states and buffers of a pass over rows that begin at ``starts``, behind random keys and values."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    chance = torch.Generator().manual_seed(1)
    held = len(tokens) if rows is None else 3
    buffers = [
        torch.randn(held, heads, SLOTS + 1, d, generator=chance).to(model.device, dtype or model.dtype)
        for _ in range(2 * config.num_hidden_layers)
    ]
    positions = (torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1])).to(model.device)
    numbers = torch.arange(held) if rows is None else torch.tensor(rows)
    run = RowPass(model, _choose(model).windows, rows is not None)
    keys = torch.arange(SLOTS, device=model.device)
    with torch.inference_mode():
        made = run(tokens.to(model.device), positions, positions, numbers.to(model.device), keys, buffers)
    return made[0], made[1], buffers


@pytest.mark.parametrize("kind", FAMILIES)
def test_fused_layers_compute_what_transformers_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind)
    assert why_not_fused(model) is None
    tokens = torch.randint(0, 61, (2, 2), generator=torch.Generator().manual_seed(2))
    expected = run_pass(model, tokens, [0, 31], [2, 0])
    monkeypatch.setattr(layers._Own, "_usual", None)  # nothing may call it
    norms, usual = [], layers._Layer._add
    monkeypatch.setattr(layers._Layer, "_add", lambda self, *given: (norms.append(1), usual(self, *given))[1])
    with fused_layers(model):
        given = run_pass(model, tokens, [0, 31], [2, 0])
    assert len(norms) == 2 * model.config.get_text_config().num_hidden_layers + 1
    for one, other in zip((*given[:2], *given[2]), (*expected[:2], *expected[2]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_many_rows_have_the_librarys_products_and_our_attention(kind: str) -> None:
    model = model_of(kind)
    tokens = torch.randint(0, 61, (layers.MOST // 2 + 1, 2), generator=torch.Generator().manual_seed(2))
    starts = [row % 40 for row in range(len(tokens))]
    expected = run_pass(model, tokens, starts)
    calls, usual = [], layers._Layer._inner_of_many
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            layers._Layer, "_inner_of_many", lambda self, x: (calls.append(len(x)), usual(self, x))[1]
        )
        with fused_layers(model):
            given = run_pass(model, tokens, starts)
    assert calls == [layers.MOST + 2] * model.config.get_text_config().num_hidden_layers
    for one, other in zip((*given[:2], *given[2]), (*expected[:2], *expected[2]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_fused_layers_of_eight_bits_compute_what_pytorch_does(kind: str) -> None:
    model = model_of(kind)
    round_linears(model)
    assert why_not_fused(model) is None
    tokens = torch.randint(0, 61, (1, 2), generator=torch.Generator().manual_seed(2))
    expected = run_pass(model, tokens, [4])
    with fused_layers(model):
        given = run_pass(model, tokens, [4])
    for one, other in zip(given[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_products_are_split_among_programs_and_what_reads_them_adds_the_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "_LEAST", 64)
    plan.product_plan.cache_clear()
    chance = torch.Generator(DEVICE).manual_seed(6)
    layer = layers._Layer(model_of("llama").model.layers[0], *_NO_NORMS)
    linear = torch.nn.Linear(300, 32, device=DEVICE)
    x, states = (torch.randn(3, width, generator=chance, device=DEVICE) for width in (300, 32))
    matrix = layers._Matrices.of(layers.MatrixPart(linear, 0, 0, 20), layers.MatrixPart(linear, 0, 20, 12))
    parts = layers._multiply(x, matrix)
    assert len(parts) == 3 and parts.dtype == torch.float32
    expected = x @ linear.weight.T
    torch.testing.assert_close(parts.sum(0), expected, rtol=1e-4, atol=1e-4)
    total, _ = layer._add(states, parts, linear.bias, None, None, None)
    torch.testing.assert_close(total, states + expected + linear.bias, rtol=1e-4, atol=1e-4)
    plan.product_plan.cache_clear()


def test_long_passes_and_other_caches_take_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(layers, "LARGEST", layers.MOST)
    many, few = (
        torch.ones(1, layers.MOST + 1, dtype=torch.long),
        torch.ones(1, 4, dtype=torch.long, device=DEVICE),
    )
    expected = run_pass(model, many, [0])[0], model(few).logits
    monkeypatch.setattr(layers._Layer, "_attention", None)  # nothing may call it
    monkeypatch.setattr(layers, "_multiply", None)
    with fused_layers(model):
        given = run_pass(model, many, [0])[0]
        model.lm_head.__dict__.pop("forward")  # it is given few states of any pass
        assert torch.equal(given, expected[0]) and torch.equal(model(few).logits, expected[1])


def test_other_threads_take_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of("llama"), torch.ones(1, 3, dtype=torch.long)
    expected = run_pass(model, tokens, [0])[0]
    monkeypatch.setattr(layers, "_multiply", None)  # nothing may call it
    with fused_layers(model), ThreadPoolExecutor(1) as pool:
        given = pool.submit(run_pass, model, tokens, [0]).result()[0]
    assert torch.equal(given, expected)


def test_an_output_layer_that_is_cut_is_fused_too() -> None:
    model = model_of("llama")
    cut_output(model, torch.tensor([1, 3, 9]))
    tokens = torch.ones(1, 1, dtype=torch.long)
    expected = run_pass(model, tokens, [0])[0]
    with fused_layers(model):
        assert "forward" in vars(model.get_output_embeddings().words)
        torch.testing.assert_close(run_pass(model, tokens, [0])[0], expected, rtol=1e-4, atol=1e-4)


def test_a_last_norm_with_an_eps_of_its_own_is_not_fused() -> None:
    model = model_of("llama")
    model.model.norm.variance_epsilon = 0.5
    tokens = torch.ones(1, 2, dtype=torch.long)
    expected = run_pass(model, tokens, [0])[0]
    with fused_layers(model):
        torch.testing.assert_close(run_pass(model, tokens, [0])[0], expected, rtol=1e-4, atol=1e-4)


def test_the_model_is_as_before_behind_it() -> None:
    model = model_of("llama")
    inside = []
    try:
        with fused_layers(model):
            inside = [part for part in model.modules() if "forward" in vars(part)]
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert len(inside) == 4  # two layers, norm and head
    assert not any("forward" in vars(part) for part in model.modules())


def _eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def _eps(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5


def _mixed(model: Any) -> None:
    model.model.norm.to(torch.float64)


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        ("gpt_neox", None, "do not know GPTNeoXLayer"),
        ("gemma2", None, "eager"),
        ("llama", _eager_attention, "its attention is 'eager'"),
        ("llama", _hook, "hooks"),
        ("llama", _mixed, "of several types"),
        ("llama", _activation, "mlp.act_fn is of class Tanh, not SiLU"),
        ("llama", _eps, "post_attention_layernorm.variance_epsilon is 0.5"),
    ],
)
def test_what_the_kernels_do_not_run_is_said_once(
    kind: str, change: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(kind)
    if change is not None:
        change(model)
    assert why in (why_not_fused(model) or "")
    for _ in range(2):
        with fused(RowPass(model, _choose(model).windows), []):
            assert not any("forward" in vars(part) for part in model.modules())
    (line,) = [one.getMessage() for one in caplog.records if one.name == "sprinter"]
    assert "without fused layers, which is slower: " in line and why in line


def test_layers_that_do_not_reach_the_kernels_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama")
    buffers = run_pass(model, torch.ones(1, 1, dtype=torch.long), [0])[2]
    # as if another version called it by another name
    monkeypatch.setattr(
        families.LayerFamily, "arguments", lambda self, _, given, named: {**named, "cache": None}
    )
    with fused(RowPass(model, _choose(model).windows), buffers) as applies:
        assert not applies
    (line,) = [one.getMessage() for one in caplog.records if one.name == "sprinter"]
    assert "which is slower: its layers are not given what the kernels take" in line


@pytest.mark.parametrize(
    ("kind", "told"), [("llama", "of fused layers"), ("gpt_neox", "do not know GPTNeoX")]
)
def test_doctor_says_whether_layers_are_fused(kind: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "capture_kind", lambda model: ("graphs", "CUDA graphs"))
    said = _pass_kind(model_of(kind))
    assert said.startswith("graphs: CUDA graphs, ") and told in said


def _wrong(normed: Tensor) -> Tensor:
    return torch.full((len(normed), 48), 3.0, device=DEVICE)


def _broken(*_: object) -> Tensor:
    raise RuntimeError("no such instruction\nin this kernel")


@pytest.mark.parametrize("which", ["_inner", "_inner_of_many"])
@pytest.mark.parametrize(("fault", "why"), [(_wrong, "states differ by"), (_broken, "no such instruction")])
def test_kernels_that_fail_a_trial_are_left_out_once(
    which: str, fault: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama")
    run = RowPass(model, _choose(model).windows)
    buffers = run_pass(model, torch.ones(1, 1, dtype=torch.long), [0])[2]
    monkeypatch.setattr(layers._Layer, which, lambda self, normed: fault(normed))
    monkeypatch.setattr(trial, "_tried", type(trial._tried)())
    for _ in range(2):
        with fused(run, buffers):
            assert not any("forward" in vars(part) for part in model.modules())
    (line,) = caplog.records
    assert line.levelno == logging.WARNING and why in line.getMessage() and "\n" not in line.getMessage()


def test_a_trial_looks_at_logits_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama")
    run = RowPass(model, _choose(model).windows)
    buffers = run_pass(model, torch.ones(1, 1, dtype=torch.long), [0])[2]
    monkeypatch.setattr(layers._Output, "__call__", lambda self, x: torch.full((*x.shape[:-1], 61), -5.0))
    with fused(run, buffers) as applies:
        assert not applies
    assert "differ" in caplog.text


def test_a_trial_without_memory_says_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    run = RowPass(model, _choose(model).windows)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(layers._Layer, "_inner", full)
        buffers = run_pass(model, torch.ones(1, 1, dtype=torch.long), [0])[2]
        with pytest.raises(torch.OutOfMemoryError), fused(run, buffers):
            pass
    with fused(run, buffers) as applies:
        assert applies


def test_a_kernel_that_fails_later_leaves_the_text_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if ON_GPU:
        pytest.skip("it pretends that there is a GPU")
    fake_cuda(monkeypatch)
    model = tiny("llama")
    monkeypatch.setitem(trial._tried, model, True)
    monkeypatch.setattr(layers._Layer, "_inner", lambda self, normed: _broken())
    windows = _choose(model).windows
    told = Told(
        CapturedRunner(model, 1, 40, windows, GraphUnits(model, windows, True, fused)), "llama", seed=4
    )
    for n in (2, 3, 1):
        told.extend([n])
    (line,) = caplog.records
    assert "without fused layers, which is slower: no such instruction" in line.getMessage()


def test_a_trial_passes_and_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    run = RowPass(model, _choose(model).windows)
    buffers = run_pass(model, torch.ones(1, 1, dtype=torch.long), [0])[2]
    with fused(run, buffers):
        assert any("forward" in vars(part) for part in model.modules())
    monkeypatch.setattr(trial, "_why_not", None)
    with fused(run, buffers):
        assert any("forward" in vars(part) for part in model.modules())


def test_graphs_are_captured_with_fused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        pytest.skip("it pretends that there is a GPU")
    fake_cuda(monkeypatch)
    monkeypatch.setattr(graphs, "_LEAST_KEYS", 8)
    model = tiny("llama")
    calls = []
    usual = layers._Layer._attention
    monkeypatch.setattr(layers._Layer, "_attention", lambda self, *a: (calls.append(1), usual(self, *a))[1])
    windows = _choose(model).windows
    told = Told(
        CapturedRunner(model, 1, 40, windows, GraphUnits(model, windows, True, fused)), "llama", seed=4
    )
    for n in (2, 1):
        told.extend([n])
    assert calls and not any("forward" in vars(part) for part in model.modules())


@pytest.mark.parametrize("processors", [8, 132])
def test_plans_cover_each_column_once_and_fit_in_memory(processors: int) -> None:
    for rows in (1, 64, 100, 1536, 4096, 14336, 151936):
        for columns in (32, 100, 576, 896, 1536, 4096, 14336):
            splits, each = product_plan(rows, columns, processors)
            assert each % COLUMNS == 0 and (splits - 1) * each < columns <= splits * each
    for tokens in (1, 16, 17, 64):
        for size in (1, 2, 4):
            block = COLUMNS * (ROWS * size + tokens_block(tokens) * max(size, 2))
            for memory in (99 << 10, 227 << 10):
                assert 1 <= stages(tokens, size, max(size, 2), memory) <= 5
                assert block <= memory


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma3"])
def test_captured_graphs_keep_the_bits_of_a_token(kind: str, dtype: torch.dtype) -> None:
    rounded = dtype == torch.int8
    dtype = torch.bfloat16 if rounded else dtype
    model = fresh(kind).to("cuda", dtype)  # type: ignore[arg-type]
    if rounded:
        round_linears(model)
    eager, captured = (make_runner(model, max_len=90, compile=compile) for compile in (False, True))
    tokens = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(1)).cuda()
    first = None
    for n in (1, 2, 5, 8, 16, 32):
        made = []
        for runner in (eager, captured):
            runner.rewind([0])
            runner.extend(tokens[:, :8])
            step = runner.extend(tokens[:, 8 : 8 + n])
            assert step.logits is not None
            made.append(step.logits)
        first = made[1][:, :1] if first is None else first
        assert torch.equal(made[1][:, :1], first)
        far = torch.linalg.norm((made[1] - made[0]).float()) / torch.linalg.norm(made[0].float())
        assert far <= trial.FAR[dtype]
    assert trial._tried[model]  # the kernels were not left out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_captured_graphs_of_many_rows_compute_what_transformers_do(kind: str, dtype: torch.dtype) -> None:
    rounded = dtype == torch.int8
    dtype = torch.bfloat16 if rounded else dtype
    model = fresh(kind).to("cuda", dtype)  # type: ignore[arg-type]
    if rounded:
        round_linears(model)
    rows = 100
    eager, captured = (make_runner(model, batch=rows, max_len=90, compile=on) for on in (False, True))
    tokens = torch.randint(0, 61, (rows, 40), generator=torch.Generator().manual_seed(1)).cuda()
    for runner in (eager, captured):
        runner.extend(tokens[:, :30])
        runner.rewind([row % 30 for row in range(rows)])
    for n in (1, 2, 5):
        one, other = (runner.extend(tokens[:, 30 : 30 + n]).logits for runner in (eager, captured))
        assert one is not None and other is not None
        assert torch.linalg.norm((other - one).float()) / torch.linalg.norm(one.float()) <= trial.FAR[dtype]
    assert trial._tried[model]


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """numpy's products in the interpreter are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
