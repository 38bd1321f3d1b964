"""``sprinter doctor``: checks the installation, the machine and the models."""

from __future__ import annotations

import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from sprinter.cli.doctor_probe import run_probe, show_probe
from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.options import JsonOption, refuse_unused
from sprinter.cli.pages import console, print_json
from sprinter.cli.pairs import named_pairs
from sprinter.cli.signature import in_options, option
from sprinter.errors import UserError, first_line

if TYPE_CHECKING:
    from rich.table import Table

    from sprinter.engine.pair import Pair
    from sprinter.models.gguf.repack import Repacking
    from sprinter.models.pair import LoadedModel
    from sprinter.models.translated import TranslatedModel

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_PROMPT, _TOKENS = "The river rises in the hills north of the town and", 16


Status = Literal["ok", "warn", "fail"]
Found = tuple[Status, str]


class Finding(NamedTuple):
    """One line of the report; ``pair``: the name of the pair that it is about, if it has one."""

    name: str
    status: Status
    detail: str
    pair: str | None = None


@loads("profile", "suffix_cache")
def doctor(
    loading: Loading = Loading(),
    pair: Annotated[
        list[str] | None,
        option(
            "A pair by name, as 'serve' takes it: NAME=target=org/big,draft=org/small,dtype=int8; may be repeated.",
            default=False,
        ),
    ] = None,
    probe: Annotated[
        Path | None,
        option(
            "Your texts instead of the checks: how far the draft agrees, what passes cost, which methods are faster. "
            "One text a line (.txt), or .jsonl with prompt and answer, or messages.",
            default=False,
        ),
    ] = None,
    max_drift: Annotated[
        float, option("With --probe: maximum drift of lossy methods.", min=0.0, max=1.0)
    ] = 0.1,
    probe_tokens: Annotated[int, option("With --probe: number of tokens to probe.", min=1)] = 800,
    temperature: Annotated[float, option("With --probe: 0 is greedy.", "--temperature", "-t")] = 1.0,
    json: JsonOption = False,
) -> int:
    """Check the installation: versions, devices, models, runners, and a short generation; or probe your own texts."""
    named: list[tuple[str | None, Loading]] = [*named_pairs(pair, loading)] if pair else [(None, loading)]
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise UserError(f"--pair {twice[0]}= was given twice: give each pair a name of its own")
    options = {"max_drift": max_drift, "probe_tokens": probe_tokens, "temperature": temperature}
    if probe is not None:
        if len(named) > 1:
            raise UserError("--probe reads texts for one pair: give one --pair")
        found = run_probe(
            named[0][1], probe, max_drift=max_drift, positions=probe_tokens, temperature=temperature
        )
        if json:
            print_json({"ok": True, "probe": found})
        else:
            show_probe(found)
        return 0
    refuse_unused(doctor, options, "without --probe: give --probe FILE too")
    checks: list[Finding] = []
    for check in _checks(named):
        checks.append(check)
        if not json:
            console().print(_line(check))
    failed = any(check.status == "fail" for check in checks)
    if json:
        said = [{key: value for key, value in one._asdict().items() if value is not None} for one in checks]
        print_json({"ok": not failed, "checks": said})
    return 1 if failed else 0


def _line(check: Finding) -> Table:
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2, 0, 0))
    for width in (4, 9, None):
        line.add_column(width=width, overflow="fold")
    detail = check.detail if check.pair is None else f"{check.pair}: {check.detail}"
    line.add_row(Text(check.status, _COLOURS[check.status]), Text(check.name), Text(detail))
    return line


def _checks(pairs: Sequence[tuple[str | None, Loading]]) -> Iterator[Finding]:
    """Run all checks in order; an exception makes a check fail and does not end the command."""
    for check in (_versions, _devices, _threads, _cpu, _kernels, _cache):
        yield _safely(check.__name__[1:], check)
    for name, loading in pairs:
        for found in _pair_checks(loading):
            yield found._replace(pair=name)


def _pair_checks(loading: Loading) -> Iterator[Finding]:
    as_stored = loading.runner == "auto" and (loading.target or "").endswith(".gguf")
    try:  # float32 where no dtype was asked for; GGUF files as runner="auto" has them
        pair = load(loading, **({} if as_stored else {"dtype": "float32"}))
    except Exception as error:
        yield Finding("pair", "fail", first_line(error))
        return
    yield _safely("pair", lambda: _sizes(pair, builtin=loading.target is None))
    yield _safely("target", lambda: _runner(pair.models.target))
    yield _safely("draft", lambda: _runner(pair.models.draft))
    if any(_foreign(pair)):
        yield _safely("tokens", lambda: _vocabulary(pair))
    if any(_repackings(pair)):
        yield _safely("llama.cpp", lambda: _llamacpp(pair))
    yield _safely("passes", lambda: _passes(pair))
    yield _safely("gate", lambda: _gate(pair))
    yield _safely("self-test", lambda: _self_test(pair))


def _safely(name: str, check: Callable[[], Found]) -> Finding:
    try:
        return Finding(name, *check())
    except Exception as error:
        return Finding(name, "fail", first_line(error))


def _versions() -> Found:
    import torch
    import transformers

    import sprinter

    return "ok", (
        f"sprinter {sprinter.__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def _devices() -> Found:
    import torch

    found = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return "ok", ", ".join([*found, f"cpu ({platform.processor() or platform.machine()})"])


def _threads() -> Found:
    from sprinter.models.devices import find_threads

    found = find_threads()
    detail = (
        f"{found.now} thread{'s' * (found.now != 1)}, {found.cores} core{'s' * (found.cores != 1)} may be used, others "
        f"keep {found.busy:.1f} of them busy"
    )
    return ("ok", detail) if found.warning is None else ("warn", f"{detail}: {found.warning}")


def _cpu() -> Found:
    import torch

    kind = torch.backends.cpu.get_cpu_capability()
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return "ok", f"vector instructions: {kind}"
    flags = set(info.read_text(encoding="utf-8", errors="replace").split())
    bf16 = "yes" if {"avx512_bf16", "bf16"} & flags else "no, float32 is faster"
    amx = "yes" if "amx_tile" in flags else "no"
    return "ok", f"vector instructions: {kind}; native bfloat16: {bf16}; AMX: {amx}"


def _cache() -> Found:
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    place = cache
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        way_out = "set HF_HOME before loading models from the hub"
        return "warn", f"{cache} cannot be written ({error.strerror}): {way_out}"
    return "ok", f"{cache} can be written"


def _models(pair: Pair) -> dict[str, LoadedModel]:
    both = {"target": pair.models.target, "draft": pair.models.draft}
    return {which: model for which, model in both.items() if model is not None}


def _sizes(pair: Pair, *, builtin: bool) -> Found:
    parts = [
        f"{which} {_short(model.size)} parameters{_on_disk(Path(model.id))}"
        for which, model in _models(pair).items()
    ] + ["no draft"] * (pair.models.draft is None)
    name = "built-in" if builtin else pair.models.target.id
    context = f"vocabulary {pair.models.vocab_size:,}, context {pair.models.context:,}"
    return "ok", f"{name}: {', '.join(parts)}; {context}"


def _short(count: int) -> str:
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M")) if count >= size), (1e3, "k"))
    return f"{count / size:.{int(unit != 'k')}f} {unit}"


def _on_disk(directory: Path) -> str:
    files = directory.glob("*.safetensors") if directory.is_dir() else [directory]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return f" ({sum(sizes) / 2**20:.1f} MiB)" if sizes else ""


def _runner(model: LoadedModel | None) -> Found:
    from sprinter.models.choose import exactness, runner_kind

    if model is None:
        return "warn", "no draft: only autoregressive decoding is possible"
    kind, reason = runner_kind(model.model)
    name = getattr(model.model, "architecture", type(model.model).__name__)
    return (
        "ok",
        f"{name}: {kind} runner ({reason}){_dequantised(model)}{_held(model)}; exact {exactness(model.model)}",
    )


def _held(model: LoadedModel) -> str:
    """The dtype of its keys and values and their size, where our kernels keep them."""
    from sprinter.models.kernels import cache_dtype_of
    from sprinter.models.memory import token_bytes

    dtype = cache_dtype_of(model.model)
    return "" if dtype is None else f"; cache of {token_bytes(model.model) / 1024:.1f} KiB a token ({dtype})"


def _dequantised(model: LoadedModel) -> str:
    """For a GGUF file that PyTorch runs: how its weights were stored, and how long reading them took."""
    if model.stored is None:
        return ""
    weights = model.weights.split(" ")[0]
    return f"; a GGUF file, {model.stored}, dequantised to {weights} in {model.load_s:.1f} s"


def _passes(pair: Pair) -> Found:
    """How the short forward passes of both models run, and why."""
    return "ok", _joined({which: _pass_kind(model.model) for which, model in _models(pair).items()})


def _joined(found: Mapping[str, str]) -> str:
    """The findings for each model as one text; equal findings appear once."""
    kinds = set(found.values())
    return kinds.pop() if len(kinds) == 1 else "; ".join(f"{which} {kind}" for which, kind in found.items())


def _foreign(pair: Pair) -> list[TranslatedModel]:
    """The draft, if its vocabulary is another one."""
    from sprinter.models.translated import TranslatedModel

    return [one.model for one in _models(pair).values() if isinstance(one.model, TranslatedModel)]


def _vocabulary(pair: Pair) -> Found:
    """What a draft of another vocabulary costs: tokens that it lacks, its overlap, and the time of translating."""
    from sprinter.laws import overlap
    from sprinter.models.common_tokens import SAMPLES, added_first
    from sprinter.theory.recording import Passage, read_passages

    (draft,), tokenizer = _foreign(pair), pair.models.tokenizer
    assert tokenizer is not None
    texts = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in SAMPLES.items()}
    shares = ", ".join(f"{draft.tokens.share(ids):.0%} in {name}" for name, ids in texts.items())
    every = [token for ids in texts.values() for token in ids]
    longer = sum(len(draft.tokens.read_as(token)) for token in every) / len(every)
    before = added_first(tokenizer)
    read = read_passages(pair, [Passage((*before, ids[0]), tuple(ids[1:])) for ids in texts.values()])
    beta = float(overlap(read.p, read.q).mean())
    whole, own = draft.step_s(every)
    return "ok", (
        f"different: {len(draft.tokens.ids):,} tokens in common, of a text's {shares}; expected acceptance {beta:.2f} "
        f"on such texts at temperature 1; the draft reads {longer:.2f} of its tokens for each of the target's, and a "
        f"step takes {1e3 * whole:.1f} ms, of which translating {1e3 * max(0.0, whole - own):.1f}"
    )


def _repackings(pair: Pair) -> dict[str, Repacking]:
    """Repacking verdicts of the models that llama.cpp runs, by name."""
    from sprinter.models.gguf.load import GgufModel

    return {
        which: loaded.model.repacking
        for which, loaded in _models(pair).items()
        if isinstance(loaded.model, GgufModel)
    }


def _llamacpp(pair: Pair) -> Found:
    """Whether llama.cpp repacks the models' weights, and why."""
    found = _repackings(pair)
    words = {
        which: f"weights {'repacked' if one.on else 'as stored'}: {one.reason}"
        for which, one in found.items()
    }
    return "ok" if all(one.on for one in found.values()) else "warn", _joined(words)


def _pass_kind(model: Any) -> str:
    from sprinter.models.choose import capture_kind
    from sprinter.models.kernels import why_not_fused

    kind, reason = capture_kind(model)
    if kind == "none":
        return in_options(f"eager: {reason}")
    if kind == "graphs":
        why = why_not_fused(model)
        return f"{kind}: {reason}, {'of fused layers' if why is None else f'layers are not fused: {why}'}"
    return f"{kind}: {reason}"


def _kernels() -> Found:
    """Which of our kernels a CPU has."""
    from sprinter.models.kernels import name_of, why_none

    name = name_of()
    return ("ok", name) if name is not None else ("warn", f"slower on a CPU: {why_none()}")


def _gate(pair: Pair) -> Found:
    if pair.gate is None:
        return "warn", "no gate: sprinter methods need one, all others work"
    config = pair.gate.config
    detail = (
        f"made for {config.draft_id}, label {config.label}, {pair.gate.size} parameters, tau {config.tau:g}"
    )
    return "ok", detail + ("" if config.drift is None else f", where it expects drift {config.drift:.3f}")


def _self_test(pair: Pair) -> Found:
    """Checks that speculative decoding at temperature 0 gives the target's own text."""
    plain = pair.generate(_PROMPT, method="autoregressive", temperature=0.0, max_new_tokens=_TOKENS)
    if pair.models.draft is None and pair.drafting is None:
        return "ok", f"{len(plain.tokens)} tokens decoded with the target alone"
    method = "heads" if pair.models.draft is None else "speculative"
    exact = pair.generate(_PROMPT, method=method, temperature=0.0, max_new_tokens=_TOKENS)
    ours, theirs = ([token.id for token in out.tokens] for out in (exact, plain))
    if ours != theirs:
        at = next(i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
        return "fail", f"greedy speculative decoding differs from the target's own text at token {at + 1}"
    speed = exact.stats.tokens_per_s
    return "ok", f"{len(ours)} greedy tokens, speculative equals autoregressive ({speed:.0f} tokens/s)"
