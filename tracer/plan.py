"""What a model would take and what would fit, without its weights and without a GPU.

The model is built on the meta device (`plan_model`), the formulas are `analysis.memory_plan` and
`analysis.time_plan`; here they are asked for one set of settings and put together.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from lifetrace.analysis import memory_plan as memory
from lifetrace.analysis import time_plan as timing
from lifetrace.analysis.memory_plan import FORMATS, Fit, Footprint, Format, Option, Quantity, Split
from lifetrace.analysis.plan_document import Curves, KindRow, PeakTensor, Plan, Settings
from lifetrace.analysis.time_plan import Crossovers, Packing, StepFloor, StepWork
from lifetrace.errors import ModelError, UsageError

from .plan_model import PlannedModel
from .plan_subject import LONGEST, Request, find_device, find_subject
from .workload import context_length

SMALL_KV = "float8"
DEFAULT_CONTEXT = 4096
SHORT_PROMPT = 16  # tokens of the prefill that gives the cost of a token, below any window
LARGEST_BATCH = 2**16
MOST_DEVICES = 64


def plan(request: Request) -> Plan:
    """Plan a model.

    Raises:
        UsageError: settings that cannot be, unknown devices, absurd dimensions.
        ModelError: the model cannot be found or built.
    """
    return Planner(request).plan()


class Planner:
    """One model under one set of settings; what it measured of the model is kept for the next question."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.subject = find_subject(request)
        self.ceilings, self.device_memory, self.device_name = find_device(request)
        self.stored = FORMATS[self._dtype()]
        self.model = self._build(request.attention or self.subject.attention)
        self.settings = self._settings()
        self.kv_share = self._kv_share(request.kv_dtype)
        self.sizes = self.model.sizes()

    def plan(self) -> Plan:
        """Put everything together."""
        settings, model = self.settings, self.model
        prefill = model.prefill_memory(settings.batch, settings.prompt_length)
        return Plan(
            name=self.subject.name,
            source=self.subject.source,
            architecture=type(model.model).__name__,
            parameters=model.parameters,
            dimensions=self._dimensions(),
            settings=settings,
            kinds=tuple(KindRow(k, n, n / model.parameters) for k, n in model.kinds.items()),
            tied_head=model.tied_head,
            block_shares=_shares(model.block_matrices),
            weights=tuple(self._weights(form) for form in FORMATS.values()),
            memory=tuple(self._memory()),
            training=tuple(memory.training_bytes(model.parameters)),
            peak_module=prefill.module,
            peak_tensors=_grouped(prefill.tensors),
            score_growth=(2048, 131072, memory.score_growth(2048, 131072)),
            fit=self.fit,
            options=tuple(self._options()),
            steps=self.floors,
            work=self._work(),
            generate_floor_ns=self._generate_floor_ns(),
            crossovers=self._crossovers(),
            ceilings_source=self.ceilings.source if self.ceilings else None,
            against=against(self) if self.subject.trace is not None else (),
            notes=tuple(self._notes()),
        )

    # -- settings ------------------------------------------------------------------------------

    def _dtype(self) -> str:
        asked = self.request.dtype or self.subject.dtype
        if asked is None or asked == "auto":
            stored = str(getattr(self.subject.config, "dtype", None) or "bfloat16").removeprefix("torch.")
            return stored if stored in FORMATS else "bfloat16"
        name = memory.SHORT_NAMES.get(asked, asked)
        if name not in FORMATS:
            raise UsageError(f"There is no dtype {asked!r}; give auto, {', '.join(FORMATS)}.")
        return name

    def _build(self, attention: str | None) -> PlannedModel:
        return PlannedModel(self.subject.config, getattr(torch, self.stored.dtype), attention, self.subject.name)

    def _settings(self) -> Settings:
        request, subject = self.request, self.subject
        prompt, context, new = request.prompt_length, request.context, request.max_new_tokens
        if prompt is None and context is None:
            prompt, new = subject.prompt_length, new if new is not None else subject.new_tokens
        if context is None and prompt is not None and new is not None:
            context = prompt + new - 1
        if context is None:
            context = prompt or min(DEFAULT_CONTEXT, context_length(self.model.model) or DEFAULT_CONTEXT)
        if prompt is None:
            prompt = context if new is None else context - new + 1
        if prompt < 1 or prompt > context:
            raise UsageError(
                f"A prompt of {prompt:,} tokens does not go with a context of {context:,}; give a context that holds "
                "the prompt and what is generated."
            )
        return Settings(
            dtype=self.stored.name,
            kv_dtype=request.kv_dtype,
            batch=request.batch or subject.batch or 1,
            prompt_length=prompt,
            context=context,
            new_tokens=context - prompt + 1,
            attention=str(self.model.model.config._attn_implementation),
            gpu=self.device_name,
            gpus=request.gpus,
        )

    def _kv_share(self, kv_dtype: str | None) -> float:
        if kv_dtype is None:
            return 1.0
        name = memory.SHORT_NAMES.get(kv_dtype, kv_dtype)
        if name not in memory.ITEM_BYTES:
            raise UsageError(f"There is no KV dtype {kv_dtype!r}; give {', '.join(memory.ITEM_BYTES)}.")
        return timing.kv_item_share(name, self.stored.dtype)

    def _dimensions(self) -> dict[str, int | None]:
        text, groups = self.model.text_config, self.model.cache_groups(4)
        own = {
            "layers": len(self.model.lifecycle.layers),
            "hidden_size": getattr(text, "hidden_size", None),
            "heads": self.model.heads,
            "kv_heads": next((group.heads for group in groups if group.heads is not None), None),
            "vocab_size": self.model.vocabulary,
            "context_limit": context_length(self.model.model),
        }
        return {name: value if isinstance(value, int) else None for name, value in own.items()}

    def _notes(self) -> list[str]:
        limit, settings = context_length(self.model.model), self.settings
        notes = list(self.subject.notes)
        if limit is not None and settings.context > limit:
            notes.append(f"a context of {settings.context:,} is beyond the {limit:,} positions that the model names")
        if self.model.sequential:
            notes.append(
                "without kernels of its own it runs position by position: work and transient bytes are carried on from "
                "short lengths"
            )
        if self.model.kinds.get("experts"):
            notes.append("experts read by several tokens are those of an even choice; a router may choose otherwise")
        if self.stored.quantized:
            multiplied = timing.multiplied_dtype(self.ceilings, self.stored)
            notes.append(
                f"{self.stored.name} weights are multiplied in {multiplied}; activations are {self.stored.dtype}"
            )
        notes.append("bytes that were asked for: the CUDA context, libraries and the allocator's slack come on top")
        return notes

    # -- memory --------------------------------------------------------------------------------

    def _weights(self, stored: Format) -> Quantity:
        return memory.weight_bytes(self.model.parameters, self.model.packable, stored)

    def _footprint(self, batch: int, prompt: int, context: int, kv_share: float | None = None) -> Footprint:
        share = self.kv_share if kv_share is None else kv_share
        found = self.model.footprint(batch, prompt, context)
        return Footprint(tuple(replace(moment, kv=round(moment.kv * share)) for moment in found.moments))

    @cached_property
    def footprint(self) -> Footprint:
        """The moments of the run that is asked for."""
        settings = self.settings
        return self._footprint(settings.batch, settings.prompt_length, settings.context)

    @cached_property
    def kv_groups(self) -> tuple[memory.CacheGroup, ...]:
        """The layers of the cache at this context, in the KV dtype."""
        groups = self.model.cache_groups(self.settings.context)
        if self.settings.kv_dtype is None:
            return groups
        return tuple(replace(g, item_bytes=max(1, round(g.item_bytes * self.kv_share))) for g in groups)

    def _memory(self) -> list[Quantity]:
        settings, dtype = self.settings, self.stored.dtype
        batch, prompt = settings.batch, settings.prompt_length
        width = int(self.model.text_config.hidden_size)
        rows = [
            self._embedding(dtype),
            memory.kv_bytes_per_token(self.kv_groups),
            memory.kv_bytes(self.kv_groups, batch, settings.context),
            memory.hidden_state_bytes(batch, prompt, width, dtype),
            self._transient(),
            memory.logit_bytes(batch, self.model.vocabulary, dtype, 2 if settings.new_tokens > 1 else 1),
        ]
        if self.model.heads is not None:
            rows.append(memory.score_bytes(batch, self.model.heads, prompt, prompt, dtype))
        return [*rows, memory.peak_bytes(self._weights(self.stored).value or 0, self.footprint)]

    def _embedding(self, dtype: str) -> Quantity:
        vocabulary, width = self.model.model.get_input_embeddings().weight.shape
        return memory.embedding_bytes(int(vocabulary), int(width), dtype)

    def _transient(self) -> Quantity:
        settings = self.settings
        found = self.model.prefill_memory(settings.batch, settings.prompt_length)
        tensors = " + ".join(
            f"{tensor.count} × {list(tensor.shape)} {tensor.dtype}" for tensor in _grouped(found.tensors)[:4]
        )
        formula = f"live at once in {found.module or 'the model'}: {tensors}"
        return Quantity("transient", "prefill's transient tensors", found.transient_bytes, "B", formula)

    # -- fit -----------------------------------------------------------------------------------

    def _needed(self, stored: Format, footprint: Footprint, divided: Split) -> tuple[int, str]:
        needed, moment = memory.needed_bytes(self._weights(stored).value or 0, footprint, divided)
        return needed, moment.name

    @cached_property
    def fit(self) -> Fit | None:
        """Whether the run fits; null where no memory is named."""
        if self.device_memory is None:
            return None
        divided = memory.split(self.sizes, self.settings.gpus)
        needed, moment = self._needed(self.stored, self.footprint, divided)
        weights = self._weights(self.stored).value or 0
        limit = context_length(self.model.model)
        return Fit(
            devices=self.settings.gpus,
            memory_bytes=self.device_memory,
            needed_bytes=needed,
            spare_bytes=self.device_memory - needed,
            weights_spare_bytes=self.settings.gpus * self.device_memory - weights,
            moment=moment,
            split=divided,
            largest_batch=self._largest_batch(self.device_memory),
            largest_context=self._largest_context(self.device_memory),
            largest_context_limit=limit,
        )

    def needed(self, batch: int, context: int) -> int:
        """Bytes on the fullest device with another batch or context; the prompt grows with it unless it was given."""
        settings = self.settings
        prompt = context if self.prompt_follows else settings.prompt_length
        divided = memory.split(self.sizes, settings.gpus)
        return self._needed(self.stored, self._footprint(batch, prompt, context), divided)[0]

    @property
    def prompt_follows(self) -> bool:
        """Whether the prompt is all of the context."""
        return self.settings.prompt_length == self.settings.context

    def _largest_batch(self, memory_bytes: int) -> int | None:
        return memory.largest(lambda batch: self.needed(batch, self.settings.context), memory_bytes, LARGEST_BATCH)

    def _largest_context(self, memory_bytes: int) -> int | None:
        least = 2 if self.prompt_follows else self.settings.prompt_length
        most = max(least, context_length(self.model.model) or LONGEST)
        return memory.largest(lambda length: self.needed(self.settings.batch, length), memory_bytes, most, least)

    def _options(self) -> list[Option]:
        """Settings that fit, each one change away; two changes where one does not help."""
        fit = self.fit
        if fit is None or fit.fits:
            return []
        divided, found = fit.split, []
        found += [self._packed(form.name, None, divided) for form in self._smaller()]
        found.append(self._packed(None, SMALL_KV, divided))
        if not any(found):
            found += [self._packed(form.name, SMALL_KV, divided) for form in self._smaller()]
        if self.settings.attention == "eager":
            found.append(self._sdpa_option(divided))
        if fit.largest_batch is not None and fit.largest_batch < self.settings.batch:
            found.append(self._shorter(fit.largest_batch, None, divided, self.stored))
        if fit.largest_context is not None and fit.largest_context < self.settings.context:
            found.append(self._shorter(None, fit.largest_context, divided, self.stored))
        found.append(self._more_devices())
        return [option for option in found if option is not None]

    def _option(
        self, change: str, settings: dict[str, Any], stored: Format, footprint: Footprint, divided: Split
    ) -> Option | None:
        """The option, if it fits."""
        assert self.device_memory is not None
        needed, _ = self._needed(stored, footprint, divided)
        spare = self.device_memory - needed
        return Option(change, settings, needed, spare) if spare >= 0 else None

    def _smaller(self) -> list[Format]:
        """Formats that take fewer bits, the widest first."""
        return [form for form in FORMATS.values() if form.bits < self.stored.bits and form.name != "float16"]

    def _packed(self, dtype: str | None, kv_dtype: str | None, divided: Split) -> Option | None:
        """Weights, KV, or both in smaller types, if that fits and is smaller."""
        settings, stored = self.settings, FORMATS[dtype] if dtype else self.stored
        share = timing.kv_item_share(kv_dtype, self.stored.dtype) if kv_dtype else self.kv_share
        if kv_dtype and share >= self.kv_share:
            return None
        change = {"dtype": dtype, "kv_dtype": kv_dtype}
        chosen = {name: value for name, value in change.items() if value is not None}
        words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
        found = self._footprint(settings.batch, settings.prompt_length, settings.context, share)
        return self._option(words, chosen, stored, found, divided)

    def _sdpa_option(self, divided: Split) -> Option | None:
        try:
            fused = self._build("sdpa")
        except ModelError:
            return None
        settings = self.settings
        found = fused.footprint(settings.batch, settings.prompt_length, settings.context)
        name = "--attn-implementation sdpa"
        return self._option(name, {"attn_implementation": "sdpa"}, self.stored, found, divided)

    def _shorter(self, batch: int | None, context: int | None, divided: Split, stored: Format) -> Option | None:
        settings = self.settings
        if batch is not None:
            found = self._footprint(batch, settings.prompt_length, settings.context)
            return self._option(f"--batch {batch}", {"batch": batch}, stored, found, divided)
        assert context is not None
        prompt = context if self.prompt_follows else settings.prompt_length
        found = self._footprint(settings.batch, prompt, context)
        return self._option(f"--context {context}", {"context": context}, stored, found, divided)

    def _more_devices(self) -> Option | None:
        """The fewest devices that do, among those that the heads divide by."""
        for count in memory.dividing(self.model.heads, MOST_DEVICES):
            if count > self.settings.gpus:
                divided = memory.split(self.sizes, count)
                option = self._option(f"--gpus {count}", {"gpus": count}, self.stored, self.footprint, divided)
                if option is not None:
                    return option
        return None

    # -- time ----------------------------------------------------------------------------------

    @cached_property
    def packing(self) -> Packing:
        """How the stored weights differ from the counted ones."""
        if not self.stored.quantized:
            return Packing(kv_share=self.kv_share)
        expert = memory.weight_bytes(*self._experts(), self.stored).value or 0
        experts = self.model.kinds.get("experts", 0)
        whole = self._weights(self.stored).value or 0
        saved = self.model.parameters * 2 - whole - (experts * 2 - expert)
        return Packing(saved, expert / (experts * 2) if experts else 1.0, self.kv_share)

    def _experts(self) -> tuple[int, tuple[memory.Matrices, ...]]:
        """The experts' parameters and matrices: the largest of those that are packed."""
        experts = self.model.kinds.get("experts", 0)
        return experts, self.model.expert_matrices

    @cached_property
    def floors(self) -> tuple[StepFloor, ...]:
        """The least time of the prefill, and of the decode steps after the first token and at the end."""
        settings = self.settings
        steps = [("prefill", self.prefill_work, settings.prompt_length)]
        first = settings.prompt_length + 1
        if settings.new_tokens > 2:
            steps.append(("decode", self.model.decode_work(settings.batch, first), first))
        if settings.context > 1:
            steps.append(("decode", self.decode_work, settings.context))
        return tuple(self._floor(phase, work, context) for phase, work, context in steps)

    @cached_property
    def prefill_work(self) -> StepWork:
        """Work of the prefill."""
        return self.model.prefill_work(self.settings.batch, self.settings.prompt_length)

    @cached_property
    def decode_work(self) -> StepWork:
        """Work of the last decode step."""
        return self.model.decode_work(self.settings.batch, self.settings.context)

    @property
    def parallel(self) -> int:
        """Devices that share each step: all of them if tensors are split, one after the other if layers are."""
        divided = memory.split(self.sizes, self.settings.gpus)
        return divided.devices if divided.kind == "tensor" else 1

    def _floor(self, phase: str, work: StepWork, context: int) -> StepFloor:
        size = (self._weights(self.stored).value or 0) + sum(
            group.bytes_at(self.settings.batch, context) for group in self.kv_groups
        )
        return timing.step_floor(phase, work, context, self.packing, self.ceilings, self.stored, self.parallel, size)

    def _decode_lengths(self) -> range:
        return range(self.settings.prompt_length + 1, self.settings.context + 1)

    def _work(self) -> tuple[Quantity, ...]:
        """FLOPs of each step that has a floor, and of the whole generation; first of visible pairs, then of all."""
        rows = []
        for dense in (False, True):
            name = "flops_dense" if dense else "flops"
            for step in self.floors:
                key, words = timing.step_name(step)
                value = step.flops_dense if dense else step.flops
                rows.append(
                    Quantity(f"{key}_{name}", words, value, "FLOP", "products and attention of the replayed step")
                )
            prefill = self.prefill_work.flops_dense if dense else self.prefill_work.flops
            rows.append(timing.generation_flops(prefill, [pair[dense] for pair in self.decode_flops], dense))
        head = self.decode_work.head_flops
        return (*rows, Quantity("head_flops", "head, each step", head, "FLOP", "its product in the replayed step"))

    @cached_property
    def decode_flops(self) -> list[tuple[int | None, int | None]]:
        """FLOPs and dense FLOPs of every decode step."""
        return self.model.decode_flops(self.settings.batch, self._decode_lengths())

    def _generate_floor_ns(self) -> float | None:
        """The prefill's floor and those of all decode steps, which grow in a straight line between first and last."""
        floors = [step.floor_ns for step in self.floors]
        if any(floor is None for floor in floors):
            return None
        known = [floor for floor in floors if floor is not None]
        steps = len(self._decode_lengths())
        if not steps:
            return known[0]
        return known[0] + steps * (known[1 if len(known) > 2 else -1] + known[-1]) / 2

    def _crossovers(self) -> Crossovers:
        settings = self.settings
        windows = any(group.capacity is not None for group in self.kv_groups)
        per_token = None if windows else memory.kv_bytes_per_token(self.model.cache_groups(settings.context)).value
        if self.ceilings is None:
            context = timing.kv_context(self.decode_work, self.packing, settings.batch, per_token)
            return Crossovers(None, None, context)
        return timing.crossovers(
            decode=self.decode_work,
            shorter_decode=self.model.decode_work(settings.batch, max(2, settings.context - 1)),
            short_prefill=self.model.prefill_work(settings.batch, SHORT_PROMPT),
            batch=settings.batch,
            packing=self.packing,
            ceilings=self.ceilings,
            stored=self.stored,
            kv_per_token=per_token,
        )

    # -- curves --------------------------------------------------------------------------------

    def curves(self) -> Curves:
        """Memory over context, decode time over batch and prefill time over prompts, for a picture."""
        limit = context_length(self.model.model) or LONGEST
        contexts = _powers(256, min(limit, 131072))
        batches = sorted({1, 4, 16, self.settings.batch})
        weights = self._weights(self.stored).value or 0
        return Curves(
            weights=weights,
            memory={
                batch: [
                    (context, weights + self._footprint(batch, context, context).highest.beside_weights)
                    for context in contexts
                ]
                for batch in batches
            },
            decode={
                context: [
                    (batch, self._floor("decode", self._decode_of(batch, context), context))
                    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
                ]
                for context in sorted({contexts[0], contexts[len(contexts) // 2], self.settings.context})
            },
            prefill=[(n, self._floor("prefill", self.model.prefill_work(1, n), n)) for n in contexts],
        )

    def _decode_of(self, batch: int, context: int) -> StepWork:
        """Work of a decode step of more sequences: all but the dense weights grows with them."""
        one = self.model.decode_work(1, context)

        def times(value: int | None) -> int | None:
            return None if value is None else value * batch

        return replace(
            one,
            tokens=batch,
            flops=times(one.flops),
            flops_dense=times(one.flops_dense),
            head_flops=one.head_flops * batch,
            activation_bytes=one.activation_bytes * batch,
            kv_read_bytes=times(one.kv_read_bytes),
            kv_write_bytes=times(one.kv_write_bytes),
        )


def _powers(first: int, last: int) -> list[int]:
    """Doublings from first to last, the last included."""
    values = [first]
    while values[-1] * 2 < last:
        values.append(values[-1] * 2)
    return sorted({*(value for value in values if value <= last), last})


def _shares(counts: dict[str, int]) -> dict[str, float]:
    whole = sum(counts.values())
    return {name: count / whole for name, count in counts.items()}


def _grouped(tensors: Sequence[Any]) -> tuple[PeakTensor, ...]:
    """Equal tensors together, the heaviest first."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for tensor in tensors:
        found.setdefault((tensor.shape, tensor.dtype), []).append(tensor.bytes_)
    rows = [PeakTensor(shape, dtype, len(sizes), sum(sizes)) for (shape, dtype), sizes in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes_))


# -- plan and trace ---------------------------------------------------------------------------


def against(planner: Planner) -> tuple[memory.PredictionRow, ...]:
    """What the trace measured beside what is planned, where the settings are the trace's own."""
    from lifetrace.analysis.trace import read_trace

    settings, subject = planner.settings, planner.subject
    assert subject.trace is not None
    own = (settings.batch, settings.prompt_length, settings.new_tokens, settings.dtype, settings.kv_dtype)
    if own != (subject.batch, subject.prompt_length, subject.new_tokens, subject.dtype, None):
        return ()
    trace = read_trace(subject.trace)
    steps = trace.steps[trace.steps.parent_step.isna() & ~trace.steps.discarded.fillna(False).astype(bool)]
    steps = steps[steps.call == steps.call.min()]
    prefill, decode = steps[steps.phase == "prefill"], steps[steps.phase == "decode"]

    def total(values: Any) -> int | None:
        return None if values.isna().any() or not len(values) else int(values.sum())

    measured = {
        "weights": (trace.meta.get("model") or {}).get("weight_bytes"),
        "kv": int(steps.kv_bytes.dropna().iloc[-1]) if len(steps.kv_bytes.dropna()) else None,
        "flops_prefill": total(prefill.flops),
        "flops_decode": total(decode.flops),
    }
    return tuple(row for row in memory.predictions(predict(planner), measured) if row.measured is not None)


def predict_memory(planner: Planner) -> list[Quantity]:
    """What a run of these settings is expected to hold, to be put beside what it does."""
    settings = planner.settings
    weights = planner._weights(planner.stored)
    kv = memory.kv_bytes(planner.kv_groups, settings.batch, settings.context)
    copies = 2 if settings.new_tokens > 1 else 1
    logits = memory.logit_bytes(settings.batch, planner.model.vocabulary, planner.stored.dtype, copies)
    peak = memory.peak_bytes(weights.value or 0, planner.footprint)
    return [replace(weights, key="weights"), kv, logits, peak]


def predict(planner: Planner) -> list[Quantity]:
    """What a run of these settings is expected to hold and to compute."""
    decode = [pair[0] for pair in planner.decode_flops]
    known = [flops for flops in decode if flops is not None]
    whole = sum(known) if len(known) == len(decode) else None
    return [
        *predict_memory(planner),
        Quantity("flops_prefill", "FLOPs of the prefill", planner.prefill_work.flops, "FLOP", "of the replayed step"),
        Quantity("flops_decode", f"FLOPs of {len(decode):,} decode steps", whole, "FLOP", "of the replayed steps"),
    ]
