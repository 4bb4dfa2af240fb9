"""The CUDA clock's logic on a simulated device: a stream of queued work on a clock that the test controls."""

from array import array

import pytest

from lifetrace.hooks.clocks import CudaTape, HostTape


class Stream:
    """Work runs in order; each piece takes its time once it was queued and the one before is done."""

    def __init__(self, device):
        self.device = device
        self.busy_until_ms = 0.0

    def launch(self, milliseconds):
        self.busy_until_ms = max(self.busy_until_ms, self.device.now_ms) + milliseconds


class SimulatedEvent:
    def __init__(self, device):
        self.device = device
        self.at_ms = None
        self.stream = None

    def record(self, stream):
        self.stream = stream
        self.at_ms = max(stream.busy_until_ms, self.device.now_ms)

    def query(self):
        return self.at_ms <= self.device.now_ms

    def synchronize(self):
        self.device.synchronizations += 1
        self.device.now_ms = max(self.device.now_ms, self.at_ms)

    def elapsed_time(self, later):
        assert self.stream is later.stream, "events of two devices were paired"
        return later.at_ms - self.at_ms


class SimulatedCuda:
    def __init__(self, *names):
        self.now_ms = 0.0
        self.synchronizations = 0
        self.events_made = 0
        self.streams = {name: Stream(self) for name in names}

    def event(self):
        self.events_made += 1
        return SimulatedEvent(self)

    def current_stream(self, name):
        return self.streams[name]


BEGIN, END, OTHER_BEGIN, OTHER_END, HOST = range(5)


def test_device_time_is_the_work_between_two_marks():
    cuda = SimulatedCuda("cuda:0")
    tape = CudaTape(["cuda:0"] * 4 + [None], cuda)
    tape.mark(BEGIN)
    cuda.streams["cuda:0"].launch(3.0)
    tape.mark(END)
    pending = tape.cut()
    assert pending.read(wait=False) is None  # the device has not got there: nothing is waited for
    assert cuda.synchronizations == 0
    cuda.now_ms = 3.0
    marks = pending.read(wait=False)
    assert marks.device_ns == [0, 3_000_000]
    assert cuda.synchronizations == 0


def test_waiting_synchronizes_once_for_a_step_and_never_for_a_mark():
    cuda = SimulatedCuda("cuda:0")
    tape = CudaTape(["cuda:0"] * 4 + [None], cuda)
    for _ in range(100):
        tape.mark(BEGIN)
        cuda.streams["cuda:0"].launch(1.0)
        tape.mark(END)
    marks = tape.cut().read(wait=True)
    assert cuda.synchronizations == 1
    assert marks.device_ns[-1] == 100_000_000


def test_events_of_two_devices_are_never_paired():
    cuda = SimulatedCuda("cuda:0", "cuda:1")
    tape = CudaTape(["cuda:0", "cuda:0", "cuda:1", "cuda:1", None], cuda)
    tape.mark(HOST)
    tape.mark(BEGIN)
    cuda.streams["cuda:0"].launch(2.0)
    tape.mark(END)
    tape.mark(OTHER_BEGIN)
    cuda.streams["cuda:1"].launch(5.0)
    tape.mark(OTHER_END)
    marks = tape.cut().read(wait=True)
    assert marks.device_ns == [None, 0, 2_000_000, 0, 5_000_000]
    assert marks.devices == [None, "cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_a_device_that_had_nothing_left_to_do_is_starved():
    """The host needs 2 ms to launch each 1 ms of work, then launches 5 ms at once."""
    cuda = SimulatedCuda("cuda:0")
    tape = CudaTape(["cuda:0"] * 4 + [None], cuda)
    for length_ms, host_ms in ((1.0, 2.0), (1.0, 2.0), (5.0, 0.5), (1.0, 0.5)):
        tape.mark(BEGIN)
        cuda.streams["cuda:0"].launch(length_ms)
        tape.mark(END)
        cuda.now_ms += host_ms
    tape.mark(HOST)
    marks = tape.cut().read(wait=True)
    began = [starved for code, starved in zip(marks.codes, marks.starved, strict=True) if code == BEGIN]
    assert began == [None, True, True, False]
    assert marks.starved[-1] is None
    tape.mark(BEGIN)
    assert tape.cut().read(wait=True).starved == [None]  # the step before says nothing of this one


def test_events_go_back_to_the_pool():
    cuda = SimulatedCuda("cuda:0")
    tape = CudaTape(["cuda:0"] * 4 + [None], cuda)
    for _ in range(10):
        tape.mark(BEGIN)
        tape.mark(END)
        tape.cut().read(wait=True)
    assert cuda.events_made == 2


@pytest.mark.parametrize("tape", [HostTape(), CudaTape(["cuda:0"] * 4 + [None], SimulatedCuda("cuda:0"))])
def test_a_step_inside_a_step_is_set_aside(tape):
    tape.mark(BEGIN)
    outer = tape.suspend()
    tape.mark(OTHER_BEGIN)
    tape.mark(OTHER_END)
    assert tape.cut().read(wait=True).codes == array("q", [OTHER_BEGIN, OTHER_END])
    tape.resume(outer)
    tape.mark(END)
    assert tape.cut().read(wait=True).codes == array("q", [BEGIN, END])


def test_host_times_rise():
    tape = HostTape()
    for _ in range(5):
        tape.mark(BEGIN)
    times = tape.cut().read(wait=False).times_ns
    assert list(times) == sorted(times)
