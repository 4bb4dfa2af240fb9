"""Memory by stage on an allocator that the test plays: each module claims what it is told to."""

import torch

from lifetrace.analysis.trace import read_trace
from lifetrace.session import Options, Session


class Allocator:
    """Bytes allocated now, and their peak since it was last read."""

    def __init__(self):
        self.allocated = 1000
        self.peak = 1000

    def claim(self, count):
        self.allocated += count
        self.peak = max(self.peak, self.allocated)

    def read(self):
        reading = (self.allocated, self.peak)
        self.peak = self.allocated
        return reading


def test_each_stage_has_its_own_peak(model_r, prompt_12, tmp_path):
    allocator = Allocator()
    session = Session(model_r, tmp_path / "t", Options())

    def generate():
        return model_r.generate(prompt_12, max_new_tokens=3, do_sample=False)

    session.start()
    timed = generate()
    session.detach()
    mlp = model_r.model.layers[1].mlp
    handles = [
        mlp.register_forward_pre_hook(lambda *_: allocator.claim(500)),
        mlp.register_forward_hook(lambda *_: allocator.claim(-490)),
    ]
    outputs = []
    session.measure_memory(lambda: outputs.append(generate()), allocator.read)
    for handle in handles:
        handle.remove()
    session.finish("complete")

    assert torch.equal(outputs[0], timed)
    spans = read_trace(tmp_path / "t").spans
    mlps = spans[(spans.layer == 1) & (spans.part == "mlp")].sort_values("step")
    # each call claims 500 and gives 490 back: 10 more stay allocated at every step
    assert mlps.mem_peak_bytes.tolist() == [1500, 1510, 1520]
    assert mlps.mem_allocated_bytes.tolist() == [1010, 1020, 1030]
    layer = spans[(spans.layer == 1) & spans.part.isna()].sort_values("step")
    assert layer.mem_peak_bytes.tolist() == [1500, 1510, 1520]
    before = spans[(spans.layer == 0) & spans.part.isna()].sort_values("step")
    assert before.mem_peak_bytes.tolist() == [1000, 1010, 1020]


def test_without_the_pass_memory_is_null(model_r, prompt_12, tmp_path):
    session = Session(model_r, tmp_path / "t", Options())
    session.start()
    model_r.generate(prompt_12, max_new_tokens=2)
    session.finish("complete")
    assert read_trace(tmp_path / "t").spans.mem_peak_bytes.isna().all()
