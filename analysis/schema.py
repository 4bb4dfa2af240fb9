"""The trace format: its tables, their columns, and the keys of the manifest.

This module is the one place where a column is named, typed and explained. The writer takes
its Arrow schemas from here, the reader checks against them, and `docs/trace-format.md` is
printed from here by `make docs`.
"""

from dataclasses import dataclass

import pyarrow as pa

FORMAT_VERSION = 1
# In a part file's own metadata: how many consecutive parts, itself included, it stands for.
COVERS = b"lifetrace.covers"

INT = pa.int64()
SMALL = pa.int32()
FLAG = pa.bool_()
FLOAT = pa.float64()
TEXT = pa.string()
WORD = pa.dictionary(pa.int32(), pa.string())
SHAPE = pa.list_(pa.int32())

PHASES = ("prefill", "decode")
# Parts that come between the work of others: weights brought for a call and let go of after it, processes that talk.
ASIDES = WEIGHTS, RELEASE, COMMUNICATION = "weights", "release", "communication"
STAGES = (
    "tokenize", "prepare", "embed", "layer", "final_norm", "lm_head", "sample", "detokenize", "nested", "other",
)  # fmt: skip
TOP_STAGES = ("prepare", "embed", "layer", "final_norm", "lm_head", "sample", "nested", "other")


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, whether the run or its end fills it, and what it means."""

    name: str
    type: pa.DataType
    meaning: str
    completed_at_close: bool = False


@dataclass(frozen=True)
class Table:
    """One table of a trace: a single file, or a folder of part files."""

    name: str
    in_parts: bool
    row: str
    columns: tuple[Column, ...]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema; every field may be null, for a missing measurement is null."""
        return pa.schema([pa.field(column.name, column.type) for column in self.columns])


def _at_close(name: str, type_: pa.DataType, meaning: str) -> Column:
    return Column(name, type_, meaning, completed_at_close=True)


RUN_ID = Column("run_id", WORD, "the run, as in the manifest")
RANK = Column("rank", SMALL, "process of a distributed run, 0 where there is one")
STEP = Column("step", INT, "forward of the model, from 0 over the whole trace")
PHASE = Column("phase", WORD, "`prefill` until the call has chosen a token, then `decode`")

WORK = (
    _at_close("flops", INT, "2 × multiply-adds of products and attention, only query–key pairs let through"),
    _at_close("flops_dense", INT, "the same as a dense implementation executes it, over all keys returned"),
)
TRAFFIC = (
    _at_close("weight_bytes", INT, "bytes of the weights read: gathered rows of an embedding, experts used"),
    _at_close("kv_read_bytes", INT, "bytes of cached keys, values and states read"),
    _at_close("kv_write_bytes", INT, "bytes of new keys, values and states written"),
    _at_close("kv_copy_bytes", INT, "bytes that the cache class moves besides: re-copying all at each append"),
)

STEPS = Table(
    "steps",
    True,
    "one forward of the model",
    (
        RUN_ID,
        RANK,
        Column("repeat", SMALL, "which traced repeat of the same work, from 0"),
        Column("call", SMALL, "which `generate` (or plain forward), from 0"),
        STEP,
        Column("parent_step", INT, "the step in which this forward ran (guidance, assistant), else null"),
        PHASE,
        Column("role", WORD, "`main`, `assistant` or `guidance`"),
        Column("batch", SMALL, "sequences in this forward, beams and returned sequences included"),
        Column("q_len", SMALL, "positions processed for each sequence"),
        Column("kv_len_before", SMALL, "positions in the cache before, padding included"),
        Column("kv_len_after", SMALL, "positions seen after this step, padding included"),
        Column("tokens_processed", INT, "batch × q_len"),
        _at_close("tokens_real", INT, "those that are not padding"),
        _at_close("token_count", INT, "new tokens that this step gave"),
        Column("discarded", FLAG, "the result of this forward was not used"),
        _at_close(
            "warmup", FLAG, "cold: the first of its kind and over twice as slow as the rest; left out of statistics"
        ),
        Column("start_ns", INT, "since the start of the trace, on a monotonic clock"),
        Column("wall_ns", INT, "from the start of this step to its end: preparation, forward, sampling"),
        Column("forward_ns", INT, "inside the model's forward"),
        Column("sample_ns", INT, "after the forward: logits processing, token choice, stop check, streamer"),
        Column("prepare_ns", INT, "before the forward: preparing its inputs, the call's set-up on the first step"),
        Column("device_ns", INT, "CUDA events around the forward; null on a CPU"),
        *WORK,
        _at_close("flops_counted", INT, "the known part of `flops`; equal to it when nothing is uncounted"),
        _at_close(
            "op_count",
            INT,
            "operators that the forward launches, views excluded; counted by running it once more, untimed",
        ),
        *TRAFFIC,
        _at_close("activation_bytes", INT, "activation traffic: inputs and outputs of the stages, no KV"),
        Column("kv_bytes", INT, "KV of all layers after the step: positions filled, recurrent states included"),
        Column("kv_allocated_bytes", INT, "storage that the cache holds for them"),
        Column(
            "mem_allocated_bytes",
            INT,
            "at its end: CUDA caching allocator; on a CPU live tensors, in an untimed pass",
        ),
        Column("mem_reserved_bytes", INT, "CUDA caching allocator, at the end of the step; null on a CPU"),
        Column(
            "mem_peak_bytes",
            INT,
            "at most: CUDA caching allocator so far in the run; on a CPU live tensors in it",
        ),
        Column("rss_bytes", INT, "resident memory of the process, read when the part was written"),
    ),
)

SPANS = Table(
    "spans",
    True,
    "one stage or module call",
    (
        RUN_ID,
        RANK,
        Column("step", INT, "the step it belongs to; null for tokenize and detokenize"),
        PHASE,
        Column("span", INT, "unique in a trace"),
        Column("parent", INT, "the enclosing span; null at the top of a step"),
        Column("stage", WORD, "one of " + ", ".join(f"`{stage}`" for stage in STAGES)),
        Column("layer", SMALL, "execution order within the step, equal to the cache slot; null outside layers"),
        Column(
            "part",
            WORD,
            "null on a layer's own row; inside: `norm`, `attention`, `mlp`, `qkv`, …; `weights` that are brought for a "
            "call, their `release` after it, and `communication` between processes, in another part "
            "`attention.weights` and so on",
        ),
        Column("module", WORD, "qualified name; null where no module stands behind the row"),
        Column("class_name", WORD, "class of the module"),
        Column("call_index", SMALL, "which call of this module in the step, from 0"),
        Column("device", WORD, "where its work runs"),
        Column("start_ns", INT, "since the start of the trace"),
        Column("host_ns", INT, "host time from start to end, children included"),
        Column("device_ns", INT, "time between CUDA events at its start and end; null on a CPU"),
        _at_close("input_shape", SHAPE, "of the first tensor given"),
        _at_close("output_shape", SHAPE, "of the first tensor returned"),
        _at_close("dtype", WORD, "of the output"),
        _at_close("input_bytes", INT, "all activation tensors given"),
        _at_close("output_bytes", INT, "all activation tensors returned"),
        *TRAFFIC,
        *WORK,
        _at_close("op_count", INT, "operators that it launches, views excluded; null outside of modules"),
        Column(
            "mem_allocated_bytes",
            INT,
            "at its end, in an untimed pass: CUDA allocator, on a CPU live tensors",
        ),
        Column("mem_peak_bytes", INT, "at most while it ran, in the same pass"),
        Column("starved", FLAG, "the device had done all work marked before when this began; null on a CPU"),
    ),
)

KV = Table(
    "kv",
    True,
    "the cache of one layer after one step",
    (
        RUN_ID,
        RANK,
        STEP,
        Column("layer", SMALL, "cache slot"),
        Column("kind", WORD, "`full`, `sliding`, `static`, `latent`, `state`, `shared`, `quantized`, …"),
        Column("length", SMALL, "positions held"),
        Column("logical_bytes", INT, "of the positions filled"),
        Column("allocated_bytes", INT, "storage held for them"),
        Column("dtype", WORD, "of the stored tensors"),
        Column("device", WORD, "where they lie"),
    ),
)

TOKENS = Table(
    "tokens",
    True,
    "one token of one sequence",
    (
        RUN_ID,
        RANK,
        Column("call", SMALL, "as in `steps`"),
        Column("step", INT, "the step that processed it (prompt) or gave it (generated)"),
        Column("sequence", SMALL, "row of the returned batch"),
        Column("position", SMALL, "index in the returned sequence, padding included"),
        Column("token_id", SMALL, "in the tokenizer's vocabulary"),
        Column("text", TEXT, "as the tokenizer decodes it alone; null without a tokenizer"),
        Column("source", WORD, "`prompt` or `generated`"),
        Column("is_special", FLAG, "begin, end, padding and the like"),
        Column("kept", FLAG, "part of the text: the end token is, padding is not"),
        Column("arrival_ns", INT, "end of the step that gave it; null for the prompt"),
        Column("logprob", FLOAT, "natural log-probability by the model alone; null unless asked for"),
        Column("entropy", FLOAT, "of the model's distribution at this position, in nats; null unless asked for"),
        Column("top_ids", pa.list_(pa.int32()), "likeliest tokens, best first; null unless asked for"),
        Column("top_logprobs", pa.list_(pa.float32()), "their log-probabilities"),
    ),
)

MODULES = Table(
    "modules",
    False,
    "one module that holds parameters of its own",
    (
        Column("module", TEXT, "qualified name"),
        Column("class_name", WORD, "its class"),
        Column("stage", WORD, "as in `spans`"),
        Column("layer", SMALL, "index in the layer list; null outside"),
        Column("part", WORD, "as in `spans`"),
        Column("parameters", INT, "its own, logical count (packed weights unpacked)"),
        Column("weight_bytes", INT, "resident"),
        Column("dtype", WORD, "of its parameters"),
        Column("device", WORD, "where they lie"),
        Column("tied_to", TEXT, "the module that is counted for a shared parameter; null on that one"),
        Column("offloaded", FLAG, "kept elsewhere and brought in for each call"),
    ),
)

PRODUCTS = Table(
    "products",
    False,
    "one matrix product of one distinct step signature",
    (
        Column("signature", SMALL, "which distinct shape of step"),
        Column("steps", pa.list_(INT), "the steps of that shape that were counted directly"),
        Column("module", TEXT, "that was running"),
        Column("call_index", SMALL, "which call of it"),
        Column("order", SMALL, "in the module"),
        Column("m", INT, "rows of the left operand"),
        Column("n", INT, "columns of the right operand"),
        Column("k", INT, "the dimension summed over"),
        Column("batch", INT, "independent products"),
        Column("flops", INT, "2 · batch · m · n · k"),
        Column("operand_bytes", INT, "of both operands and the result"),
    ),
)

OPS = Table(
    "ops",
    True,
    "one operator of one place in one profiled step; only with `--ops`, from a pass of its own that no time counts",
    (
        RUN_ID,
        RANK,
        Column("step", INT, "the timed step that does the same work"),
        PHASE,
        Column("stage", WORD, "as in `spans`; null on the device's idle time and where no stage was open"),
        Column("layer", SMALL, "as in `spans`"),
        Column("part", WORD, "as in `spans` at the finest detail; also `rotary`, `cache_append` and `softmax`"),
        Column("module", WORD, "the innermost module that was running"),
        Column("op", WORD, "operator, such as `aten::mm`; `device idle` for the time without a kernel (CUDA)"),
        Column("input_shapes", WORD, "of its tensors"),
        Column("kernel", WORD, "the kernels that it launched; null on a CPU and where it launched none"),
        Column("count", INT, "how often it ran there with these shapes"),
        Column("host_ns", INT, "its own time on the host under the profiler, what it calls left out"),
        Column("device_ns", INT, "of its kernels; null on a CPU"),
    ),
)

TABLES = {table.name: table for table in (STEPS, SPANS, KV, TOKENS, MODULES, PRODUCTS, OPS)}

STATUSES = ("running", "complete", "interrupted", "failed", "oom")

MANIFEST_KEYS = {
    "format_version": "of this layout; a reader refuses newer ones by name",
    "run_id": "time and a random part; also in every row",
    "status": "one of " + ", ".join(f"`{status}`" for status in STATUSES),
    "error": "what ended a run that failed: type and message; null otherwise",
    "command": "as it was typed; null from Python",
    "created": "wall-clock time of the trace's start, ISO 8601 with offset",
    "wall_clock_ns": "wall clock at `start_ns` = 0, to line up ranks and logs",
    "rank": "of this process; the others' partitions are traces of their own in `rank-1`, `rank-2`, …",
    "world_size": "processes of the job; 1 where there is one alone",
    "job": "the same word in the processes of one job, null where there is one alone",
    "model": "id, revision, architecture, config, dtype, attention and experts implementation, "
    "parameters, weight bytes, layers, how the stages were found",
    "device": "type, name, threads or driver, memory",
    "versions": "lifetrace, python, torch, transformers, pyarrow, platform",
    "settings": "detail level, every, steps, repeats, warm-up",
    "generation": "settings given to `generate`",
    "prompt": "the prompts as text; null where only token ids were seen",
    "output": "the generated text of the last repeat, one a sequence; null without a tokenizer",
    "calls": "for each call: kind (`generate`, `forward`, or `modules` for stages called by hand), repeat, "
    "parent step, request start, prompt tokens and new tokens of each sequence, stop reason of each and of all, "
    "tokens drafted and accepted in assisted decoding, start, end, first and last token in ns",
    "ceilings": "of the device, each with its source; null where unknown",
    "overhead": "untraced and traced seconds of each repeat, ratio with its spread, tokens identical",
    "uncounted": "modules that ran an operator without formula: its names, the span that holds the module, and that "
    "span's share of the recorded time",
    "notes": "what the reader should know: what could not be seen, faults inside lifetrace",
    "memory": "of an untimed pass: the highest moment of live tensor bytes, its step (in the call) and place, the "
    "tensor that made it, the pieces that add up to it (kind, stage, part, bytes), and what was held after the run",
    "predictions": "of `plan`; null where none were made",
    "post_mortem": "of a run that ended for want of memory; null otherwise",
}

# The column that tells the rows of one rank apart.
UNIQUE = {"steps": "step", "spans": "span"}
# Columns that are never null: what readers order, join and add up by.
REQUIRED = {
    "steps": frozenset(("call", "step", "phase", "wall_ns")),
    "spans": frozenset(("span", "stage", "start_ns", "host_ns")),
    "kv": frozenset(("step", "layer", "kind")),
    "tokens": frozenset(("call", "sequence", "position", "token_id", "source", "kept")),
    "modules": frozenset(("module", "class_name", "parameters")),
    "products": frozenset(column.name for column in PRODUCTS.columns),
    "ops": frozenset(("step", "phase", "op", "count", "host_ns")),
}


def is_aside(part: str | None) -> bool:
    """Whether a part comes between the work of others, alone or in one of them: `attention.weights`, say."""
    return part is not None and part.rpartition(".")[2] in ASIDES


def brings_weights(part: str | None) -> bool:
    """Whether a part is the bringing of weights."""
    return part is not None and part.rpartition(".")[2] == WEIGHTS


def markdown() -> str:
    """The format as a page of the documentation."""
    lines = ["# The trace format", "", f"Version {FORMAT_VERSION}. Printed from `analysis/schema.py`.", ""]
    lines += [
        "A missing measurement is null. Times are nanoseconds on one monotonic clock. Columns marked †",
        "are null while the run goes and are completed when it ends.",
        "",
    ]
    for table in TABLES.values():
        where = f"{table.name}/part-….parquet" if table.in_parts else f"{table.name}.parquet"
        lines += [
            f"## {table.name}",
            "",
            f"`{where}`: {table.row}.",
            "",
            "| column | type | meaning |",
            "|---|---|---|",
        ]
        for column in table.columns:
            mark = " †" if column.completed_at_close else ""
            lines.append(f"| `{column.name}`{mark} | {_type_word(column.type)} | {column.meaning} |")
        lines.append("")
    lines += ["## run.json", "", "| key | meaning |", "|---|---|"]
    lines += [f"| `{key}` | {meaning} |" for key, meaning in MANIFEST_KEYS.items()]
    return "\n".join(lines) + "\n"


def _type_word(type_: pa.DataType) -> str:
    if pa.types.is_dictionary(type_):
        return str(type_.value_type)
    return f"list of {type_.value_type}" if pa.types.is_list(type_) else str(type_)
