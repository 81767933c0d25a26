"""Prometheus metrics of the gateway, under the names that vLLM gives them."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from swarmnet_client.batching.continuous_batching import Batcher

SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
LONG_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Meter:
    """What is counted, in a registry of its own. ``model`` labels all of it."""

    def __init__(self, model: str, batcher: Batcher) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._gauge("vllm:num_requests_running", "Answers being computed.", lambda: batcher.load.active)
        self._gauge(
            "vllm:num_requests_waiting", "Answers that wait for a lane.", lambda: batcher.load.waiting
        )
        self._gauge("swarmnet_gateway_failovers", "Times a chain was mended.", lambda: batcher.failovers)
        self._gauge(
            "swarmnet_gateway_wrong_hosts",
            "Hosts found to give wrong outputs.",
            lambda: batcher.wrong_hosts,
        )
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter(
            "vllm:prefix_cache_hits", "Tokens of prompts that hosts still had."
        )
        self.tokens = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self.first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to the first token.", SHORT_S
        )
        self.between_tokens_s = self._histogram(
            "vllm:inter_token_latency_seconds", "From one token to the next.", SHORT_S
        )
        self.whole_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to the end of its answer.", LONG_S
        )
        self.prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.lengths = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._succeeded = Counter(
            "vllm:request_success",
            "Answers that were completed.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._refused = Counter(
            "swarmnet_gateway_refused",
            "Requests that were answered with an error.",
            ("model_name", "code"),
            registry=self._registry,
        )

    def succeeded(self, finish_reason: str) -> None:
        self._succeeded.labels(self._model, finish_reason).inc()

    def refused(self, code: str) -> None:
        self._refused.labels(self._model, code).inc()

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(name, text, ("model_name",), registry=self._registry)
        gauge.labels(self._model).set_function(read)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)
