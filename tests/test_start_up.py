"""What only reads traces starts fast because it loads no torch."""

import subprocess
import sys

import pytest
from stored_traces import one_call

NO_TORCH = """
import sys
{code}
loaded = {{"torch", "transformers", "accelerate"}} & set(sys.modules)
assert not loaded, loaded
"""


def run(code):
    subprocess.run([sys.executable, "-c", NO_TORCH.format(code=code)], check=True, timeout=60)


@pytest.mark.parametrize(
    "code",
    [
        "import lifetrace",
        "import lifetrace.analysis",
        "import lifetrace; lifetrace.read_trace; lifetrace.LifetraceError",
        "from lifetrace.cli import main; main(['--help'], standalone_mode=False)",
        "from lifetrace.cli import main; main(['run', '--help'], standalone_mode=False)",
    ],
)
def test_no_torch(code):
    run(code)


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["report"]])
def test_commands_that_read_load_no_torch(tmp_path, command):
    folder = one_call(tmp_path / "t")
    run(f"from lifetrace.cli import main; main({[*command, str(folder)]!r}, standalone_mode=False)")


def test_public_names_are_there():
    import lifetrace

    for name in lifetrace.__all__:
        assert getattr(lifetrace, name) is not None
    assert set(lifetrace.__all__) <= set(dir(lifetrace))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lifetrace.nothing  # noqa: B018 - to ask for it is all that is done
