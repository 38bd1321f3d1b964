"""Mistakes: each ends with status 2 and one line that says what is wrong and how to mend it."""

from __future__ import annotations

import io
import sys
import time

import pytest
from tests.cli.tiny import CONTEXT, Places, Run

from sprinter.cli import main

LABEL = ["gate", "label", "{pair}", "--data", "{root}/texts.txt", "--out", "{root}/labels"]

# name, arguments, words of the line; {target}, {root}, ... stand for the tiny models
REQUESTS = [
    ("empty prompt", ["generate", ""], ["prompt is empty", "give at least one word"]),
    ("prompt of surrogates", ["generate", "a\udcff"], ["not valid UTF-8", "0xff", "after 1 characters"]),
    ("tau", ["generate", "x", "-m", "sprinter(tau=7)"], ["tau=7 is out of range", "[0, 1]"]),
    ("gamma", ["generate", "x", "-m", "speculative(gamma=0)"], ["gamma=0 is out of range", ">= 1"]),
    ("cap", ["generate", "x", "-m", "sprinter(cap=0)"], ["cap=0 is out of range", ">= 1"]),
    ("temperature", ["generate", "x", "--temperature", "-1"], ["--temperature -1", "(0 is greedy)"]),
    ("temperature NaN", ["generate", "x", "--temperature", "nan"], ["--temperature nan", "(0 is greedy)"]),
    ("temperature inf", ["generate", "x", "--temperature", "inf"], ["--temperature inf", "(0 is greedy)"]),
    ("top-p", ["generate", "x", "--top-p", "0"], ["--top-p 0", "(0, 1]"]),
    ("top-k", ["generate", "x", "--top-k", "-3"], ["--top-k -3", "0 keeps all tokens"]),
    ("min-p", ["generate", "x", "--min-p", "1.5"], ["--min-p 1.5", "[0, 1]"]),
    ("no tokens", ["generate", "x", "--max-new-tokens", "0"], ["--max-new-tokens 0", ">= 1"]),
    ("limit no number", ["generate", "x", "-n", "many"], ["--max-new-tokens", "integer", "generate --help"]),
    ("seed no number", ["generate", "x", "--seed", "1.5"], ["--seed", "integer", "generate --help"]),
    ("unknown meter", ["generate", "x", "--meter", "full"], ["--meter", "'full'", "'running', 'complete'"]),
    ("empty stop string", ["generate", "x", "--stop", ""], ["--stop [''] is not text or", "none of them empty"]),
    ("stop of surrogates", ["generate", "x", "--stop", "\udcff"], ["stop string is not valid UTF-8"]),
    ("penalty", ["generate", "x", "--presence-penalty", "3"], ["--presence-penalty 3", "[-2, 2]"]),
    ("repetition", ["generate", "x", "--repetition-penalty", "0"], ["--repetition-penalty 0", "[0.01, 100]"]),
    ("bias without number", ["generate", "x", "--logit-bias", "5"], ["--logit-bias 5", "15=-100"]),
    ("bias", ["generate", "x", "--logit-bias", "5=200"], ["--logit-bias [(5, 200.0)]", "[-100, 100]"]),
    ("template arguments", ["generate", "x", "--chat-template-kwargs", "[1]"], ["[1] is not a JSON object"]),
    ("template arguments, no chat", ["generate", "x", "--chat-template-kwargs", '{{"a": 1}}'], ["goes with messages"]),
    ("no time", ["serve", "--queue-timeout", "0"], ["--queue-timeout 0.0 is out of range: give a number > 0"]),
    ("no memory", ["serve", "--memory-mib", "-3"], ["--memory-mib -3 is out of range: give a whole number >= 1"]),
    ("half of a certificate", ["serve", "--tls-cert", "a"], ["--tls-cert FILE and --tls-key FILE go together"]),
    ("empty bad word", ["generate", "x", "--bad-word", ""], ["--bad-word [''] is not", "none of them empty"]),
    ("least length", ["generate", "x", "--min-new-tokens", "9", "-n", "8"], ["tokens 9", "--max-new-tokens 8"]),
    ("logprobs as text", ["generate", "x", "--logprobs", "2"], ["--logprobs", "--json"]),
    ("two targets", ["generate", "x", "--target", "a", "--target", "b"], ["--target was given twice: give it once"]),
    ("two drafts", ["doctor", "--draft=a", "--draft", "a"], ["--draft was given twice"]),
    ("two methods", ["generate", "x", "-mlookup", "--method", "svip"], ["--method was given twice"]),
    ("two targets of a label run", [*LABEL, "--target", "{target}"], ["--target was given twice"]),
    ("unknown method", ["generate", "x", "-m", "speculativ"], ["'speculativ'", "did you mean 'speculative'?"]),
    ("empty method", ["generate", "x", "-m", ""], ["method is empty", "'sprinter'"]),
    ("unknown parameter", ["generate", "x", "-m", "speculative(gama=3)"], ["'gama'", "did you mean 'gamma'?"]),
    ("parameter of none", ["generate", "x", "-m", "autoregressive(k=3)"], ["takes no parameters", "'k'"]),
    ("parenthesis", ["generate", "x", "-m", "speculative(gamma=3"], ["parentheses do not match"]),
    ("unknown rule", ["generate", "x", "-m", "trust=gat(tau=1)"], ["'gat'", "did you mean 'gate'?"]),
    ("unknown command", ["generat", "x"], ["'generat'", "Did you mean 'generate'?", "sprinter --help"]),
    ("unknown option", ["generate", "x", "--tempratur", "1"], ["--tempratur", "--temperature", "generate --help"]),
    ("no prompt", ["generate"], ["missing argument 'PROMPT|-'", "generate --help"]),
    ("two prompts", ["generate", "x", "y"], ["unexpected extra argument", "(y)"]),
    ("option without value", ["generate", "x", "--target"], ["--target", "requires an argument"]),
    ("long number", ["generate", "x", "--draft-vocabulary", "9" * 5000], ["draft_vocabulary has more than 308"]),
    ("budget alone", ["generate", "x", "--budget", "0.1", "--target", "/nowhere"], ["--budget 0.1 needs a lossy"]),
    ("no such target", ["generate", "x", "--target", "/nowhere/target"], ["/nowhere/target does not exist", "check"]),
    ("file as target", ["generate", "x", "--target", __file__], ["is a file", "give the directory"]),
    ("empty directory", ["generate", "x", "--target", "{root}/empty"], ["no config.json", "give"]),
    ("gate as target", ["generate", "x", "--target", "{gate}"], ["is a gate", "give it as the gate"]),
    ("no draft", ["generate", "x", "--target", "{target}", "-m", "sprinter"], ["needs a draft", "give --draft"]),
    ("draft alone", ["generate", "x", "--draft", "{draft}"], ["draft was given without a target", "--target"]),
    ("no gate", ["generate", "x", "{pair}", "-m", "sprinter"], ["needs a gate", "give --gate"]),
    ("other's gate", ["generate", "x", "{pair}", "--gate", "{root}/other-gate"], ["made for other weights"]),
    ("draft as gate", ["generate", "x", "{pair}", "--gate", "{draft}"], ["is not a gate"]),
    ("no such gate", ["generate", "x", "{pair}", "--gate", "./nothing"], ["no gate directory './nothing'"]),
    ("corrupt", ["generate", "x", "--target", "{root}/corrupt"], ["corrupt or truncated safetensors", "again"]),
    ("pickled", ["generate", "x", "--target", "{root}/pickled"], ["pickled weights", "never loaded", "convert"]),
    ("beyond context", ["generate", "x", "{pair}", "-n", "20000"], [f"{CONTEXT} tokens", f"{CONTEXT - 1} or less"]),
    ("unknown device", ["generate", "x", "{pair}", "--device", "gpu"], ["no device 'gpu'", "cpu"]),
    ("device of no build", ["generate", "x", "{pair}", "--device", "fpga"], ["'fpga' cannot be used", "cuda or mps"]),
    ("device meta", ["generate", "x", "{pair}", "--device", "meta"], ["'meta' cannot be used", "cpu, cuda or mps"]),
    ("local workers", [*LABEL, "--workers", "3"], ["--workers 3 is of the ray engine", "--engine ray"]),
    ("local address", [*LABEL, "--ray-address", "a:1"], ["--ray-address a:1 is of the ray engine"]),
    ("field of lines", [*LABEL, "--field", "body"], ["--field body is of records", "leave it out"]),
    ("unknown dtype", ["generate", "x", "{pair}", "--dtype", "int7"], ["no dtype 'int7'", "float32"]),
    ("option of methods", ["methods", "--jsn"], ["--jsn", "--json"]),
    ("demo without tokens", ["demo", "-n", "0"], ["--max-new-tokens", "greater than or equal to 1"]),
]  # fmt: skip


def filled(args: list[str], places: Places) -> list[str]:
    """The arguments with the tiny models' directories."""
    out: list[str] = []
    for arg in args:
        if arg == "{pair}":
            out.extend(places.pair)
        else:
            names = {name: str(getattr(places, name)) for name in ("root", "target", "draft", "gate")}
            out.append(arg.format(**names) if "{" in arg else arg)
    return out


def is_one_line(err: str) -> bool:
    return err.startswith("sprinter: error: ") and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "words"), [case[1:] for case in REQUESTS], ids=[case[0] for case in REQUESTS]
)
def test_a_mistake_is_one_line_and_status_2(
    run: Run, places: Places, args: list[str], words: list[str]
) -> None:
    status, out, err = run(*filled(args, places))
    assert (status, out) == (2, "")
    assert is_one_line(err), err
    assert [word for word in words if word not in err] == [], err


def test_a_mistake_under_json_leaves_stdout_empty(run: Run) -> None:
    for args in (["generate", "", "--json"], ["generate", "x", "--json", "--temperature", "-1"]):
        status, out, err = run(*args)
        assert (status, out) == (2, "") and is_one_line(err)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["prompt is empty"]),
        (b"\n", ["prompt is empty"]),
        (b"abc\xff\xfe", ["standard input is not valid UTF-8", "0xff, after 3 characters"]),
        (b"abc\xe2\x98", ["not valid UTF-8", "0xe2, after 3 characters"]),
        (b"x" * (17 * 2**20), ["more than 16 MiB", "give a shorter one"]),
    ],
    ids=["empty", "line break", "invalid", "cut off", "17 MiB"],
)
def test_bad_standard_input(run: Run, data: bytes, words: list[str]) -> None:
    status, out, err = run("generate", "-", stdin=data)
    assert (status, out) == (2, "") and is_one_line(err)
    assert [word for word in words if word not in err] == [], err


def test_a_prompt_of_10_megabytes_is_refused_fast(run: Run, places: Places) -> None:
    began = time.perf_counter()
    status, out, err = run("generate", "-", *places.pair, stdin=b"All work and no play. " * 480_000)
    assert time.perf_counter() - began < 10
    assert (status, out) == (2, "") and is_one_line(err)
    assert f"maximum context length is {CONTEXT} tokens" in err and "shorten the prompt" in err


def test_a_prompt_just_beyond_the_context_is_counted(run: Run, places: Places) -> None:
    status, _, err = run("generate", "-", *places.pair, "-n", "8", stdin=b"x" * CONTEXT)
    assert status == 2 and f"{CONTEXT} prompt tokens and 8 new ones exceed the context" in err


def test_closed_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    for stdin in (None, closed):  # Python's stdin is None if the descriptor was closed at the start
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", "-"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and is_one_line(err) and "standard input is closed" in err


def test_logits_that_are_no_numbers_name_the_model(run: Run, places: Places) -> None:
    status, out, err = run("generate", "x", "--target", str(places.root / "nan"), "--json")
    assert (status, out) == (1, "") and is_one_line(err)
    assert "target model's logits are NaN" in err and "--dtype float32" in err


def test_an_error_of_ours_is_one_line_and_status_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("something\nbroke")

    monkeypatch.setattr("sprinter.cli.generate.load", fail)
    status, out, err = run("generate", "x")
    assert (status, out) == (1, "") and is_one_line(err)
    assert "RuntimeError: something broke (SPRINTER_DEBUG=1 shows the traceback)" in err
    monkeypatch.setenv("SPRINTER_DEBUG", "1")
    status, _, err = run("generate", "x")
    assert status == 1 and "Traceback" in err and err.splitlines()[-1].startswith("sprinter: error: ")


def test_debugging_shows_the_traceback_of_every_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    mistakes = (
        ("generate", "x", "-m", "no-such"),
        ("generate", "x", "--no-such"),
        ("theory", "flops", "none"),
    )
    for args in mistakes:
        assert is_one_line(run(*args).err)
    monkeypatch.setenv("SPRINTER_DEBUG", "1")
    for args in mistakes:
        status, _, err = run(*args)
        assert status == 2 and "Traceback" in err and err.splitlines()[-1].startswith("sprinter: error: ")


def test_control_characters_of_a_mistake_do_not_reach_the_terminal(run: Run) -> None:
    _, _, err = run("generate", "x", "-m", "\x1b[31mred")
    assert is_one_line(err) and "\x1b" not in err
