"""Run large models on a swarm of ordinary computers.

from swarmnet import AutoSwarmModelForCausalLM
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmnet.api import AutoSwarmModelForCausalLM as AutoSwarmModelForCausalLM
    from swarmnet.api import (
        AutoSwarmModelForSequenceClassification as AutoSwarmModelForSequenceClassification,
    )

__all__ = ["AutoSwarmModelForCausalLM", "AutoSwarmModelForSequenceClassification"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from swarmnet import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
