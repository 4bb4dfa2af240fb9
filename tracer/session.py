"""One trace from attach to manifest: joins the hooks to the writer. `lifetrace.trace` is its front door."""

import dataclasses
import itertools
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from numbers import Integral
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pyarrow as pa
import torch

from lifetrace.analysis import schema
from lifetrace.errors import LifetraceError, ModelError, RunError, UsageError
from lifetrace.hooks import collectives, generation, inventory, kernels, memory, offload, stages
from lifetrace.hooks.attach import DETAILS, LOOP_SLOTS, Attachment, Slot, compiled_regions, device_of, slots_for
from lifetrace.hooks.clocks import CudaTape, HostTape, Tape, TorchCuda
from lifetrace.hooks.live_bytes import LiveBytes
from lifetrace.hooks.recorder import FIRST_MODULE_SLOT, Call, Recorder, Step
from lifetrace.hooks.replay import Replayer, ReplayError

from . import calibrate, environment
from .cold import ColdWatch
from .counts import Completion, WorkLog, set_column
from .failure import Failure, failure_of
from .logprobs import Sequence, TokenKey
from .peak_memory import composition, peak_facts
from .ranks import this_process
from .stage_memory import StageMemory
from .stage_ops import StageOps, chosen_steps
from .steps import StepReader, is_top, table_of
from .tokens import StepTokens, TokenReader
from .writer import TraceWriter, claim_folder, prepare_folder, remove_trace


@dataclasses.dataclass(frozen=True)
class Options:
    """What is recorded: how deep, and for which steps of each call spans and KV are written.

    `every` keeps each Nth step; `first_step` and `last_step` (exclusive) bound them.
    """

    detail: str = "block"
    every: int = 1
    first_step: int = 0
    last_step: int | None = None
    flush_steps: int = 512
    flush_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.detail not in DETAILS:
            raise UsageError(f"There is no detail level {self.detail!r}; choose one of {', '.join(DETAILS)}.")
        if not _is_whole(self.every) or self.every < 1:
            raise UsageError(f"every={self.every!r} keeps no step; give 1 or more.")
        first, last = self.first_step, self.last_step
        is_range = _is_whole(first) and (last is None or _is_whole(last))
        if not is_range or first < 0 or (last is not None and last <= first):
            raise UsageError(f"steps=({first!r}, {last!r}) is no range; give (first, last), such as (0, 8).")

    @classmethod
    def of(cls, detail: str, every: int, steps: Any) -> "Options":
        """Those of a program: `steps` is (first, last), last excluded, or null for all that follow.

        Raises:
            UsageError: one of them cannot be.
        """
        if not isinstance(steps, tuple | list) or len(steps) != 2:
            raise UsageError(f"steps={steps!r} is no range; give (first, last), such as (0, 8).")
        return cls(detail, every, *steps)

    def wants(self, step_in_call: int) -> bool:
        """Whether the spans of this step of a call are recorded."""
        inside = self.first_step <= step_in_call and (self.last_step is None or step_in_call < self.last_step)
        return inside and (step_in_call - self.first_step) % self.every == 0


def _is_whole(given: object) -> bool:
    return isinstance(given, Integral)


# Sessions that were begun on a program's behalf, by the identity of their model.
automatic: dict[int, "Session"] = {}


class Session:
    """A trace being recorded on one model."""

    def __init__(
        self,
        model: Any,
        path: Path,
        options: Options,
        tokenizer: Any = None,
        facts: dict[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        self.model = generating_model(model)
        self.process = this_process()
        self.folder, self.path = path, self.process.partition(path)
        self.options = options
        self.tokenizer = tokenizer
        self.facts = facts or {}
        self.lifecycle = stages.find(self.model)
        self.compiled_notes = [
            f"{name or 'the model'} is compiled: it is timed as one piece; trace it uncompiled to see inside"
            for name in compiled_regions(self.model)
        ]
        self.slots = slots_for(self.model, self.lifecycle, options.detail)
        self.device = torch.device(device_of(self.model) or "cpu")
        if not force:  # a trace that is being replaced is still that of another job
            self.process.check(path)
        prepare_folder(self.path, force)
        self.writer = TraceWriter(self.path)
        self.run_id = f"{datetime.now():%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self.faults: list[LifetraceError] = []
        self.recorder = Recorder(
            tape=_tape(self.device, self.slots),
            on_steps=self._keep,
            read_memory=memory.allocator_reader(self.device),
            wants=options.wants,
            flush_steps=options.flush_steps,
            flush_seconds=options.flush_seconds,
        )
        self.attachment = Attachment(self.model, self.slots, self.recorder, self.lifecycle)
        self.attached = False
        self.recorder.on_toggle = self.attachment.toggle
        self.recorder.on_assistant = self._adopt
        self.assistants: list[tuple[Any, stages.Lifecycle]] = []
        self._adopted: list[Attachment] = []
        self.tokens = TokenReader(tokenizer, self.run_id, self.process.rank)
        self.work = WorkLog()
        self.cold = ColdWatch()
        self.stage_memory = StageMemory(self.slots)
        self.stage_ops: StageOps | None = None
        self._ordinals = array("q")  # of each top-level step: its number, and its number within its call
        self.uncounted: list[dict[str, Any]] | None = None
        self.uncountable: list[str] = []
        self.findings: list[str] = []
        self.loose_spans: list[dict[str, Any]] = []
        self.failure: Failure | None = None
        self.memory_limit_bytes: int | None = None
        self.pieces_at_failure: dict[str, int] | None = None
        self.on_out_of_memory: Callable[[Session, BaseException], dict[str, Any]] | None = None
        self.token_details: dict[TokenKey, dict[str, Any]] = {}
        self.origin_ns = 0
        self.manifest: dict[str, Any] = {}

    # -- life ----------------------------------------------------------------------------

    def start(self, attach: bool = True) -> None:
        """Write the first manifest and put on the hooks."""
        self.run_id = self.tokens.run_id = self.process.run_id(self.folder, self.run_id)
        wall_clock_ns = time.time_ns()
        self.origin_ns = perf_counter_ns()
        self.reader = StepReader(self.slots, self.run_id, self.process.rank, self.origin_ns)
        self.manifest = self._first_manifest(wall_clock_ns)
        self.claim = claim_folder(self.path, force=False)
        try:
            self.writer.manifest(self.manifest)
            self.guarded(self.writer.warm_up)
            if attach:
                self.attach()
        except BaseException:  # nothing was recorded, and nothing stays
            remove_trace(self.path)
            self.claim.release()
            raise

    def start_automatic(self) -> None:
        """Start on a program's behalf: a trace that the program itself asks for of this model takes it over."""
        self.recorder.refuses_batches = False
        self.start()
        automatic[id(self.model)] = self

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Give the tokens their text by a tokenizer that was found later."""
        self.tokenizer = tokenizer
        self.tokens.use(tokenizer)

    def end_automatic(self) -> None:
        """Give the model free; nothing takes it over any more."""
        automatic.pop(id(self.model), None)

    def attach(self) -> None:
        """Put on the hooks."""
        generation.watch(self.model, self.recorder)
        try:
            if self.process.world_size > 1:
                collectives.watch(self.recorder)
            self.attachment.attach()
        except BaseException:
            self.detach()
            raise
        self.attached = True

    def detach(self) -> None:
        """Take off the hooks; the model is as it was before."""
        self.attached = False
        collectives.unwatch(self.recorder)
        for attachment in (self.attachment, *self._adopted):
            attachment.detach()
            generation.unwatch(attachment.model)
        self._adopted = []

    def finish(
        self, status: str, error: BaseException | None = None, progress: calibrate.Progress = lambda text: None
    ) -> None:
        """Write what is left, complete the tables and the manifest. No fault of ours leaves this."""
        try:
            self.recorder.hand_ends(reached_head=False)
            self.detach()
            self.recorder.flush()
            if status == "oom" and error is not None:
                self.guarded(lambda: self._explain_failure(error))
            self.guarded(lambda: self._complete(status))
            # of several processes one measures: they would share the machine's cores
            self.guarded(lambda: self._find_ceilings(status == "complete" and self.process.rank == 0, progress))
            self._note_fault()
            self._end(status, error)
        finally:
            self.claim.release()

    def _note_fault(self) -> None:
        """What went wrong in a hook is known to the recorder, which has kept quiet since."""
        if self.recorder.fault is not None:
            self.faults.append(_own_fault(self.recorder.fault))

    def _end(self, status: str, error: BaseException | None) -> None:
        """Write the last manifest: also after a fault of ours, for a trace that is not whole has to say so."""
        faults, self.faults = self.faults, []
        if faults:
            self.findings.append(_fault_words(faults[0]))
            status, error = ("failed", faults[0]) if status == "complete" else (status, error)
        self.guarded(lambda: self._close(status, error))
        if self.faults:  # where even this fails, the manifest as it was has to do
            faults, self.faults = [*faults, *self.faults], []
            self.manifest |= {"status": "failed", "error": str(faults[0]), "notes": [_fault_words(faults[0])]}
            self.guarded(lambda: self.writer.manifest(self.manifest))
        self.faults = faults[:1]

    def _explain_failure(self, error: BaseException) -> None:
        """Ask what is above us what a run that ran out of memory was about, and what would have fitted."""
        if self.on_out_of_memory is not None:
            self.facts["post_mortem"] = self.on_out_of_memory(self, error)

    def _find_ceilings(self, may_measure: bool, progress: calibrate.Progress) -> None:
        """Note the device's ceilings, so that a stored trace keeps its verdict; a run that failed measures none."""
        if may_measure:
            self.facts["ceilings"], notes = calibrate.ceilings_for(self.device, progress)
        else:
            found, note = calibrate.load(calibrate.device_key(self.device))
            self.facts["ceilings"], notes = found.to_json() if found else None, [note] if note else []
        self.findings += notes

    def _close(self, status: str, error: BaseException | None) -> None:
        """Write the last manifest."""
        self.manifest |= {
            "status": status,
            "error": f"{type(error).__name__}: {_text_of(error)}" if error is not None else None,
            "calls": [self._call_facts(call) for call in self.recorder.calls],
            "uncounted": self.uncounted,
            "notes": [
                *self.lifecycle.notes,
                *self.compiled_notes,
                *self.findings,
                *(["continuous batching (generate_batch) ran untraced"] if self.recorder.batches_passed else []),
                *(f"some steps could not be counted: {reason}" for reason in self.uncountable),
            ],
            **self._texts(),
            **self.facts,
        }
        self.writer.manifest(self.manifest)

    def _adopt(self, model: Any) -> None:
        """Also see the forwards of a model that drafts for the traced one: as steps, without their stages."""
        if any(attachment.model is model for attachment in (self.attachment, *self._adopted)):
            return
        known = [assistant for assistant, _ in self.assistants]
        try:
            if model not in known:
                self.assistants.append((model, stages.find(model)))
                known.append(model)
            generation.watch(model, self.recorder)
        except LifetraceError as error:  # the program that asks for this assistant goes on without our eyes
            self.findings.append(f"the assistant is not seen: {error}")
            return
        attachment = Attachment(model, list(LOOP_SLOTS), self.recorder, number=1 + known.index(model))
        attachment.attach()
        self._adopted.append(attachment)

    def measure_memory(self, work: Callable[[], object], read: Callable[[], tuple[int, int]]) -> None:
        """Do the same work once more, untimed, and read memory at each mark."""
        recorder = Recorder(
            memory.MemoryTape(read), self.stage_memory.note, lambda: (None, None, None), wants=self.options.wants
        )
        attachment = Attachment(self.model, self.slots, recorder)
        self._once_more(work, recorder, attachment, attachment.toggle)

    def rehearse(self, work: Callable[[], object], limit_bytes: int | None = None) -> None:
        """Do the work without recording it, but so that one which fails is known by its place.

        With a limit the live tensor bytes are followed, and beyond it the work runs out of memory as
        on a device of that size: slow, and exact about what was held.
        """
        recorder = Recorder(
            HostTape(), self._note_failure, memory.allocator_reader(self.device), wants=self.options.wants
        )
        attachment = Attachment(self.model, self.slots, recorder)
        if limit_bytes is None:
            self._once_more(work, recorder, attachment, attachment.toggle)
            return
        self.memory_limit_bytes = limit_bytes
        try:
            with LiveBytes(self.model, keep_calls=False, limit_bytes=limit_bytes) as live:
                self._once_more(work, recorder, attachment, attachment.toggle)
        except torch.OutOfMemoryError:
            self.pieces_at_failure = self._kinds(live)
            raise

    def _kinds(self, live: LiveBytes) -> dict[str, int]:
        """Live bytes of each kind at the highest moment."""
        config = self.model.config.get_text_config(decoder=True)
        modules = inventory.inventory(self.model, self.lifecycle)
        kinds: Counter[str] = Counter()
        for piece in composition(live.peak, modules, self.lifecycle, config):
            kinds[piece["kind"]] += piece["bytes"]
        return dict(kinds.most_common())

    def measure_live_bytes(self, work: Callable[[], object]) -> None:
        """Do the same work once more, untimed, and follow the live tensor bytes: what the highest moment is made of.

        Where the device has no allocator of its own to ask, this also gives each stage its memory.
        """
        with LiveBytes(self.model, keep_calls=False) as live:
            if self.device.type == "cuda":
                work()
            else:
                self.measure_memory(work, live.reading)
        config = self.model.config.get_text_config(decoder=True)
        modules = inventory.inventory(self.model, self.lifecycle)
        self.facts["memory"] = peak_facts(live, modules, self.lifecycle, config)

    def profile(self, work: Callable[[], object]) -> None:
        """Do the same work once more, untimed, and profile the operators of a few of its steps."""
        slots = slots_for(self.model, self.lifecycle, "module")
        self.stage_ops = StageOps(slots)
        chosen = chosen_steps(max((call.step_count for call in self.recorder.calls), default=1))
        tape = kernels.ProfilerTape(self.device)
        recorder = Recorder(tape, self.stage_ops.note, lambda: (None, None, None), wants=chosen.__contains__)
        attachment = Attachment(self.model, slots, recorder)

        def toggle(chosen_now: bool) -> None:
            attachment.toggle(chosen_now)
            if chosen_now:
                tape.begin()

        with kernels.labels(self.model):
            self._once_more(work, recorder, attachment, toggle)

    def _once_more(
        self, work: Callable[[], object], recorder: Recorder, attachment: Attachment, toggle: Callable[[bool], None]
    ) -> None:
        """Do work under a recorder of its own."""
        recorder.on_toggle = toggle
        generation.watch(self.model, recorder)
        attachment.attach()
        try:
            work()
        finally:
            attachment.detach()
            generation.unwatch(self.model)
            recorder.flush()

    def span(self, stage: str, start_ns: int, end_ns: int) -> None:
        """Note a stage outside the model, tokenize or detokenize; written with the next steps."""
        row = {
            "run_id": self.run_id,
            "rank": self.process.rank,
            "stage": stage,
            "device": "cpu",
            "start_ns": start_ns - self.origin_ns,
            "host_ns": end_ns - start_ns,
        }
        self.loose_spans.append(row)

    def sequences(self) -> list[Sequence]:
        """The sequences of all calls, each distinct one once, for reading their probabilities."""
        return self.tokens.sequences(self.recorder.calls)

    # -- rows ----------------------------------------------------------------------------

    def _keep(self, steps: list[Step]) -> None:
        """Write finished steps; runs in the generating thread, so a fault is kept for the end."""
        self.guarded(lambda: self._write(steps))

    def _write(self, steps: list[Step]) -> None:
        self._note_failure(steps)
        rows = self.reader.read(steps, [step.detailed for step in steps], memory.rss_bytes())
        self.tokens.note(steps, rows.of_step)
        self.work.note(steps)
        self._note_times(steps, rows.of_step)
        for step in steps:
            if is_top(step):
                self._ordinals.extend((step.index, step.ordinal))
        self.writer.part("steps", rows.steps)
        spans = [self._loose(), rows.spans] if self.loose_spans else [rows.spans]
        self.writer.part("spans", pa.concat_tables(spans).unify_dictionaries())
        self.writer.part("kv", rows.kv)

    def _note_failure(self, steps: list[Step]) -> None:
        failed = [step for step in steps if step.failed and step.call.error is not None]
        if failed:
            self.failure = failure_of(failed[-1], self.slots)

    def _note_times(self, steps: list[Step], rows: dict[int, dict[str, Any]]) -> None:
        for step in steps:
            if step.signature is not None and not step.failed:
                kind = (step.prefill, step.role, step.detailed, step.signature.batch, step.signature.q_len)
                self.cold.note(kind, step.index, rows[step.index]["wall_ns"])

    def _loose(self) -> pa.Table:
        """The noted spans that no step holds, with ids of their own."""
        rows, self.loose_spans = self.loose_spans, []
        for row in rows:
            row["span"] = self.reader.next_span
            self.reader.next_span += 1
        return table_of(schema.SPANS, rows)

    def guarded(self, work: Callable[[], None]) -> None:
        """Do work of our own; once it failed, the disk is left alone and the user's program goes on."""
        if self.faults:
            return
        try:
            work()
        except LifetraceError as fault:
            self.faults.append(fault)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is ours, and the program is not
            self.faults.append(_own_fault(error))

    def _complete(self, status: str) -> None:
        self.writer.part("spans", self._loose())
        tokens: dict[int, StepTokens] = {}
        for call in self.recorder.calls:
            rows, by_step = self.tokens.rows(call)
            for row in rows:
                row |= self.token_details.get((row["call"], row["sequence"], row["position"]), {})
            self.writer.part("tokens", table_of(schema.TOKENS, rows))
            tokens |= by_step
        work = self._count(status == "complete")
        cold = self.cold.cold()
        ordinals = dict(zip(self._ordinals[0::2], self._ordinals[1::2], strict=True))
        self.writer.complete("steps", lambda rows: self._complete_steps(rows, work, tokens, cold, ordinals))
        self.writer.complete("spans", lambda rows: self.stage_memory.fill(work.spans(rows), ordinals))
        self.uncounted = work.uncounted()
        self.writer.complete("kv", lambda rows: rows)
        self.writer.complete("tokens", lambda rows: rows)
        if self.stage_ops is not None:
            step_at = {ordinal: step for step, ordinal in sorted(ordinals.items(), reverse=True)}
            self.writer.part("ops", table_of(schema.OPS, self.stage_ops.rows(step_at, self.run_id, self.process.rank)))
        self.writer.table("modules", self._modules())
        self.writer.table("products", table_of(schema.PRODUCTS, work.products))

    def _complete_steps(
        self,
        rows: pa.Table,
        work: Completion,
        tokens: dict[int, StepTokens],
        cold: set[int],
        ordinals: dict[int, int],
    ) -> pa.Table:
        rows = _marked(_with_token_counts(work.steps(rows), tokens), cold)
        return rows if self.device.type == "cuda" else self.stage_memory.fill_steps(rows, ordinals)

    def _count(self, run_model: bool) -> Completion:
        """Count the work of all steps; what cannot be replayed stays null, and the notes say why.

        Operators are counted where the model itself may run once more: not after a failed run.
        """
        loaded = offload.loads_by_module(self.model)
        completion = Completion(self.work, inventory.expert_bytes(self.model), loaded)
        for number, (model, lifecycle) in enumerate([(self.model, self.lifecycle), *self.assistants]):
            try:
                replayer = Replayer(model)
                completion.replay(replayer, lifecycle, number)
                if number == 0:
                    self._note_recomputing(completion.recomputed(replayer, lifecycle))
                if run_model:
                    reasons = completion.count_operators(replayer, number)
                    self.findings += [f"operators of some steps could not be counted: {why}" for why in sorted(reasons)]
            except ReplayError as error:
                completion.failures.add(str(error))
        self.uncountable = sorted(completion.failures)
        return completion

    def _note_recomputing(self, flops: tuple[int, int] | None) -> None:
        """Say what the KV cache would have saved, where a call did without."""
        if flops is not None:
            done, needed = flops
            self.findings.append(
                f"without a KV cache decode computed {done:,} FLOPs; with one it would be {needed:,}, "
                f"{done / needed:.1f} times less"
            )

    def _modules(self) -> pa.Table:
        rows = [
            dataclasses.asdict(row) | {"stage": row.place.stage, "layer": row.place.layer, "part": row.place.part}
            for row in inventory.inventory(self.model, self.lifecycle)
        ]
        return table_of(schema.MODULES, rows)

    def _texts(self) -> dict[str, Any]:
        """Prompt and output of the last call as text, where a tokenizer was given."""
        calls = [call for call in self.recorder.calls if call.kind == "generate" and call.parent_step is None]
        if self.tokenizer is None or not calls:
            return {}
        prompt, output = self.tokens.texts(calls[-1])
        return {"prompt": prompt, "output": output}

    # -- manifest ------------------------------------------------------------------------

    def _first_manifest(self, wall_clock_ns: int) -> dict[str, Any]:
        empty = dict.fromkeys(schema.MANIFEST_KEYS)
        return empty | {
            "format_version": schema.FORMAT_VERSION,
            "run_id": self.run_id,
            "status": "running",
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
            "wall_clock_ns": wall_clock_ns,
            "rank": self.process.rank,
            "world_size": self.process.world_size,
            "job": self.process.job,
            "model": self._model_facts(),
            "device": environment.device_facts(self.device),
            "versions": environment.versions(),
            "settings": dataclasses.asdict(self.options),
            "calls": [],
            "notes": list(self.lifecycle.notes),
            **self.facts,
        }

    def _model_facts(self) -> dict[str, Any]:
        config = self.model.config
        rows = inventory.inventory(self.model, self.lifecycle)
        return {
            "id": getattr(config, "name_or_path", None) or type(self.model).__name__,
            "architecture": type(self.model).__name__,
            "model_type": getattr(config, "model_type", None),
            "config": jsonable(config.to_diff_dict()),
            "dtype": str(getattr(self.model, "dtype", None)).removeprefix("torch."),
            "attention": getattr(config, "_attn_implementation", None),
            "experts": getattr(config, "_experts_implementation", None),
            "parameters": inventory.parameter_count(rows),
            "weight_bytes": sum(row.weight_bytes for row in rows if row.tied_to is None),
            "layers": len(self.lifecycle.layers),
            "embed": self.lifecycle.embed,
            "head": self.lifecycle.head,
        } | self.facts.pop("model", {})

    def _call_facts(self, call: Call) -> dict[str, Any]:
        def since_origin(time_ns: int | None) -> int | None:
            return time_ns - self.origin_ns if time_ns is not None else None

        return {
            "call": call.index,
            "kind": call.kind,
            "repeat": call.repeat,
            "parent_step": call.parent_step,
            "request_start_ns": since_origin(call.request_start_ns or call.start_ns),
            "start_ns": since_origin(call.start_ns),
            "end_ns": since_origin(call.end_ns),
            "error": call.error,
            **self.tokens.call_facts(call),
        }


def _own_fault(error: Exception) -> LifetraceError:
    """A fault of ours as one that can be reported."""
    if isinstance(error, LifetraceError):
        return error
    return RunError(f"lifetrace failed while recording: {type(error).__name__}: {error}")


def _fault_words(fault: LifetraceError) -> str:
    return f"this trace is not whole: {fault}"


def _with_token_counts(rows: pa.Table, counts: dict[int, StepTokens]) -> pa.Table:
    """Fill in how many tokens each step gave and how many of those it processed were real."""
    steps = rows["step"].to_pylist()
    for name in ("token_count", "tokens_real"):
        values = [getattr(counts[step], name) if step in counts else None for step in steps]
        rows = set_column(rows, name, pa.array(values, type=pa.int64()))
    failed = rows["discarded"].to_pylist()
    undone = [step in counts and counts[step].undone for step in steps]
    discarded = [bool(a or b) for a, b in zip(failed, undone, strict=True)]
    return set_column(rows, "discarded", pa.array(discarded))


def _marked(rows: pa.Table, cold: set[int]) -> pa.Table:
    """Mark the steps that statistics leave out."""
    return set_column(rows, "warmup", pa.array([step in cold for step in rows["step"].to_pylist()]))


def _tape(device: torch.device, slots: list[Slot]) -> Tape:
    """A host tape, or on CUDA one that also records events, each on the device of its slot."""
    if device.type != "cuda":
        return HostTape()
    of_slot = [slot.device for slot in slots]
    modules = [name for name in of_slot[FIRST_MODULE_SLOT:] if name and name.startswith("cuda")]
    first, last = (modules[0], modules[-1]) if modules else (None, None)
    # A step begins before any device work of its own; the forward begins where the embedding lies,
    # and choosing a token runs where the head left its logits.
    begin = [None, first, last, last, last, None, last]
    end = [last, last, last, last, last, None, last]
    for name in of_slot[FIRST_MODULE_SLOT:]:
        on_cuda = name if name and name.startswith("cuda") else None
        begin.append(on_cuda)
        end.append(on_cuda)
    return CudaTape([name for pair in zip(begin, end, strict=True) for name in pair], TorchCuda())


def generating_model(model: Any) -> Any:
    """Return the model whose `generate` runs: the model itself, or the one inside a wrapper (peft).

    Raises:
        ModelError: when there is none.
    """
    from transformers import GenerationMixin

    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"lifetrace traces a transformers model; what it was given is a {type(model).__name__}.")
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            return module
    raise ModelError(
        f"{type(model).__name__} has no generate(); lifetrace traces causal language models, "
        "as AutoModelForCausalLM loads them."
    )


def jsonable(value: Any) -> Any:
    """Return a value that JSON can hold: what it cannot becomes its text."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def default_folder(model: Any) -> Path:
    """`traces/<time>-<model>`, with only letters, digits, dots and dashes of the model's name."""
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    return new_folder(name)


def new_folder(model_id: str) -> Path:
    """A folder in `traces` that is not there yet; of two runs in one second the later has a number behind its name."""
    if this_process().world_size > 1:
        raise UsageError("Several processes write one trace: give each of them the same folder with --out (out=).")
    first = Path("traces") / folder_name(model_id)
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], numbered) if _claim(path))


def _claim(path: Path) -> bool:
    """Make the folder, unless it is there; one that cannot be made is reported when it is prepared."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return not path.is_dir()
    except OSError:
        pass
    return True


def folder_name(model_id: str) -> str:
    """The last part of a model's id or path as a folder name, after the present time."""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{safe_name(model_id)}"


def safe_name(model_id: str) -> str:
    """The last part of a model's id or path, with what any file system takes."""
    last = model_id.rstrip("/").rsplit("/", 1)[-1]
    safe = "".join(c if c.isascii() and (c.isalnum() or c in ".-_") else "-" for c in last).strip(".-") or "model"
    return safe[:60]


def _text_of(error: BaseException) -> str:
    """What an exception says; nothing where its own `__str__` fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a program's exception may be anything
        return ""


def status_of(error: BaseException | None) -> str:
    """The status of a trace whose block ended with this exception, or with none."""
    if error is None or isinstance(error, SystemExit):
        return "complete"
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return "interrupted"
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if out_of_memory or "can't allocate memory" in _text_of(error):
        return "oom"
    return "failed"
