"""Prometheus metrics of the gateway, under vLLM's names."""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from swarmnet_client.batching.continuous_batching import Batcher

SHORT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
LONG_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_GAUGES: tuple[tuple[str, str, Callable[[Batcher], float]], ...] = (
    ("vllm:num_requests_running", "Sequences being generated.", lambda batcher: batcher.load.active),
    ("vllm:num_requests_waiting", "Sequences in the queue.", lambda batcher: batcher.load.waiting),
    ("swarmnet_gateway_failovers", "Chains that were repaired.", lambda batcher: batcher.failovers),
    ("swarmnet_gateway_wrong_hosts", "Hosts caught with wrong outputs.", lambda batcher: batcher.wrong_hosts),
)


class GatewayMetrics:
    """The metrics of one gateway, in a registry of its own. All have the label ``model_name``."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("model_name",)
        one = partial(Counter, labelnames=labels, registry=self._registry)
        spread = partial(Histogram, labelnames=labels, registry=self._registry)
        self._gauges: dict[Gauge, Callable[[Batcher], float]] = {
            Gauge(name, text, labels, registry=self._registry): read for name, text, read in _GAUGES
        }
        self.prompt_tokens = one("vllm:prompt_tokens", "Prompt tokens.")
        self.cached_tokens = one("vllm:prefix_cache_hits", "Prompt tokens that were in the hosts' caches.")
        self.generated_tokens = one("vllm:generation_tokens", "Generated tokens.")
        self.time_to_first_token = spread(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=SHORT_BUCKETS_S,
        )
        self.inter_token_latency = spread(
            "vllm:inter_token_latency_seconds",
            "Seconds from one token to the next.",
            buckets=SHORT_BUCKETS_S,
        )
        self.request_latency = spread(
            "vllm:e2e_request_latency_seconds",
            "Seconds from a request to the end of a choice.",
            buckets=LONG_BUCKETS_S,
        )
        self.prompt_length = spread(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", buckets=TOKEN_BUCKETS
        )
        self.completion_length = spread(
            "vllm:request_generation_tokens", "Tokens of a completion.", buckets=TOKEN_BUCKETS
        )
        self.successes = Counter(
            "vllm:request_success",
            "Choices that were completed.",
            (*labels, "finished_reason"),
            registry=self._registry,
        )
        self._errors = Counter(
            "swarmnet_gateway_refused",
            "Requests that were answered with an error.",
            (*labels, "code"),
            registry=self._registry,
        )

    def opened(self, model: str, batcher: Batcher) -> "ModelMetrics":
        """Return the metrics of a model that was opened."""
        for gauge, read in self._gauges.items():
            gauge.labels(model).set_function(partial(read, batcher))
        return ModelMetrics(self, model)

    def closed(self, model: str) -> None:
        """Forget the load of a model that was closed. Its counters stay."""
        for gauge in self._gauges:
            gauge.remove(model)

    def count_error(self, model: str, code: str) -> None:
        """Count a refused request. ``model``: "" if the request named no known model."""
        self._errors.labels(model, code).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class ModelMetrics:
    """The metrics of one model of a gateway."""

    def __init__(self, gateway: GatewayMetrics, model: str) -> None:
        self._successes = gateway.successes
        self._model = model
        self.prompt_tokens = gateway.prompt_tokens.labels(model)
        self.cached_tokens = gateway.cached_tokens.labels(model)
        self.generated_tokens = gateway.generated_tokens.labels(model)
        self.time_to_first_token = gateway.time_to_first_token.labels(model)
        self.inter_token_latency = gateway.inter_token_latency.labels(model)
        self.request_latency = gateway.request_latency.labels(model)
        self.prompt_length = gateway.prompt_length.labels(model)
        self.completion_length = gateway.completion_length.labels(model)

    def count_success(self, finish_reason: str) -> None:
        self._successes.labels(self._model, finish_reason).inc()
