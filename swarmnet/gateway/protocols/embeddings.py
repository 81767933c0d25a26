"""OpenAI's embeddings: ``/v1/embeddings``."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from swarmnet.gateway.generation.requests import GenerationRequest
from swarmnet.gateway.protocols.completions import Prompt
from swarmnet.gateway.protocols.schemas import MAX_OWNER_CHARS, StrictModel, as_list, at_most
from swarmnet_client.model.sampling import Sampling
from swarmnet_protocols.arrays import Array

MAX_INPUTS = 2048
"""Most texts of one request, as at OpenAI."""


class EmbeddingBody(StrictModel):
    """Texts to embed."""

    model: str
    input: Annotated[
        list[Prompt], Field(fail_fast=True, min_length=1), at_most(MAX_INPUTS), BeforeValidator(as_list)
    ]
    dimensions: int | None = Field(None, ge=1)
    encoding_format: Literal["float", "base64"] = "float"
    user: str = Field("", max_length=MAX_OWNER_CHARS)

    def request(self) -> GenerationRequest:
        """Return a request for one token after each text: the texts are read before it."""
        return GenerationRequest(
            self.model, tuple(self.input), "input", Sampling(), max_tokens=1, user=self.user
        )

    def response(self, model: str, vectors: Sequence[Array], tokens: int) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}

    def _encoded(self, vector: Array) -> str | list[float]:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        found: list[float] = vector.tolist()
        return found
