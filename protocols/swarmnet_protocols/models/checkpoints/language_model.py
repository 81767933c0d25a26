"""The language model in a multimodal model: its config, and its CausalLM class.

If transformers has no such class, this module makes one. For text prompts, the language model
computes exactly what the whole model does. The towers for images and sound only compute embeddings
that replace some tokens' embeddings.
"""

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SHARED = ("tie_word_embeddings", "quantization_config")
"""Settings of the language model that are at the top level of a multimodal config, not in its text
config."""
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Settings that make a call return more than logits."""


def language_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return a copy of the config of the language model. Its calls return logits and caches only.

    Raises ``ValueError`` for a config with several parts for text.
    """
    inner = copy.deepcopy(config.get_text_config(decoder=True))
    for name in _SHARED:
        if hasattr(config, name):
            setattr(inner, name, getattr(config, name))
    for name in _OUTPUTS:
        if hasattr(inner, name):
            setattr(inner, name, False)
    inner.return_dict = inner.use_cache = True
    return inner


def language_settings(config: "PretrainedConfig", settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model in ``settings``, the config.json that ``config``
    was made from.

    If a multimodal file has no part for text, these are all its settings.
    """
    inner = config.get_text_config(decoder=True)
    part = next((name for name in config.sub_configs if getattr(config, name, None) is inner), "")
    found = settings.get(part)
    return found if isinstance(found, dict) else {**settings, "model_type": inner.model_type}


def headed_class(config: "PretrainedConfig") -> type | None:
    """Return a CausalLM class for the text part of a multimodal model, for architectures without
    one.

    It has the decoder stack and ``lm_head``. None if ``config`` is not such a part.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if getattr(config, "base_config_key", "") != "text_config" or type(config) not in MODEL_MAPPING:
        return None
    return _headed(MODEL_MAPPING[type(config)])


@functools.cache
def _headed(stack: Any) -> type:
    from torch import nn
    from transformers.generation import GenerationMixin
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    def init(self: Any, config: "PretrainedConfig") -> None:
        parent.__init__(self, config)
        self.model = stack(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    parent: Any = stack.__mro__[1]  # the architecture's PreTrainedModel
    namespace = {
        "__init__": init,
        "__module__": __name__,
        # it calls only ``self.model`` and ``self.lm_head``, so it works for any architecture
        "forward": LlamaForCausalLM.forward,
        "base_model_prefix": "model",
        "config_class": stack.config_class,
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
    }
    return type(stack.__name__.removesuffix("Model") + "ForCausalLM", (parent, GenerationMixin), namespace)
