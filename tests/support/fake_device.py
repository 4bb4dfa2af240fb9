"""A device with given ceilings, and traces whose counts are round numbers, so that verdicts are arithmetic."""

from stored_traces import MS, write_trace

from lifetrace.analysis.ceilings import (
    MEASURED,
    BandwidthPoint,
    Ceilings,
    DeviceKey,
    Figure,
    MatmulPoint,
    RowPoint,
)

GIGA = 1e9


def exactly(value):
    return Figure(value, value, value)


def fake_ceilings(
    peak=1000 * GIGA, bandwidth=100 * GIGA, launch_ns=1000.0, matvec=50 * GIGA, copy=200 * GIGA, type_="cpu"
):
    """1,000 FLOP a ns, 100 B a ns: the ridge is 10 FLOP a byte. Matrix–vector products read 50 B a ns."""
    return Ceilings(
        source=MEASURED,
        device=DeviceKey(type_, "fake", None, 1, "0"),
        matmul={"float32": (MatmulPoint((64, 64, 64), exactly(peak)),)},
        read=(BandwidthPoint(1, exactly(bandwidth)),),
        copy=(BandwidthPoint(1, exactly(copy)),),
        matvec={"float32": (BandwidthPoint(1, exactly(matvec)),)},
        linear={"float32": (RowPoint(1, exactly(25 * GIGA)), RowPoint(16, exactly(400 * GIGA)))},
        launch_ns=exactly(launch_ns) if launch_ns is not None else None,
    )


WEIGHTS = 400_000_000  # bytes: 4 ms at 100 GB/s
KV_POSITION = 1_000_000


def step(number, phase, wall_ms, flops, kv_len, q_len=1, start_ms=0.0, batch=1, **other):
    """A step that reads all weights and its cache of `kv_len` positions and writes `q_len` new ones."""
    return {
        "call": 0, "repeat": 0, "step": number, "phase": phase, "role": "main", "warmup": False, "discarded": False,
        "batch": batch, "q_len": q_len, "tokens_processed": batch * q_len, "tokens_real": batch * q_len,
        "kv_len_before": kv_len, "kv_len_after": kv_len + q_len, "start_ns": int(start_ms * MS),
        "wall_ns": int(wall_ms * MS), "flops": flops, "flops_dense": flops, "op_count": 500,
        "weight_bytes": WEIGHTS, "kv_read_bytes": batch * kv_len * KV_POSITION,
        "kv_write_bytes": batch * q_len * KV_POSITION, "kv_copy_bytes": 2 * batch * kv_len * KV_POSITION,
        "activation_bytes": 0, "kv_bytes": batch * (kv_len + q_len) * KV_POSITION, "token_count": batch,
    } | other  # fmt: skip


def layer_span(number, of_step, phase, wall_ms, flops, **other):
    """The one layer of a step, which does all its work."""
    return {
        "step": of_step["step"], "phase": phase, "span": number, "parent": None, "stage": "layer", "layer": 0,
        "start_ns": of_step["start_ns"], "host_ns": int(wall_ms * MS), "dtype": "float32", "flops": flops,
        "flops_dense": flops, "op_count": 500, "weight_bytes": WEIGHTS, "input_bytes": 0, "output_bytes": 0,
        "kv_read_bytes": of_step["kv_read_bytes"], "kv_write_bytes": of_step["kv_write_bytes"],
        "kv_copy_bytes": of_step["kv_copy_bytes"],
    } | other  # fmt: skip


PREFILL_FLOPS = 20_000_000_000  # 20 ms at 1,000 GFLOP/s
DECODE_FLOPS = 200_000_000  # 0.2 ms


def prefill_and_decode(path, decode_steps=4, ceilings=None, **manifest):
    """A prefill of 100 tokens in 25 ms, whose compute takes 20 and whose 500 MB take 5; decode steps after it.

    Decode step i has 100 + i positions before it and takes 10 + 0.02 · i ms; its bytes are
    400 MB + (101 + i) MB: 5.01 + 0.01 · i ms.
    """
    steps = [step(0, "prefill", 25, PREFILL_FLOPS, 0, 100)]
    spans = [layer_span(0, steps[0], "prefill", 25, PREFILL_FLOPS)]
    for i in range(decode_steps):
        wall = 10 + 0.02 * i
        steps.append(step(1 + i, "decode", wall, DECODE_FLOPS, 100 + i, start_ms=25 + 11 * i))
        spans.append(layer_span(1 + i, steps[-1], "decode", wall, DECODE_FLOPS))
    facts = {
        "model": {"id": "m", "dtype": "float32", "weight_bytes": WEIGHTS, "config": {}},
        "device": {"type": "cpu", "name": "fake", "threads": 1},
        "ceilings": ceilings.to_json() if ceilings is not None else None,
    }
    return write_trace(path, {"steps": steps, "spans": spans}, **(facts | manifest))
