"""Log-probabilities of generated tokens, by one forward over each finished sequence, outside the timed part."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sequence:
    """A generated sequence without its padding: where it stands in the trace, and its ids."""

    calls: tuple[int, ...]
    sequence: int
    first_position: int
    prompt_length: int
    ids: tuple[int, ...]


TokenKey = tuple[int, int, int]


@torch.no_grad()
def details(model: Any, sequences: list[Sequence], top: int) -> dict[TokenKey, dict[str, Any]]:
    """Return logprob, entropy and the `top` likeliest tokens of each generated token.

    The distribution is the model's own, before any processor (temperature, top-k, penalties), in
    float32. Keys are (call, sequence, position) as in the tokens table.
    """
    found: dict[TokenKey, dict[str, Any]] = {}
    for sequence in sequences:
        ids = torch.tensor([sequence.ids], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, sequence.prompt_length - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        rows = _rows(logprobs, ids[0, sequence.prompt_length :], top)
        for offset, row in enumerate(rows):
            position = sequence.first_position + sequence.prompt_length + offset
            for call in sequence.calls:
                found[call, sequence.sequence, position] = row
    return found


def _rows(logprobs: torch.Tensor, chosen: torch.Tensor, top: int) -> list[dict[str, Any]]:
    picked = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    # 0 · log 0 is 0 in an entropy; a logit of −inf would make it NaN.
    entropy = -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(-1)
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return [
        {"logprob": logprob, "entropy": h, "top_ids": ids, "top_logprobs": values}
        for logprob, h, ids, values in zip(
            picked, entropy.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
