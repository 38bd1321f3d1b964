"""Metrics for Prometheus: vLLM's names for speculative decoding, beside our own."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sprinter.decode.method import Method
from sprinter.decode.registry import METHODS
from sprinter.engine.async_engine import EngineStream
from sprinter.engine.generation import Generation
from sprinter.serve.speculation import TargetRounds

__all__ = ["ServeMetrics", "ServeState"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ENGINE = "0"  # vLLM's label; a model has one engine


class ServeState(NamedTuple):
    """A model as it is now: its name, numbers of texts and rows, and whether it is loaded.

    ``held``: share of the rows' slots that hold tokens of texts, 0 to 1.
    """

    model: str
    running: int
    waiting: int
    rows: int
    ready: bool
    held: float


class ServeMetrics(Collector):
    """Counts of a server, in a registry of their own.

    Args:
        states: of its models, asked at each scrape.

    Attributes:
        ready: whether requests are served; asked at each scrape.
    """

    def __init__(self, states: Callable[[], Sequence[ServeState]]) -> None:
        self._states = states
        self.ready: Callable[[], bool] = lambda: all(one.ready for one in states())
        self._drafted: dict[str, tuple[int, int]] = {}  # by model: draft tokens, and those that were kept
        self._registry = own = CollectorRegistry()
        model, method = ("model_name", "engine"), ("model_name", "method")
        counter, seconds = partial(Counter, registry=own), partial(Histogram, buckets=_SECONDS, registry=own)
        vllm = "vllm:spec_decode_num_"
        self._drafts = counter(f"{vllm}drafts", "Rounds that drafted.", model)
        self._draft_tokens = counter(f"{vllm}draft_tokens", "Draft tokens proposed.", model)
        self._accepted = counter(f"{vllm}accepted_tokens", "Draft tokens kept: trusted and accepted.", model)
        self._per_position = counter(
            f"{vllm}accepted_tokens_per_pos", "Draft tokens kept, per draft position.", (*model, "position")
        )
        self._requests = counter("sprinter_requests", "HTTP requests answered.", ("path", "status"))
        self._texts = counter("sprinter_texts", "Texts that ended.", (*method, "finish_reason"))
        self._tokens = counter("sprinter_tokens", "Tokens written, by origin.", (*method, "origin"))
        self._prompt_tokens = counter("sprinter_prompt_tokens", "Prompt tokens.", method)
        self._calls = counter("sprinter_target_calls", "Target forward passes.", method)
        self._steps = counter("sprinter_draft_steps", "Draft forward passes.", method)
        about = "What a target on a server was asked: round trips, paid tokens, bytes."
        self._remote = counter("sprinter_remote", about, (*method, "what"))
        self._drift = counter(
            "sprinter_drift", "Sum of the drift of the tokens whose drift is known.", method
        )
        about = "Tokens whose drift is known; coverage is their share of the tokens."
        self._scored = counter("sprinter_drift_tokens", about, method)
        self._queue = seconds("sprinter_queue_seconds", "Time in the queue.")
        about = "Time to the first token, queue included."
        self._first = seconds("sprinter_time_to_first_token_seconds", about, method)
        self._whole = seconds("sprinter_text_seconds", "Time to the end of a text, queue included.", method)
        own.register(self)

    def collect(self) -> Iterator[Metric]:
        """The gauges, as they are now."""
        now = self._states()
        sums = {
            "sprinter_texts_running": ("Texts that are generated.", sum(one.running for one in now)),
            "sprinter_texts_waiting": ("Texts that wait for rows.", sum(one.waiting for one in now)),
            "sprinter_rows": ("Rows of the engines.", sum(one.rows for one in now)),
            "sprinter_ready": ("Whether requests are served.", int(self.ready())),
        }
        for name, (about, value) in sums.items():
            yield GaugeMetricFamily(name, about, value)
        rates = {model: kept / drafted for model, (drafted, kept) in self._drafted.copy().items()}
        about = "Share of the draft tokens that were kept since the start, trusted ones included."
        yield _gauge("sprinter_draft_acceptance_rate", about, rates)
        about = "Mean drift of the tokens whose drift is known, since the start."
        drift = GaugeMetricFamily("sprinter_mean_drift", about, labels=("model_name", "method"))
        counts, totals = (
            _values(self._scored),
            _values(self._drift),
        )  # in this order: all that are counted have a sum
        for labels, tokens in counts.items():
            if tokens:
                drift.add_metric(labels, totals[labels] / tokens)
        yield drift
        yield _gauge(
            "sprinter_model_loaded", "Whether the model is loaded.", {one.model: one.ready for one in now}
        )
        for name, about, values in (  # which gateways and autoscalers look for under these names
            ("num_requests_running", "Texts that are generated.", {one.model: one.running for one in now}),
            ("num_requests_waiting", "Texts that wait for rows.", {one.model: one.waiting for one in now}),
            ("kv_cache_usage_perc", "Share of the rows' slots that hold tokens, 0 to 1.",
             {one.model: one.held for one in now}),
        ):  # fmt: skip
            yield _gauge(f"vllm:{name}", about, values, _ENGINE)

    def scrape(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request; ``path``: of a route, "other" for all others."""
        self._requests.labels(path, str(status)).inc()

    def ended(self, name: str, stream: EngineStream, out: Generation) -> None:
        """Count a text of a model."""
        method = name, _label_of(out)
        stats, times, model = out.stats, stream.times, (name, _ENGINE)
        steps = TargetRounds.of([out])
        if stats.drafted:
            self._drafts.labels(*model).inc(len(steps.kept))
            self._draft_tokens.labels(*model).inc(stats.drafted)
            self._accepted.labels(*model).inc(sum(steps.kept))
            drafted, kept = self._drafted.get(name, (0, 0))
            self._drafted[name] = drafted + stats.drafted, kept + sum(steps.kept)
            for i, count in enumerate(steps.per_position):
                self._per_position.labels(*model, str(i)).inc(count)
        self._texts.labels(*method, out.finish_reason).inc()
        self._prompt_tokens.labels(*method).inc(out.prompt_tokens)
        self._calls.labels(*method).inc(stats.target_calls)
        self._steps.labels(*method).inc(stats.draft_steps)
        for origin, count in Counts(token.origin.value for token in out.tokens).items():
            self._tokens.labels(*method, origin).inc(count)
        for what, count in stats.remote.items():
            self._remote.labels(*method, what).inc(count)
        drifts = [token.drift for token in out.tokens if token.drift is not None]
        if drifts:
            self._drift.labels(*method).inc(sum(drifts))
            self._scored.labels(*method).inc(len(drifts))
        if times.admitted_s is not None:
            self._queue.observe(times.admitted_s)
        if times.first_token_s is not None:
            self._first.labels(*method).observe(times.first_token_s)
        if times.ended_s is not None and out.finish_reason != "cancelled":
            self._whole.labels(*method).observe(times.ended_s)


def _gauge(name: str, about: str, values: Mapping[str, float], *engine: str) -> Metric:
    """A gauge of each model."""
    made = GaugeMetricFamily(name, about, labels=("model_name", *["engine"][: len(engine)]))
    for model, value in values.items():
        made.add_metric((model, *engine), value)
    return made


def _values(one: Counter) -> dict[tuple[str, ...], float]:
    """Values of a counter by its labels' values."""
    samples = [
        sample for family in one.collect() for sample in family.samples if sample.name.endswith("_total")
    ]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def _label_of(out: Generation) -> str:
    """A method's name without its parameters, so that requests cannot make any number of time series."""
    method = None if out.request is None else out.request.method
    name = method.preset if isinstance(method, Method) else ""
    return name if name in METHODS.names() else "composed"
