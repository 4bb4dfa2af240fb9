"""What a run that ran out of memory was about, in sentences."""

from typing import Any

from . import units

OPTIONS_SHOWN = 4


def post_mortem_words(found: dict[str, Any]) -> list[str]:
    """Where it happened and what was asked for; what was held; what would have fitted."""
    return [_happened(found), _held(found), *_fitting(found)]


def _happened(found: dict[str, Any]) -> str:
    asked = f", asking for {units.byte_count(found['asked_bytes'])}" if found["asked_bytes"] is not None else ""
    return f"Out of memory{_place(found)}{asked}."


def _place(found: dict[str, Any]) -> str:
    """` in the prefill, step 0, layer 5, mlp (model.layers.5.mlp)`; nothing where the place is not known."""
    if found["step"] is None:
        return ""
    stage = f"layer {found['layer']}" if found["layer"] is not None else found["stage"]
    part = f", {found['part']}" if found["part"] else ""
    module = f" ({found['module']})" if found["module"] else ""
    return f" in the {found['phase']}, step {found['step']}, {stage}{part}{module}"


def _held(found: dict[str, Any]) -> str:
    known = {name: size for name, size in found["held"].items() if size is not None}
    held = ", ".join(f"{name} {units.byte_count(size)}" for name, size in known.items())
    of = f" of {units.byte_count(found['limit_bytes'])}" if found["limit_bytes"] is not None else ""
    return f"Held{of}: {held}."


def _change(option: dict[str, Any]) -> str:
    """An option of the command line, or a format of the weights that none of its options makes."""
    dtype = option["settings"].get("dtype")
    return option["change"] if dtype in (None, "float32", "float16", "bfloat16") else f"{dtype} weights"


def _fitting(found: dict[str, Any]) -> list[str]:
    fit = found["would_fit"]
    if fit is None:
        return []
    size = units.byte_count(fit["needed_bytes"])
    needed = f"{size} for a context of {fit['context']:,} and a batch of {fit['batch'] or 1:,}"
    changes = [_change(option) for option in fit["options"][:OPTIONS_SHOWN]]
    what = f"it would fit with {' or '.join(changes)}" if changes else "no single change of settings would make it fit"
    most = [
        f"the largest {name} is {fit[key]:,}"
        for name, key in (("batch at this context", "largest_batch"), ("context at this batch", "largest_context"))
        if fit[key] is not None
    ]
    return [f"Planned, it needs {needed}; {'; '.join([what, *most])}."]
