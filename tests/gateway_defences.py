"""Defences of the gateway against costly requests and against chat templates."""

import copy
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import SchemaValidator
from transformers.utils.chat_template_utils import render_jinja_template

from swarmnet.gateway import app as gateway_app
from swarmnet.gateway.parsing import BodyParser
from swarmnet.gateway.quotas import QuotaTracker
from swarmnet.gateway.schemas import CompletionRequest
from swarmnet.gateway.tokenization import PromptTokenizer
from swarmnet.swarm_file import keys as key_files
from swarmnet_protocols.models import chat_template
from tests.defences import Defence, nothing, replacing
from tests.sim import test_gateway, test_gateway_limits
from tests.unit.cli import test_serve
from tests.unit.models import test_chat_template
from tests.unit.web import test_gateway_parsing
from tests.web_defences import over_nodes


def validating_all_items(patch: pytest.MonkeyPatch) -> None:
    """Validate every item of a list, past the first invalid one."""
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


def rendering_in_process(patch: pytest.MonkeyPatch) -> None:
    def ask(_: object, request: bytes, _max_bytes: int) -> dict[str, str]:
        fields = chat_template.json.loads(request)
        (text,), _ = render_jinja_template([fields["messages"]], chat_template=fields["template"])
        return {"text": text}

    patch.setattr(chat_template._Renderer, "request", ask)


def with_full_environment(patch: pytest.MonkeyPatch) -> None:
    def popen(*arguments: Any, **options: Any) -> Any:
        return started(*arguments, **options | {"env": None})

    started = chat_template.subprocess.Popen
    patch.setattr(chat_template.subprocess, "Popen", popen)


def reading(name: str, size: str) -> Any:
    return lambda _: test_gateway_parsing.test_a_hostile_body_costs_little_and_names_one_error(name, size)


def timed(folder: Path) -> None:
    del folder
    with pytest.MonkeyPatch.context() as patch:
        test_chat_template.test_a_template_is_stopped_at_its_time_limit(
            "RENDER_S", 0.1, test_chat_template.loops(3000), patch
        )


def watched(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_chat_template.test_a_template_is_stopped_without_limits_of_the_kernel("memory", folder, patch)


def without_secrets(folder: Path) -> None:
    del folder
    with pytest.MonkeyPatch.context() as patch:
        test_chat_template.test_the_environment_is_hidden_from_templates(patch)


GATEWAY = (
    Defence(
        "the time of a first token does not tell that another user sent the same prompt",
        replacing(gateway_app, "_owner", lambda *_: ""),
        over_nodes(test_gateway.test_prompts_are_reused_within_a_key_a_user_and_a_salt),
    ),
    Defence(
        "values of a body are counted before it is parsed",
        replacing(BodyParser, "_check_size", nothing),
        reading("objects", "most"),
    ),
    Defence(
        "a list is validated up to its first invalid item",
        validating_all_items,
        reading("wrong tokens", "some"),
    ),
    Defence(
        "a quota is checked before the body is read",
        replacing(QuotaTracker, "check", nothing),
        over_nodes(test_gateway_limits.test_a_key_beyond_its_quota_is_refused_before_its_body_is_read),
    ),
    Defence(
        "invalid requests count in the quota",
        replacing(QuotaTracker, "count_invalid", nothing),
        over_nodes(test_gateway_limits.test_invalid_requests_count_in_the_quota),
    ),
    Defence(
        "long texts are tokenized only as far as they fit",
        replacing(PromptTokenizer, "_is_too_long", lambda *_: False),
        over_nodes(test_gateway_limits.test_a_text_beyond_the_context_is_tokenized_in_part),
    ),
    Defence(
        "a chat template has a memory limit",
        rendering_in_process,
        lambda _: test_chat_template.test_a_template_is_stopped_at_its_memory_limit(),
    ),
    Defence("a chat template has a time limit", rendering_in_process, timed),
    Defence(
        "a chat template is limited where the kernel limits nothing",
        replacing(chat_template, "_kill_beyond", nothing),
        watched,
    ),
    Defence(
        "a chat template has an output limit",
        rendering_in_process,
        lambda _: test_chat_template.test_a_template_is_stopped_at_its_output_limit(),
    ),
    Defence("chat templates have no secrets", with_full_environment, without_secrets),
    Defence(
        "API key files are private",
        replacing(key_files, "_MOUNTED", Path("/")),
        test_serve.test_a_key_file_that_others_can_read_is_refused,
    ),
)
