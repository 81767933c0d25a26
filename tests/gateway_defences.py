"""The defences against costly requests to the gateway, and against chat templates, as in ``defences.py``."""

import copy
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import SchemaValidator
from transformers.utils.chat_template_utils import render_jinja_template

from swarmnet.gateway.app import Gateway
from swarmnet.gateway.quotas import Quotas
from swarmnet.gateway.reading import BodyBounds
from swarmnet.gateway.schemas import CompletionRequest
from swarmnet.swarm_file import keys as key_files
from swarmnet_protocols.models import chat_template
from tests.defences import Defence, nothing, replacing
from tests.sim import test_gateway_limits
from tests.unit import test_chat_template, test_gateway_reading, test_serve
from tests.web_defences import over_nodes


def checking_to_the_end(patch: pytest.MonkeyPatch) -> None:
    """A list has as many errors as it has wrong items."""
    schema = copy.deepcopy(CompletionRequest.__pydantic_core_schema__)
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            part.pop("fail_fast", None)
            left.extend(part.values())
        elif isinstance(part, list | tuple):
            left.extend(part)
    patch.setattr(CompletionRequest, "__pydantic_validator__", SchemaValidator(schema, _use_prebuilt=False))


def in_our_process(patch: pytest.MonkeyPatch) -> None:
    def ask(_: object, request: bytes, _max_bytes: int) -> dict[str, str]:
        fields = chat_template.json.loads(request)
        (text,), _ = render_jinja_template([fields["messages"]], chat_template=fields["template"])
        return {"text": text}

    patch.setattr(chat_template._Renderer, "ask", ask)


def with_our_environment(patch: pytest.MonkeyPatch) -> None:
    def popen(*arguments: Any, **options: Any) -> Any:
        return started(*arguments, **options | {"env": None})

    started = chat_template.subprocess.Popen
    patch.setattr(chat_template.subprocess, "Popen", popen)


def reading(name: str, size: str) -> Any:
    return lambda _: test_gateway_reading.test_a_hostile_body_costs_little_and_is_told_one_thing(name, size)


def timed(folder: Path) -> None:
    del folder
    with pytest.MonkeyPatch.context() as patch:
        test_chat_template.test_a_template_takes_no_more_time_than_it_may(
            "RENDER_S", 0.1, test_chat_template.loops(3000), patch
        )


def without_secrets(folder: Path) -> None:
    del folder
    with pytest.MonkeyPatch.context() as patch:
        test_chat_template.test_no_secret_of_ours_is_where_templates_are_rendered(patch)


GATEWAY = (
    Defence(
        "values of a body are counted before any is made",
        replacing(BodyBounds, "_check_values", nothing),
        reading("objects", "most"),
    ),
    Defence(
        "a list is checked to its first wrong item", checking_to_the_end, reading("wrong tokens", "some")
    ),
    Defence(
        "a key's quota comes before its body",
        replacing(Quotas, "check", nothing),
        over_nodes(test_gateway_limits.test_of_a_key_that_used_up_its_quota_nothing_is_read),
    ),
    Defence(
        "a wrong request counts",
        replacing(Quotas, "count_wrong", nothing),
        over_nodes(test_gateway_limits.test_wrong_requests_use_up_a_quota_too),
    ),
    Defence(
        "long texts are tokenized as far as they fit",
        replacing(Gateway, "_is_too_long", lambda *_: False),
        over_nodes(test_gateway_limits.test_a_text_that_does_not_fit_is_tokenized_in_part),
    ),
    Defence(
        "a chat template has so much memory",
        in_our_process,
        lambda _: test_chat_template.test_a_template_takes_no_more_memory_than_it_may(),
    ),
    Defence("a chat template has so much time", in_our_process, timed),
    Defence(
        "a chat template writes so much",
        in_our_process,
        lambda _: test_chat_template.test_a_template_writes_no_more_than_it_may(),
    ),
    Defence("chat templates have no secrets", with_our_environment, without_secrets),
    Defence(
        "an API key is for its owner's eyes",
        replacing(key_files, "_MOUNTED", Path("/")),
        test_serve.test_a_key_that_everybody_can_read_is_refused,
    ),
)
