"""The agents that `swarmnet agent` starts: what each reads to find an endpoint and a model."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Served:
    """A model at an endpoint. ``context``: most tokens of a prompt with its answer."""

    url: str
    key: str
    model: str
    context: int

    @property
    def answer_tokens(self) -> int:
        """Tokens to leave for one answer."""
        return max(1, min(32_000, self.context // 4))


@dataclass(frozen=True)
class Setup:
    """The start of a program.

    - ``environment``: variables that the program gets. None removes a variable.
    - ``defaults``: variables that the program gets unless the user has set them.
    - ``arguments``: the first arguments of the program.
    """

    environment: Mapping[str, str | None]
    defaults: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agent:
    """An agent: its program, the command that installs it, and how it is started.

    ``tokens``: tokens of the agent's own instructions and tools, counted with one tokenizer. Other
    tokenizers count differently, so this is an estimate.
    """

    program: str
    install: str
    tokens: int
    setup: Callable[[Served], Setup]


COMPACTING_CONTEXT = 1 << 16
"""Context from which Claude Code may summarise a conversation by itself.

It does so some way before the end of the context. With a smaller context it would begin before the
first question, because its own instructions are so long.
"""


def _claude(served: Served) -> Setup:
    names = ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_")
    compacting = {} if served.context >= COMPACTING_CONTEXT else {"DISABLE_AUTO_COMPACT": "1"}
    return Setup(
        {f"ANTHROPIC_{name}MODEL": served.model for name in names}
        | {
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": served.key,
            # these would lead to an account of the user's own
            "ANTHROPIC_API_KEY": None,
            "CLAUDE_CODE_USE_BEDROCK": None,
            "CLAUDE_CODE_USE_FOUNDRY": None,
            "CLAUDE_CODE_USE_VERTEX": None,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        },
        {
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.answer_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **compacting,
        },
    )


def _codex(served: Served) -> Setup:
    provider = {
        "name": "swarmnet",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "env_key": "SWARMNET_AGENT_KEY",
    }
    settings = {
        "model": served.model,
        "model_provider": "swarmnet",
        "model_context_window": served.context,
        **{f"model_providers.swarmnet.{name}": value for name, value in provider.items()},
    }
    # JSON's strings and numbers are TOML's
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return Setup(
        {"SWARMNET_AGENT_KEY": served.key},
        arguments=tuple(part for each in overrides for part in ("-c", each)),
    )


def _opencode(served: Served) -> Setup:
    limit = {"context": served.context, "output": served.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "swarmnet",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    config = {"provider": {"swarmnet": provider}, "model": f"swarmnet/{served.model}"}
    return Setup({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(served: Served) -> Setup:
    addresses = dict.fromkeys(("OPENAI_API_BASE", "OPENAI_BASE_URL"), f"{served.url}/v1")
    environment = {**addresses, "OPENAI_API_KEY": served.key}
    return Setup(environment, arguments=("--model", f"openai/{served.model}"))


AGENTS: Mapping[str, Agent] = MappingProxyType(
    {
        "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", 14_000, _claude),
        "codex": Agent("codex", "npm install -g @openai/codex", 6_500, _codex),
        "opencode": Agent("opencode", "npm install -g opencode-ai", 8_000, _opencode),
        "aider": Agent("aider", "python -m pip install aider-install && aider-install", 600, _aider),
    }
)
