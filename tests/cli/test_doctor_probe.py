"""``sprinter doctor --probe``: what it reads, what it prints, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.cli.tiny import Places, Run

from sprinter.cli.doctor_probe import _place_line, _placed, _row, _show_agreement
from sprinter.cli.probe_texts import _share
from sprinter.decode.costs import PassCosts
from sprinter.theory.regions import LONGEST_DRAFT, place
from sprinter.theory.replay import Replay

LINES = "The river rises in the hills.\n\nIt flows past the old mill and the town.\n"
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def with_template(directory: Path, template: str) -> None:
    place = directory / "tokenizer_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"chat_template": template}))


@pytest.fixture
def probed(run: Run, places: Places, tmp_path: Path) -> dict[str, object]:
    texts = tmp_path / "texts.txt"
    texts.write_text(LINES)
    done, out, err = run("doctor", *places.gated, "--probe", str(texts), "--probe-tokens", "40", "--json")
    assert done == 0, err
    assert out.count("\n") == 1
    found: dict[str, object] = json.loads(out)["probe"]
    return found


def test_the_report_of_a_pair(probed: dict) -> None:  # type: ignore[type-arg]
    assert probed["texts"] == {"read": 2, "in_file": 2}
    lengths = [len(line) - 1 for line in LINES.split("\n") if line]  # a token a byte, the first is the prompt
    assert probed["positions"] == {"read": 40, "in_texts": sum(lengths)}
    value, low, high = probed["overlap"]
    assert 0 < low <= value <= high < 1
    assert set(probed["auc"]) == {"entropy", "max_prob", "margin"}
    assert all(0 <= areas["overlap_above_median"] <= 1 for areas in probed["auc"].values())
    assert list(probed["seconds"]["target_pass"]) == [str(n) for n in range(1, 10)]
    shares = [row["trusted"] for row in probed["certain"] if row["signal"] == "entropy"]
    assert shares == sorted(shares)
    assert all(0 <= row["drift"] <= row["trusted"] <= 1 for row in probed["certain"])
    methods = {row["method"].partition("(")[0]: row for row in probed["methods"]}
    assert {"autoregressive", "speculative", "block", "optimal", "calibrated", "svip", "lookup"} <= set(
        methods
    )
    step = probed["seconds"]["draft_step"] / probed["seconds"]["target_pass"]["1"]
    assert methods["optimal"]["method"].startswith(f"optimal(step={step:.2g}, token=")
    assert methods["autoregressive"]["speed_up"] == pytest.approx(1.0)
    assert methods["speculative"]["target_calls"] < 1
    for row in probed["methods"]:
        assert row["lossless"] or row["mean_drift"] <= 0.1
        assert row["pays"] == (round(row["speed_up"], 2) >= 1.05)
        assert row["tokens_per_s"] * probed["seconds"]["target_pass"]["1"] == pytest.approx(row["speed_up"])


def test_the_tables(run: Run, places: Places, tmp_path: Path) -> None:
    texts = tmp_path / "one.txt"
    texts.write_text(LINES.splitlines()[0])
    done, out, _ = run("doctor", *places.pair, "--probe", str(texts), "--probe-tokens", "12", "-t", "0")
    assert done == 0
    for words in (
        "1 of 1 texts, 12 of their",
        "mean overlap",
        "draft step",
        "speculative(gamma=",
        "0 (exact)",
    ):
        assert words in out
    assert "sprinter(" not in out, "the pair has no gate"


def test_the_default_is_a_row_and_one_command_is_recommended(
    run: Run, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(LINES)
    line = ("doctor", *places.pair, "--probe", str(texts), "--probe-tokens", "24", "-t", "0")
    target, draft = places.pair[1], places.pair[3]
    monkeypatch.setattr("sprinter.engine.runtime._PAYS", 1.1)  # 0 in other tests
    for times, default in (
        (
            PassCosts(tuple((n, 1.0 + 0.01 * n) for n in range(1, 10)), ((1, 0.02), (2, 0.02))),
            "auto(",
        ),
        (
            PassCosts(tuple((n, 1.0 * n) for n in range(1, 10)), ((1, 0.9), (2, 0.9))),
            "autoregressive",
        ),
    ):
        monkeypatch.setattr("sprinter.theory.passes.measure_passes", lambda pair, times=times, **_: times)
        done, out, err = run(*line, "--json")
        assert done == 0, err
        found = json.loads(out)["probe"]
        (row,) = [row for row in found["methods"] if row["default"]]
        assert row["method"].startswith(default)
        best = max(one["speed_up"] for one in found["methods"] if one["lossless"])
        method, command = found["recommended"]["method"], found["recommended"]["command"]
        assert (method == row["method"]) == (best <= 1.05 * row["speed_up"])
        if default == "autoregressive":  # no draft pays
            assert command == f"sprinter generate PROMPT --target {target}"
            assert (found["place"]["region"], found["place"]["method"]) == ("plain", "autoregressive")
        else:
            assert command.startswith(f"sprinter generate PROMPT --target {target} --draft {draft}")
        assert found["place"]["cost"] == pytest.approx(times.step)
        assert found["place"]["gain"] >= 1 and found["place"]["overlap"] == found["overlap"][0]
        assert ("--method" in command) == (method != row["method"])
        assert ("No exact draft" in found["recommended"]["why"]) == (method == "autoregressive")
        done, out, _ = run(*line, "--no-compile", "--json")
        assert "--no-compile" in json.loads(out)["probe"]["recommended"]["command"].split()
        done, out, _ = run(*line)
        assert f"On the map: a draft step costs {times.step:.2f} of a target pass" in out
        shown = "auto" if default == "auto(" else default
        assert f"{shown} (default)" in out and "tokens say little: give ten texts" in out
        assert ("auto is shown as if it drafted" in out) == any(
            one["method"].startswith("auto(") and one["speed_up"] < 1 for one in found["methods"]
        )
        lossy = any(one["pays"] and not one["lossless"] for one in found["methods"])
        assert ("Fastest lossy method at drift <= 0.1: " in out) == lossy and out.splitlines()[
            -1
        ] == f"Recommended: {command}"


@pytest.mark.parametrize(
    ("overlap", "cost", "kept", "region", "method"),
    [
        (0.3, 0.6, 0.5, "plain", "autoregressive"),
        (0.9, 0.1, 0.1, "exact", "svip(h=0.4)"),
        (0.9, 0.01, 0.9, "trust", "certain(threshold=1)"),
    ],
)
def test_the_place_on_the_map_names_a_method(
    overlap: float, cost: float, kept: float, region: str, method: str
) -> None:
    methods = [
        {"method": "svip(h=0.4)", "lossless": True, "speed_up": 1.5},
        {"method": "online(tau=0.5)", "lossless": False, "speed_up": 1.6},
        {"method": "certain(threshold=1)", "lossless": False, "speed_up": 1.7},
    ]
    found = _placed(place(overlap, cost, kept=kept), methods, methods[0])
    assert (found["region"], found["method"]) == (region, method)
    line = _place_line(found | {"overlap": overlap, "cost": cost}, 0.05)
    assert f"overlap {overlap:.2f}: {region} ({method})" in line and f"about {found['gain']:.2f}x" in line
    assert f"drafts of up to {LONGEST_DRAFT} tokens" in line, "longer runs of trust may gain more"
    assert ("keeps the target's law" in line) == (region == "trust"), "the recommended method is always exact"


def test_a_share_of_each_text() -> None:
    assert _share([100, 10, 100], 60) == 25
    assert _share([5, 5], 100) == 5
    assert _share([9, 9, 9], 2) == 1


def test_a_method_pays_by_the_number_that_is_shown() -> None:
    times = PassCosts(((1, 1.0), (9, 1.0)), ((1, 0.1), (2, 0.1)))
    for calls, shown, pays in ((0.9539, "1.05x", True), (0.9596, "1.04x", False)):
        run = Replay(1.0, calls, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, calls, 0.0, 0.0, torch.zeros(1, 4))
        row = _row("x", True, run, times)
        assert (f"{row['speed_up']:.2f}x", row["pays"]) == (shown, pays)


def test_one_class_has_no_area(capsys: pytest.CaptureFixture[str]) -> None:
    _show_agreement(
        {"overlap": [1.0, None, None], "agreement": [1.0, None, None], "overlap_above_0.9": 1.0,
         "auc": {"entropy": {"agreement": None}}}
    )  # fmt: skip
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [row[-1].strip() for row in rows if len(row) > 1][-1] == "-"


# --- records ----------------------------------------------------------------------------------------------------------
def test_answers_are_probed_after_prompts_in_chat_form(
    run: Run, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from sprinter.cli.probe_texts import read_probe
    from sprinter.models.pair import load_models

    records = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    forms = [{"prompt": "Hi", "answer": "Hello"}, {"question": "Hi", "answer": "Hello"}, {"messages": talk}]
    records.write_text("\n".join(map(json.dumps, forms)))
    target = shutil.copytree(places.target, tmp_path / "target")
    plain = load_models(target, places.draft)
    with pytest.raises(
        Exception, match=r"line 3 of .* the prompt is messages and the pair's tokenizer has no chat template"
    ):
        read_probe(records, plain, 100)
    with_template(target, TEMPLATE)
    chat = load_models(target, places.draft)
    assert chat.tokenizer is not None
    for passage in read_probe(records, chat, 100).passages:
        assert chat.tokenizer.decode(passage.prompt) == "[user] Hi\n[assistant] "
        assert chat.tokenizer.decode(passage.ids) == "Hello"
    records.write_text(json.dumps(forms[0]))
    (passage,) = read_probe(records, plain, 3).passages
    assert (chat.tokenizer.decode(passage.prompt), chat.tokenizer.decode(passage.ids)) == ("Hi", "Hel")


# --- mistakes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n\n", "holds no text: give at least one"),
        ("short.txt", "a\n", "line 1 of .* is too short"),
        (
            "long.txt",
            "word " * 4000,
            "line 1 of .* has 20000 tokens, more than the context of the pair, 16384",
        ),
        ("form.jsonl", '{"title": "x"}', "line 1 of .* is of no known form"),
        ("only.jsonl", '{"prompt": "x"}', "line 1 of .* is of no known form"),
        (
            "talk.jsonl",
            '{"messages": [{"role": "user", "content": "x"}]}',
            "do not end with an assistant's answer",
        ),
        ("broken.jsonl", "{", "line 1 of .* is not JSON"),
    ],
)
def test_one_line_for_bad_texts(
    run: Run, places: Places, tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    done, out, err = run("doctor", *places.pair, "--probe", str(tmp_path / name), "--json")
    assert (done, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("sprinter: error")]
    import re

    assert re.search(message, line)


def test_one_line_for_bad_pairs_and_options(run: Run, places: Places, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(LINES)
    probe = ("--probe", str(texts))
    for options, words in (
        (("--target", str(places.target), *probe), "this pair has no draft: give --draft"),
        ((*places.pair, "--probe", str(tmp_path / "no.txt")), "there is no file"),
        ((*places.pair, "--max-drift", "0.2"), "--max-drift 0.2 has no effect without --probe"),
    ):
        done, _, err = run("doctor", *options)
        assert done == 2
        assert words in err.splitlines()[-1], err
