"""Prompts as a batch, and greedy answers to them."""

from typing import Any

import torch

from swarmnet_client.model.model import SwarmModel


def padded(prompts: list[list[int]], *, left: bool = True) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` [B, n] of prompts of different lengths."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        fill, ones = [0] * (width - len(prompt)), [1] * len(prompt)
        ids.append(fill + prompt if left else prompt + fill)
        mask.append(fill + ones if left else ones + fill)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def are_greedy(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[bool]:
    """Whether each answer is what ``greedy`` gives, by one forward of a whole model. Prompts are of
    one length, and answers, too."""
    with torch.inference_mode():
        texts = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
        chosen = model(texts[:, :-1]).logits[:, len(prompts[0]) - 1 :].argmax(-1)
    return (chosen == torch.tensor(answers)).all(1).tolist()


def greedy(model: Any, prompts: list[list[int]], count: int, streamer: Any = None) -> list[list[int]]:
    """Exactly ``count`` greedy tokens after each prompt: end tokens end no text. Each trip brings
    one token, so that a fault has a step to hit."""
    batch = padded(prompts)
    plain = {"speculate": False} if isinstance(model, SwarmModel) else {}
    output = model.generate(
        **batch,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=streamer,
        **plain,
    )
    answers: list[list[int]] = output[:, batch["input_ids"].shape[1] :].tolist()
    return answers
