"""What ``import dlattn`` does, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import dlattn as cudnn

PUBLIC = """
    data_type heur_mode build_plan_policy diagonal_alignment attention_implementation
    tensor_reordering reduction_mode scalar_type reshape_mode numerical_note behavior_note knob
    knob_type pygraph tensor Graph graph jit graph_cache create_handle destroy_handle set_stream
    get_stream
    backend_version backend_version_string get_last_error_string create_kernel_cache
    create_device_properties cudnnGraphNotSupportedError
""".split()


def test_no_framework_is_imported():
    """``import dlattn`` loads neither CuPy, torch nor JAX, whichever are installed."""
    program = (
        "import sys, dlattn\n"
        "print([name for name in ('cupy', 'torch', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_names_of_cudnn_are_there():
    """Every name of cuDNN's Python module that attention programs use is in dlattn."""
    assert [name for name in PUBLIC if not hasattr(cudnn, name)] == []


def test_versions():
    """Programs that ask for cuDNN 9.20 and later go on, and the two spellings agree."""
    assert cudnn.backend_version() >= 92000
    major, minor, patch = map(int, cudnn.backend_version_string().split("."))
    assert cudnn.backend_version() == major * 10000 + minor * 100 + patch
    assert isinstance(cudnn.__version__, str) and cudnn.__file__


def test_enumerations_behave_as_cudnn_does():
    """Members reach their siblings, print with their class, and are hashable."""
    member = cudnn.diagonal_alignment.TOP_LEFT
    assert member.BOTTOM_RIGHT is cudnn.diagonal_alignment.BOTTOM_RIGHT
    assert str(member) == "diagonal_alignment.TOP_LEFT"
    assert len({*cudnn.heur_mode}) == 5


def test_not_supported_error_is_no_runtime_error():
    """Callers that catch RuntimeError around a graph do not swallow "not supported"."""
    assert not issubclass(cudnn.cudnnGraphNotSupportedError, (RuntimeError, ValueError))


def test_functions_are_imported_when_they_are_asked_for():
    """Graphs start without the functions, which are there under every usual import."""
    program = """
import sys, dlattn
assert not [name for name in sys.modules if name.startswith(("dlattn.flash", "dlattn.calls"))]
assert {"flash", "attention", "merge_states", "pygraph"} <= {*dir(dlattn)}
from dlattn import attention, merge_states
assert callable(attention) and attention is dlattn.attention
assert callable(dlattn.merge_states) and callable(dlattn.flash.mha_fwd)
import dlattn.flash
try:
    dlattn.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "module 'dlattn' has no attribute 'nothing'", done.stderr
