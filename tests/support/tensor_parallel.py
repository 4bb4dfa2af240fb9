"""Run by torchrun: a small model in tensor parallelism, traced in each process.

`slow` delays each layer of rank 1; with `killed` rank 1 kills itself before its third token.
"""

import os
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lifetrace

warnings.filterwarnings("error", module="lifetrace")
checkpoint, out, *how = sys.argv[1:]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=DistributedConfig(tp_plan="auto")).eval()
prompt = torch.arange(3, 15)[None]
untraced = model.generate(prompt, max_new_tokens=4, do_sample=False)
if "slow" in how and dist.get_rank() == 1:
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *given: time.sleep(0.05))
if "killed" in how and dist.get_rank() == 1:
    forwards = iter(range(2))
    model.register_forward_pre_hook(
        lambda *given: os.kill(os.getpid(), signal.SIGKILL) if next(forwards, None) is None else None
    )
before = dist.all_reduce
with lifetrace.trace(model, out=out, force="force" in how) as trace:
    traced = model.generate(prompt, max_new_tokens=4, do_sample=False)
assert torch.equal(traced, untraced)
assert dist.all_reduce is before
print(f"rank {dist.get_rank()}: {traced.tolist()}", flush=True)
dist.destroy_process_group()
