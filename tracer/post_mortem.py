"""After a run that ran out of memory: where it was, what was held, and what would have fitted."""

import re
import resource
from typing import Any

import torch

from lifetrace.errors import LifetraceError

from .failure import Failure
from .plan import Planner
from .plan_subject import Request
from .session import Session

# What torch says: the CUDA allocator, the CPU's, and the pass that follows live bytes.
ASKED = (
    re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)"),
    re.compile(r"you tried to allocate (\d+) (bytes)"),
)
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def post_mortem(session: Session, error: BaseException) -> dict[str, Any]:
    """The manifest's `post_mortem` of a run that ended for want of memory; what is not known is null.

    The pieces in `held` are measured where the run was followed tensor by tensor; else weights and
    KV are, and the rest is what the device's allocator held besides.
    """
    failure = session.failure
    limit = session.memory_limit_bytes or _device_bytes(session.device)
    found = {
        "message": str(error).partition("\n")[0],
        "asked_bytes": asked_bytes(str(error)),
        "limit_bytes": limit,
        "step": failure.step if failure else None,
        "phase": failure.phase if failure else None,
        "stage": failure.place.stage if failure else None,
        "layer": failure.place.layer if failure else None,
        "part": failure.place.part if failure else None,
        "module": failure.module if failure else None,
        "held": _held(session, failure),
        "would_fit": None,
    }
    if limit is not None and failure is not None:
        try:
            found["would_fit"] = _would_fit(session, failure, limit)
        except LifetraceError as reason:
            session.findings.append(f"what would have fitted cannot be told: {reason}")
    return found


def asked_bytes(message: str) -> int | None:
    """The bytes that the failed allocation asked for, as the error says; null where it does not."""
    for pattern in ASKED:
        if (match := pattern.search(message)) is not None:
            return round(float(match[1]) * UNITS[match[2]])
    return None


def _device_bytes(device: torch.device) -> int | None:
    """Memory of the device; on a CPU the limit of the process, if it has one of its own."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def _held(session: Session, failure: Failure | None) -> dict[str, int | None]:
    if session.pieces_at_failure is not None:
        return dict(session.pieces_at_failure)
    weights = int(session.manifest["model"]["weight_bytes"])
    kv = failure.kv_bytes if failure else None
    allocated = failure.allocated_bytes if failure else None
    rest = allocated - weights - (kv or 0) if allocated is not None else None
    return {"weights": weights, "kv": kv, "activations and other": rest}


def _would_fit(session: Session, failure: Failure, limit: int) -> dict[str, Any]:
    """What `plan` says of the same model, dtype and attention on a device of this size."""
    context, prompt = _lengths(failure)
    request = Request(
        config=session.model.config,
        dtype=str(session.model.dtype).removeprefix("torch."),
        batch=failure.batch or 1,
        prompt_length=prompt,
        context=context,
        attention=getattr(session.model.config, "_attn_implementation", None),
        memory=f"{limit}B",
    )
    document = Planner(request).plan().to_json()
    fit = document["fit"]
    return {
        "batch": request.batch,
        "context": context,
        "needed_bytes": fit["needed_bytes"],
        "largest_batch": fit["largest_batch"],
        "largest_context": fit["largest_context"],
        "options": document["options"],
    }


def _lengths(failure: Failure) -> tuple[int, int]:
    """Positions that the call would have held at its end, and those of its prompt."""
    held = (failure.kv_len_before or 0) + (failure.q_len or 1)
    return max((failure.max_length or 0) - 1, held), failure.prompt_length or held
