"""The decoding loop of ``generate`` with speculation: transformers' ``_sample`` for one sequence,
with several tokens a step."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from swarmnet_client.model.cache import SwarmCache
from swarmnet_client.model.drafts.draft_model import DraftModel
from swarmnet_client.model.drafts.speculation import Speculator, StepTimes

_OTHER_LOOPS = (
    "assistant_model",
    "custom_generate",
    "inputs_embeds",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "synced_gpus",
)
"""Options of ``generate`` that need transformers' own loops."""


@dataclass
class SpeculativeDecoding:
    """The decoding loop of one call of ``generate``, given as its ``custom_generate``. ``times``
    and ``draft_model`` live as long as the model.

    ``streamer`` is a field because transformers does not pass it to a ``custom_generate``.
    """

    times: StepTimes
    draft_model: DraftModel | None
    cache: SwarmCache
    streamer: Any

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Continue the one sequence of ``input_ids`` [1, n]; returns it with its new tokens.

        Logits processors, stopping criteria and random numbers are used once for each token, in the
        order of ``_sample``, so the tokens are the same.
        """
        cache, ids = self.cache, input_ids[0].tolist()
        speculator = Speculator(ids, self.draft_model.sequence(ids) if self.draft_model else None)
        mask = model_kwargs.get("attention_mask")
        prompt = input_ids.shape[1]
        logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1:]
        draft: tuple[int, ...] = ()
        while True:
            chosen: list[int] = []
            for at in range(len(draft) + 1):
                scores = logits_processor(input_ids, logits[:, at].to(torch.float32, copy=True))
                if generation_config.do_sample:
                    token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
                else:
                    token = scores.argmax(dim=-1, keepdim=True)
                input_ids = torch.cat([input_ids, token], dim=-1)
                if self.streamer is not None:
                    self.streamer.put(token[0].cpu())
                chosen.append(int(token))
                is_done = bool(stopping_criteria(input_ids, None).all())
                if is_done or chosen != [*draft[: at + 1]]:
                    break
            held = input_ids.shape[1] - 1
            if cache.get_seq_length() > held:
                cache.truncate(held)
            if is_done:
                break
            speculator.choose(chosen, len(draft))
            draft = speculator.draft(
                self.times, most=min(generation_config.max_length, cache.max_cache_len) - held - 2
            )
            sent = torch.cat([input_ids[:, held:], input_ids.new_tensor([draft])], dim=-1)
            if mask is not None:
                mask = torch.cat([mask[:, :prompt], mask.new_ones(1, held + sent.shape[1] - prompt)], dim=-1)
            started = time.perf_counter()
            logits = model(
                input_ids=sent,
                attention_mask=mask,
                past_key_values=cache,
                logits_to_keep=sent.shape[1],
                return_dict=True,
            ).logits
            self.times.add(sent.shape[1], time.perf_counter() - started)
        if self.streamer is not None:
            self.streamer.end()
        return input_ids


def may_speculate(model: Any, ids: torch.Tensor | None, options: Mapping[str, Any]) -> bool:
    """Return whether speculation supports this call of ``generate``: it decodes one sequence,
    returns only tokens, and the model's cache can go back."""
    config = options.get("generation_config") or model.generation_config

    def option(name: str) -> Any:
        value = options.get(name)
        return getattr(config, name, None) if value is None else value

    return (
        ids is not None
        and ids.dim() == 2
        and ids.shape[0] == 1
        and not model._is_stateful
        and not any(option(name) for name in _OTHER_LOOPS)
        and all((option(name) or 1) == 1 for name in ("num_beams", "num_return_sequences", "guidance_scale"))
        and option("use_cache") is not False
        # stop strings need the tokenizer, which this loop does not get
        and not config.stop_strings
    )
