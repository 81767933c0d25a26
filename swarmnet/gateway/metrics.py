"""Prometheus metrics of the gateway, under vLLM's names."""

from collections.abc import Callable

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


class GatewayMetrics:
    """The metrics of one gateway, in a registry of its own. All have the label ``model_name``."""

    def __init__(self, model: str, batcher: Batcher) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._gauge("vllm:num_requests_running", "Sequences being generated.", lambda: batcher.load.active)
        self._gauge("vllm:num_requests_waiting", "Sequences in the queue.", lambda: batcher.load.waiting)
        self._gauge("swarmnet_gateway_failovers", "Chains that were repaired.", lambda: batcher.failovers)
        self._gauge(
            "swarmnet_gateway_wrong_hosts", "Hosts caught with wrong outputs.", lambda: batcher.wrong_hosts
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self.cached_tokens = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were in the hosts' caches."
        )
        self.generated_tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from a request to its first token.", SHORT_BUCKETS_S
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Seconds from one token to the next.", SHORT_BUCKETS_S
        )
        self.request_latency = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from a request to the end of a choice.",
            LONG_BUCKETS_S,
        )
        self.prompt_length = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS
        )
        self.completion_length = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a completion.", TOKEN_BUCKETS
        )
        self._success = Counter(
            "vllm:request_success",
            "Choices that were completed.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._errors = Counter(
            "swarmnet_gateway_refused",
            "Requests that were answered with an error.",
            ("model_name", "code"),
            registry=self._registry,
        )

    def count_success(self, finish_reason: str) -> None:
        self._success.labels(self._model, finish_reason).inc()

    def count_error(self, code: str) -> None:
        self._errors.labels(self._model, code).inc()

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(name, text, ("model_name",), registry=self._registry)
        gauge.labels(self._model).set_function(read)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)
