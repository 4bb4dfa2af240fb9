"""Stand-in classes: whatever a module's class, its program goes on as ever and the module comes out as it went in."""

import copy
from array import array

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import CompileConfig

import lifetrace
from lifetrace.hooks.calls import CallMarks, MarkedCall
from lifetrace.hooks.clocks import HostTape

REGISTRY = {}


class Registering(nn.Linear):
    """Keeps its subclasses by name."""

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        REGISTRY[cls.__name__] = cls


class Registered(Registering):
    pass


class Final(nn.Linear):
    """Has no subclasses."""

    def __init_subclass__(cls):
        raise TypeError("no subclass of this")


class Demanding(type):
    """A metaclass that needs to be given more than a name, bases and a body."""

    def __new__(cls, name, bases, body, *, needed):
        return super().__new__(cls, name, bases, body)

    def __init__(cls, name, bases, body, *, needed):
        super().__init__(name, bases, body)


class Demanded(nn.Linear, metaclass=Demanding, needed=1):
    pass


class Slotted(nn.Linear):
    __slots__ = ("more",)


class Copying(nn.Linear):
    """Copies itself by its class."""

    def __deepcopy__(self, memo):
        new = self.__class__.__new__(self.__class__)
        new.__dict__.update(self.__dict__)
        return new


def marks_of(module, tape=None):
    tape = tape if tape is not None else HostTape()
    return CallMarks([MarkedCall(module, 12)], tape), tape


def codes(tape):
    return tape.cut().read(wait=True).codes


@pytest.mark.parametrize("kind", [nn.Linear, Registered, Final, Demanded, Slotted, Copying])
def test_a_module_of_any_class_is_marked_and_is_of_it_again(kind):
    module = kind(2, 2)
    marks, tape = marks_of(module)
    marks.on()
    assert isinstance(module, kind)
    module(torch.ones(2))
    marks.close()
    assert codes(tape) == array("q", [12, 13])
    assert type(module) is kind


def test_a_class_is_not_told_of_what_stands_in_for_it():
    marks, _ = marks_of(Registered(2, 2))
    marks.on()
    assert REGISTRY["Registered"] is Registered


@pytest.mark.parametrize("make", [lambda module: type(module)(2, 2), copy.deepcopy, copy.copy])
def test_what_is_made_of_a_marked_module_runs_unmarked(make):
    module = Copying(2, 2)
    marks, tape = marks_of(module)
    marks.on()
    assert make(module)(torch.ones(2)).shape == (2,)
    assert not codes(tape)


def test_a_class_that_changed_meanwhile_stays_and_is_marked_no_more():
    module = nn.Linear(2, 2)
    marks, tape = marks_of(module)
    marks.on()
    parametrize.register_parametrization(module, "weight", nn.Identity())
    marks.close()
    assert parametrize.is_parametrized(module)
    assert module(torch.ones(2)).shape == (2,)
    assert not codes(tape)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_traces_of_one_module_may_end_in_any_order(order):
    module = nn.Linear(2, 2)
    pairs = [marks_of(module), marks_of(module)]
    for marks, _ in pairs:
        marks.on()
    module(torch.ones(2))
    assert [list(codes(tape)) for _, tape in pairs] == [[12, 13], [12, 13]]
    for number in order:
        pairs[number][0].close()
    module(torch.ones(2))
    assert type(module) is nn.Linear
    assert [list(codes(tape)) for _, tape in pairs] == [[], []]


def test_what_generate_compiles_by_itself_stays_in_one_piece(model_r, prompt_12, tmp_path):
    """With `fullgraph` a mark inside of the graph would be an error, in the program."""
    torch._dynamo.reset()
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": 4, "do_sample": False}
    plain = model_r.generate(prompt_12, **options)
    with lifetrace.trace(model_r, out=tmp_path / "t") as trace:
        traced = model_r.generate(prompt_12, **options)
    assert traced.equal(plain)
    assert list(trace.steps.token_count) == [1, 1, 1, 1]
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_module_that_is_compiled_while_it_is_marked_runs_what_was_compiled():
    module = nn.Linear(2, 2)
    marks, tape = marks_of(module)
    marks.on()
    module(torch.zeros(1, 2))
    module._compiled_call_impl = lambda given: "compiled"
    assert module(torch.zeros(1, 2)) == "compiled"
    assert codes(tape).tolist() == [12, 13, 12, 13]


def test_what_a_program_puts_in_place_of_every_call_is_called(monkeypatch):
    module, counted = nn.Linear(2, 2), []
    own = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *given: [counted.append(1), own(self, *given)][1])
    marks, tape = marks_of(module)
    marks.on()
    module(torch.ones(2))
    assert counted == [1]
    assert codes(tape).tolist() == [12, 13]
