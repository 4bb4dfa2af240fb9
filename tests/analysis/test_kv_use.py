"""What the cache of model R is used for: 4 layers, keys and values of 32 in float32: 1,024 B a position."""

import pytest
import torch

import lifetrace
from lifetrace.analysis.kv_use import kv_use

POSITION = 4 * 2 * 32 * 4


def traced(model, path, prompt, **settings):
    with lifetrace.trace(model, out=path):
        model.generate(prompt, max_new_tokens=6, do_sample=False, **settings)
    return kv_use(lifetrace.read_trace(path))


def test_a_growing_cache_copies_itself_at_each_append(model_r, prompt_12, tmp_path):
    use = traced(model_r, tmp_path / "t", prompt_12)
    assert (use.positions, use.bytes_) == (17, 17 * POSITION)
    assert (use.unused_bytes, use.padding_bytes) == (0, 0)
    assert use.copied_bytes == 2 * POSITION * (12 + 13 + 14 + 15 + 16)
    assert use.double_bytes == 17 * POSITION // 4
    assert (use.checked, use.apart) == (6 * 4, 0)


def test_a_static_cache_has_free_slots_and_copies_nothing(model_r, prompt_12, tmp_path):
    use = traced(model_r, tmp_path / "t", prompt_12, cache_implementation="static")
    slots = 17  # transformers makes room for all positions that will be cached
    assert use.copied_bytes == use.double_bytes == 0
    assert use.unused_bytes == (slots - use.positions) * POSITION


@pytest.mark.parametrize("beams", [1, 3])
def test_padding_has_its_share(model_r, tmp_path, beams):
    """Prompts of 12 and 3 tokens, padded to 12: 9 of 2 × 17 positions, in each beam."""
    prompt = torch.stack([torch.arange(3, 15), torch.cat([torch.zeros(9, dtype=torch.long), torch.arange(3, 6)])])
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :9] = 0
    use = traced(model_r, tmp_path / "t", prompt, attention_mask=mask, num_beams=beams)
    assert use.padding_bytes == beams * 9 * POSITION
    assert use.padding_share == pytest.approx(9 / 34)


def test_without_a_cache_there_is_nothing_to_say(model_r, prompt_12, tmp_path):
    assert traced(model_r, tmp_path / "t", prompt_12, use_cache=False) is None
