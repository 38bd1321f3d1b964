"""Duels, the offline judge, and a language model as judge behind a server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sprinter.bench.journal import replies
from sprinter.bench.quality.endpoint import Endpoint, JudgeError, Refused, key_from_environment
from sprinter.bench.quality.judges import (
    Duel,
    LikelihoodJudge,
    LlmJudge,
    combine,
    duels,
    judge_rows,
    messages_of,
    verdict_of,
)
from sprinter.bench.sample import Sample
from sprinter.errors import UserError

Answer = tuple[int, dict[str, str], bytes]
SAMPLE = Sample("7", "qa", ("Who?",))


def said(text: str | None, **more: Any) -> Answer:
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}}], "usage": usage} | more).encode()


def error(status: int, message: str = "no", **headers: str) -> Answer:
    return status, headers, json.dumps({"error": {"message": message}}).encode()


class Server:
    """Answers by a function of (number of the request, its body); keeps what it was asked."""

    def __init__(self, answer: Callable[[int, dict[str, Any]], Answer]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.asked)
                    outer.asked.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    status, headers, content = answer(number, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[int, dict[str, Any]], Answer]], Server]]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    servers: list[Server] = []

    def start(answer: Callable[[int, dict[str, Any]], Answer]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def endpoint(url: str, **more: Any) -> tuple[Endpoint, list[float]]:
    waits: list[float] = []
    return Endpoint(url, "judge-1", timeout_s=20, sleep=waits.append, **more), waits


def row(arm: str, text: str, id: str = "7", score: float | None = -1.0, repeat: int = 0) -> dict[str, Any]:
    quality = {} if score is None else {"log_likelihood_per_token": score}
    return {
        "model_id": arm, "suite": "s", "question_id": id, "temperature": 1.0, "repeat": repeat,
        "choices": [{"turns": [text]}], "quality": quality,
    }  # fmt: skip


def samples(*ids: str) -> dict[tuple[str, str], Sample]:
    return {("s", id): Sample(id, "qa", (f"question {id}",)) for id in ids}


# --- duels -----------------------------------------------------------------------------------------------------------


def test_duels_pair_by_sample_temperature_and_repeat() -> None:
    rows = [
        row("base", "b"),
        row("arm", "a"),
        row("arm", "a1", repeat=1),
        row("base", "b1", repeat=1),
        row("arm", "x", "8"),
    ]
    found = duels(rows, samples("7", "8"), "base")
    assert [(i, duel.mine, duel.base) for i, duel in found] == [(1, ("a",), ("b",)), (2, ("a1",), ("b1",))]


@pytest.mark.parametrize(
    ("mine", "verdict"), [(-1.0, "tie"), (-0.95, "tie"), (-1.05, "tie"), (-0.9, "win"), (-1.1, "loss")]
)
def test_offline_judge(mine: float, verdict: str) -> None:
    assert LikelihoodJudge(0.0501).decide(Duel(SAMPLE, ("a",), ("b",), mine, -1.0)) == verdict
    assert LikelihoodJudge().decide(Duel(SAMPLE, ("a",), ("b",), None, -1.0)) is None


def test_offline_rates() -> None:
    rows = [row("base", "b"), row("good", "g", score=-0.5), row("bad", "x", score=-2), row("same", "b", score=None),
            row("unknown", "u", score=None)]  # fmt: skip
    scores, facts = judge_rows(rows, samples("7"), "base", LikelihoodJudge())
    assert scores == [{}, {"win": 1, "win_tie": 1}, {"win": 0, "win_tie": 0}, {"win": 0, "win_tie": 1}, {}]
    assert facts == {"base": "base", "status": "ok", "error": None, "duels": 4, "equal": 1, "undecided": 1,
                     "judge": "likelihood", "band": 0.05}  # fmt: skip


# --- prompts and marks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("so [[A]]", "A"),
        ("[[A]] no, [[ B ]]", "B"),
        ("[[C]].", "C"),
        ("A is better", None),
        ("", None),
        ("[[D]]", None),
    ],
)
def test_marks(text: str, choice: str | None) -> None:
    assert verdict_of(text) == choice


def test_only_what_holds_in_both_orders_counts() -> None:
    assert combine("A", "B") == "win" and combine("B", "A") == "loss"
    others = [(a, b) for a in "ABC" for b in "ABC" if (a, b) not in (("A", "B"), ("B", "A"))]
    assert {combine(a, b) for a, b in others} == {"tie"}  # type: ignore[arg-type]


def test_both_orders_show_the_same_texts() -> None:
    duel = Duel(Sample("1", "c", ("first?", "second?")), ("m1", "m2"), ("b1",))
    straight, swapped = (messages_of(duel, turned)[1]["content"] for turned in (False, True))
    assert "<answer A>\nm2\n</answer A>\n\n<answer B>\n\n</answer B>" in straight
    assert "<answer A>\nb1\n</answer A>\n\n<answer B>\nm1\n</answer B>" in swapped
    assert straight.index("first?") < straight.index("m1") < straight.index("second?") < straight.index("m2")


# --- the endpoint ----------------------------------------------------------------------------------------------------


def test_a_question_and_its_answer(serve: Any) -> None:
    server = serve(lambda number, body: said("[[A]]"))
    asked, waits = endpoint(server.url + "/", key="secret")
    reply = asked.ask([{"role": "user", "content": "x"}])
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("[[A]]", 100, 10)
    assert server.paths == ["/v1/chat/completions"] and waits == []
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.asked[0]["model"] == "judge-1" and server.asked[0]["temperature"] == 0
    assert "secret" not in repr(asked)


def test_a_full_address_and_no_key(serve: Any) -> None:
    server = serve(lambda number, body: said(None, usage=None))
    reply = endpoint(server.url + "/chat/completions")[0].ask([])
    assert (reply.text, reply.prompt_tokens) == ("", None)
    assert server.paths == ["/v1/chat/completions"] and "Authorization" not in server.headers[0]


def test_too_many_requests_then_an_answer(serve: Any) -> None:
    answers = [
        error(429, "slow down", Retry_After="3.5"),
        error(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
        said("ok"),
    ]
    server = serve(lambda number, body: answers[number])
    asked, waits = endpoint(server.url)
    assert asked.ask([]).text == "ok"
    assert waits == [3.5, 2.0]


def test_waits_double_up_to_a_limit_and_then_it_is_down(serve: Any) -> None:
    server = serve(lambda number, body: error(500, "key-7 out\nof order", Retry_After="-1"))
    asked, waits = endpoint(server.url, attempts=5, longest_wait_s=5, key="key-7")
    with pytest.raises(JudgeError, match=r"did not answer, asked 5 times: HTTP 500: \*\*\* out of order$"):
        asked.ask([])
    assert len(server.asked) == 5
    assert waits == [1, 2, 4, 5]


@pytest.mark.parametrize(
    "body", [b"<html>garbage", b"", b"[]", b'{"choices": []}', b'{"choices": [{"message": null}]}', b"\xff"]
)
def test_garbage_is_asked_again(serve: Any, body: bytes) -> None:
    server = serve(lambda number, _: said("ok") if number else (200, {}, body))
    asked, waits = endpoint(server.url)
    assert asked.ask([]).text == "ok" and waits == [1]


def test_a_connection_that_breaks_is_tried_again(serve: Any) -> None:
    server = serve(lambda number, _: said("ok") if number else (200, {"Content-Length": "9999"}, b"{"))
    assert endpoint(server.url)[0].ask([]).text == "ok"


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_denied_access_is_reported_at_once(serve: Any, status: int) -> None:
    server = serve(lambda number, body: error(status, "bad key", Location="http://127.0.0.1:9/else"))
    asked, waits = endpoint(server.url)
    with pytest.raises(JudgeError, match=f"says HTTP {status}: bad key: check address, model and key"):
        asked.ask([])
    assert len(server.asked) == 1 and waits == []


def test_an_option_that_is_unknown_there_is_left_out(serve: Any) -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        return error(400, "Unsupported parameter: 'max_tokens'") if "max_tokens" in body else said("ok")

    server = serve(answer)
    asked, _ = endpoint(server.url)
    assert asked.ask([]).text == asked.ask([]).text == "ok"
    assert ["max_tokens" in body for body in server.asked] == [True, False, False]


def test_a_question_that_is_refused(serve: Any) -> None:
    server = serve(lambda number, body: error(400, "context length exceeded"))
    with pytest.raises(Refused, match="HTTP 400: context length"):
        endpoint(server.url)[0].ask([])


def test_nobody_is_there() -> None:
    asked, waits = endpoint("http://127.0.0.1:9/v1", attempts=3)
    with pytest.raises(JudgeError, match=r"did not answer, asked 3 times: .*refused"):
        asked.ask([])
    assert waits == [1, 2]


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "file:///etc/passwd", "http://", "http://a b/", "http://[", "http://x:0/"]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(UserError, match="is not an address"):
        Endpoint(url, "m")


def test_bad_settings() -> None:
    with pytest.raises(UserError, match="--judge-model"):
        Endpoint("http://x", "")
    with pytest.raises(UserError, match="odd characters"):
        Endpoint("http://x", "m", key="a\nb")


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPRINTER_JUDGE_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert key_from_environment() is None
    monkeypatch.setenv("OPENAI_API_KEY", "general\n")
    assert key_from_environment() == "general"
    monkeypatch.setenv("SPRINTER_JUDGE_KEY", "own")
    assert key_from_environment() == "own"


# --- the judge -------------------------------------------------------------------------------------------------------


def judge(url: str, path: Path, **more: Any) -> LlmJudge:
    asked, _ = endpoint(url, attempts=2)
    return LlmJudge(asked, replies(path), **more)


def rows_of(count: int) -> list[dict[str, Any]]:
    """A base arm, an arm that is always better, and an equal one."""
    ids = [str(i) for i in range(count)]
    return [row(arm, f"{arm} {id}", id) for id in ids for arm in ("base", "better", "alike")]


def by_merit(number: int, body: dict[str, Any]) -> Answer:
    """Prefers an answer that contains "better"; of two equal ones the first."""
    second = body["messages"][1]["content"].partition("<answer B>")[2]
    return said("[[B]]" if "better" in second else "[[A]]")


def test_verdicts_ties_and_costs(serve: Any, tmp_path: Path) -> None:
    server = serve(by_merit)
    rows = rows_of(6)
    with_prices = judge(server.url, tmp_path / "judge.jsonl", price_in=3.0, price_out=15.0)
    seen: list[tuple[int, int]] = []
    scores, facts = judge_rows(rows, samples(*"012345"), "base", with_prices, lambda *at: seen.append(at))
    with_prices.close()
    wins = {
        arm: [s["win"] for s, r in zip(scores, rows, strict=True) if r["model_id"] == arm]
        for arm in ("better", "alike")
    }
    assert wins == {"better": [1] * 6, "alike": [0] * 6}
    assert all(score["win_tie"] == 1 for score in scores if score)
    assert seen == [(i + 1, 12) for i in range(12)]
    assert (facts["asked"], facts["reused"], facts["order_swayed"]) == (24, 0, 0.5)
    assert (facts["prompt_tokens"], facts["completion_tokens"]) == (2400, 240)
    assert facts["cost"] == facts["cost_with_reused"] == pytest.approx((2400 * 3 + 240 * 15) / 1e6)
    json.dumps(facts)


def test_what_was_asked_is_not_asked_again(serve: Any, tmp_path: Path) -> None:
    server = serve(by_merit)
    path = tmp_path / "deep" / "judge.jsonl"
    first = judge(server.url, path)
    before = judge_rows(rows_of(2), samples(*"012"), "base", first)[0]
    first.close()
    with open(path, "a") as file:
        file.write('{"key": "cut when the run was ki')
    second = judge(server.url, path, price_in=1.0, price_out=1.0)
    scores, facts = judge_rows(rows_of(3), samples(*"012"), "base", second)
    second.close()
    assert scores[:6] == before
    assert (facts["asked"], facts["reused"], len(server.asked)) == (4, 8, 12)
    assert facts["cost"] == pytest.approx(4 * 110 / 1e6) and facts["cost_with_reused"] == pytest.approx(
        12 * 110 / 1e6
    )
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == len({record["key"] for record in records}) == 12
    assert [record["messages"] for record in records].count(server.asked[0]["messages"]) == 1
    assert {record["reply"] for record in records} == {"[[A]]", "[[B]]"}


def test_the_same_question_is_asked_once_by_all_threads(serve: Any, tmp_path: Path) -> None:
    server = serve(by_merit)
    one = judge(server.url, tmp_path / "judge.jsonl", workers=4)
    rows = [row("base", "plain"), *(row(f"arm {i}", "better") for i in range(8))]
    scores, facts = judge_rows(rows, samples("7"), "base", one)
    one.close()
    assert [score["win"] for score in scores[1:]] == [1] * 8
    assert (len(server.asked), facts["asked"], facts["reused"]) == (2, 2, 14)


def test_order_bias_makes_ties(serve: Any, tmp_path: Path) -> None:
    one = judge(serve(lambda number, body: said("[[A]]")).url, tmp_path / "judge.jsonl")
    scores, facts = judge_rows(rows_of(2), samples("0", "1"), "base", one)
    one.close()
    assert all(score == {"win": 0, "win_tie": 1} for score in scores if score)
    assert facts["order_swayed"] == 1 and facts["cost"] is None


def test_replies_that_cannot_be_read_or_had_are_left_out(serve: Any, tmp_path: Path) -> None:
    def answer(number: int, body: dict[str, Any]) -> Answer:
        text = body["messages"][1]["content"]
        return error(400, "too long") if "question 0" in text else said("Both are fine.")

    one = judge(serve(answer).url, tmp_path / "judge.jsonl", workers=1)
    scores, facts = judge_rows(rows_of(2), samples("0", "1"), "base", one)
    one.close()
    assert scores == [{}] * 6
    assert (facts["status"], facts["undecided"], facts["refused"], facts["unreadable"]) == ("ok", 4, 4, 4)


def test_equal_answers_are_not_asked(serve: Any, tmp_path: Path) -> None:
    server = serve(by_merit)
    one = judge(server.url, tmp_path / "judge.jsonl")
    scores, facts = judge_rows([row("base", "x"), row("arm", "x")], samples("7"), "base", one)
    one.close()
    assert scores[1] == {"win": 0, "win_tie": 1} and server.asked == [] and facts["equal"] == 1


def test_a_judge_that_goes_down_is_marked_and_the_rest_is_kept(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda number, body: error(503, "gone home") if number >= 5 else by_merit(number, body))
    one = judge(server.url, tmp_path / "judge.jsonl", workers=1)
    scores, facts = judge_rows(rows_of(4), samples(*"0123"), "base", one)
    one.close()
    assert facts["status"] == "failed" and "\n" not in facts["error"] and "gone home" in facts["error"]
    assert scores == [{}] * 12
    assert facts["asked"] == 5 and len((tmp_path / "judge.jsonl").read_text().splitlines()) == 5
    again = judge(serve(by_merit).url, tmp_path / "judge.jsonl")
    scores, facts = judge_rows(rows_of(4), samples(*"0123"), "base", again)
    again.close()
    assert facts["status"] == "ok" and facts["asked"] == 11 and sum(map(bool, scores)) == 8


def test_a_judge_that_is_not_there(tmp_path: Path) -> None:
    one = judge("http://127.0.0.1:9/v1", tmp_path / "judge.jsonl")
    scores, facts = judge_rows(rows_of(3), samples(*"012"), "base", one)
    one.close()
    assert facts["status"] == "failed" and facts["error"].startswith(
        "the judge at http://127.0.0.1:9/v1 did not answer"
    )
    assert scores == [{}] * 9


def test_a_damaged_file_of_replies(tmp_path: Path) -> None:
    for content in ("nonsense\n", '{"no": "key"}\n', "[]\n"):
        (tmp_path / "judge.jsonl").write_text(content)
        with pytest.raises(UserError, match="is damaged: move it away"):
            replies(tmp_path / "judge.jsonl")
    with pytest.raises(UserError, match="cannot write"):
        replies(tmp_path)


def test_an_address_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError, match="SPRINTER_JUDGE_KEY") as caught:
        Endpoint("http://me:secret@localhost:8000/v1", "model")
    assert "secret" not in str(caught.value)
