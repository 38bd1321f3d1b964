"""``sprinter convert gguf``, and the command line on its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.tiny import Places, Run
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama


def test_help(run: Run) -> None:
    status, out, err = run("convert")
    assert (status, err) == (0, "") and "gguf" in out


def test_convert_and_generate(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    saved_llama(tmp_path / "target", 1)
    saved_llama(tmp_path / "draft", 2, num_hidden_layers=1)
    files = [str(tmp_path / f"{name}.gguf") for name in ("target", "draft")]
    for name, file in zip(("target", "draft"), files, strict=True):
        status, out, err = run("convert", "gguf", str(tmp_path / name), file, "--dtype", "f32", "--json")
        assert (status, err) == (0, "")
        assert json.loads(out) == {"file": file, "dtype": "f32", "bytes": Path(file).stat().st_size}
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    pair = ("--target", files[0], "--draft", files[1])
    status, out, err = run("generate", "the thing", *pair, "--max-new-tokens", "5", "--json")
    assert (status, err) == (0, "")
    status, out, _ = run("doctor", *pair, "--json")
    details = {check["name"]: check["detail"] for check in json.loads(out)["checks"]}
    assert status == 0
    assert (
        details["target"]
        == "llama: llamacpp runner (a GGUF file, F32, which llama.cpp runs on the CPU); exact up to rounding"
    )
    assert "speculative equals autoregressive" in details["self-test"]
    assert "MiB" in details["pair"]


def test_mistakes_are_one_line(run: Run, places: Places, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    status, out, err = run("convert", "gguf", str(places.root / "none"), str(tmp_path / "x.gguf"))
    assert (status, out, err.count("\n")) == (2, "", 1) and "does not exist" in err
    status, out, err = run("convert", "gguf", str(places.target), str(tmp_path / "x.bin"))
    assert (status, out, err.count("\n")) == (2, "", 1) and "must end in .gguf" in err
    status, out, err = run("convert", "gguf", str(places.target), str(tmp_path / "x.gguf"), "--dtype", "q2")
    assert (status, out, err.count("\n")) == (2, "", 1) and "'q2' is not one of" in err


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a target and a draft, both directories."""
    root = tmp_path_factory.mktemp("pair")
    saved_llama(root / "target", 1)
    saved_llama(root / "draft", 2, num_hidden_layers=1)
    return ["--target", str(root / "target"), "--draft", str(root / "draft")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own."""
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_runner_that_was_asked_for(
    run: Run, pair: list[str], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    asked = ("generate", "the thing", *pair, "-n", "12", "--json")
    _, torch, _ = run(*asked)
    status, out, _ = run(*asked, "--runner", "llamacpp", "--dtype", "float32")
    assert status == 0 and json.loads(out)["text"] == json.loads(torch)["text"]
    kept = sorted(path.name.rpartition("-")[0] for path in cache.glob("*.gguf"))
    assert kept == ["draft-f32", "target-f32"]
    assert [record.message.split()[0] for record in caplog.records].count("converting") == 2
    before = {path: path.stat().st_mtime_ns for path in cache.glob("*.gguf")}
    status, out, _ = run(*asked, "--runner", "llamacpp", "--dtype", "float32")
    assert status == 0 and {path: path.stat().st_mtime_ns for path in cache.glob("*.gguf")} == before
    assert run(*asked, "--runner", "llamacpp").status == 0
    assert len(list(cache.glob("*-f16-*.gguf"))) == 2  # halves unless told otherwise
    status, out, _ = run("doctor", *pair, "--runner", "llamacpp", "--json")
    details = {check["name"]: check["detail"] for check in json.loads(out)["checks"]}
    assert status == 0
    for which in ("target", "draft"):
        assert (
            details[which]
            == "llama: llamacpp runner (a GGUF file, F32, which llama.cpp runs on the CPU); exact up to rounding"
        )


def test_changed_weights_are_converted_anew(run: Run, tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    asked = ("generate", "the", "--target", str(tmp_path / "target"), "-n", "12", "--json", "-t", "0")
    texts = []
    for seed in (1, 2):
        saved_llama(tmp_path / "target", seed)
        status, out, _ = run(*asked, "--runner", "llamacpp")
        assert status == 0
        texts.append(json.loads(out)["text"])
    assert len(list(cache.glob("*.gguf"))) == 2 and texts[0] != texts[1]


def test_the_builtin_pair_by_llamacpp(run: Run, cache: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    status, out, _ = run(
        "generate", "The city", "-n", "8", "--json", "--runner", "llamacpp", "--dtype", "q8_0"
    )
    assert status == 0 and json.loads(out)["stats"]["new_tokens"] == 8
    assert len(list(cache.glob("*-q8_0-*.gguf"))) == 2


def test_a_bench_by_llamacpp(run: Run, pair: list[str], cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    suite = tmp_path / "texts.txt"
    suite.write_text("the thing that\n\nthis is the third\n", encoding="utf-8")
    asked = (
        "bench",
        "-s",
        str(suite),
        "--rule",
        "whole",
        "-n",
        "4",
        "--no-quality",
        "--no-analysis",
        "--json",
        *pair,
    )
    arms = ("-a", "autoregressive", "-a", "speculative(gamma=2)", "-a", "llamacpp:plain")
    status, out, err = run(*asked, *arms, "--runner", "llamacpp", "-o", str(tmp_path / "out"))
    assert status == 0, err
    found = json.loads(out)
    assert {row["arm"] for row in found["summary"]} == {
        "autoregressive",
        "speculative(gamma=2)",
        "llamacpp:plain",
    }
    assert "GGUF" in json.dumps(found)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ("--runner", "llamacpp", "--dtype", "bfloat16"),
            "no dtype 'bfloat16': use auto, float32, float16, q8_0",
        ),
        (("--runner", "vllm"), "'vllm' is not one of"),
    ],
)
def test_wrong_runners_are_one_line(run: Run, pair: list[str], options: tuple[str, ...], line: str) -> None:
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    status, out, err = run("generate", "the", *pair, *options)
    assert (status, out, err.count("\n")) == (2, "", 1) and line in err


def test_torch_refuses_a_damaged_file(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    status, out, err = run("generate", "the", "--target", str(tmp_path / "model.gguf"), "--runner", "torch")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "is damaged or cut short: fetch it again" in err


def test_flops_of_a_file_are_those_of_its_directory(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    saved_llama(tmp_path / "target", 1)
    file = str(converted(tmp_path / "target"))
    status, out, err = run("theory", "flops", file, str(tmp_path / "target"), "--json")
    assert status == 0, err
    one, other = json.loads(out)["models"]
    assert one["flops_per_token"] == other["flops_per_token"] > 0 and one["context"] == other["context"]
    status, out, err = run("theory", "flops", "--target", file, "--draft", file, "--json")
    assert status == 0, err
    status, out, err = run("theory", "flops", str(tmp_path / "none.gguf"))
    assert (status, out, err.count("\n")) == (2, "", 1) and "none.gguf does not exist: check the path" in err
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and no more")
    status, out, err = run("theory", "flops", str(tmp_path / "bad.gguf"))
    assert (status, out, err.count("\n")) == (2, "", 1) and "is damaged or cut short" in err


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GGUF files: a target, a draft, one cut short, one of no architecture that there is."""
    pytest.importorskip("gguf", reason=NO_GGUF)
    pytest.importorskip("llama_cpp", reason=NO_LLAMA)
    root = tmp_path_factory.mktemp("files")
    for name, changes in (("target", {}), ("draft", {"num_hidden_layers": 1})):
        saved_llama(root / name, 1, **changes)  # type: ignore[arg-type]
        converted(root / name).rename(root / f"{name}.gguf")
    whole = (root / "target.gguf").read_bytes()
    (root / "short.gguf").write_bytes(whole[: len(whole) * 2 // 3])
    length = (5).to_bytes(8, "little")
    (root / "lemur.gguf").write_bytes(whole.replace(length + b"llama", length + b"lemur", 1))
    return root


@pytest.mark.parametrize(
    ("target", "options", "line"),
    [
        ("lemur", (), "unknown model architecture: 'lemur'"),
        ("short", (), "is damaged or cut short: fetch it again"),
        ("none", (), "none.gguf does not exist: check the path"),
        ("target", ("-n", "127"), "exceed the context of the target"),
        ("target", ("--compile",), "target.gguf cannot be compiled: llamacpp runs it; use --no-compile"),
        ("target", ("--draft", "draft", "-m", "sprinter"), "needs a gate"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, files: Path, target: str, options: tuple[str, ...], line: str
) -> None:
    given = [str(files / f"{word}.gguf") if word == "draft" else word for word in options]
    status, out, err = run("generate", "the thing", "--target", str(files / f"{target}.gguf"), *given)
    assert (status, out, err.count("\n")) == (2, "", 1) and line in err
