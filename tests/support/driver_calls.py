"""What a program asks of the CUDA driver: every call is counted, by CUPTI's callbacks.

JAX's profiler does not run, so that XLA works as always: while it records, XLA replays no graphs.
"""

import collections
import contextlib
import ctypes
import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from typing import Any

_DRIVER_API = 1
_ENTER = 0
_POLL = ("cuStreamQuery", "cuCtxSetCurrent", "cuStreamIsCapturing")
"""Calls of one poll."""
_LAUNCH = re.compile(r"cuLaunch(Cooperative)?Kernel")
_MOVE = re.compile(r"cuMem(cpy|set)")
# Copies, and fills by bytes: all take their number of bytes as the third of eight-byte fields.
_COUNTED = re.compile(r"cuMem(cpy(|DtoD|DtoH|HtoD)|setD8)(Async)?")


class _CallbackData(ctypes.Structure):
    """The first fields of CUpti_CallbackData."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("function_name", ctypes.c_char_p),
        ("function_params", ctypes.c_void_p),
        ("return_value", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
    )


_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData)
)


_callbacks: list[Any] = []
"""All there ever were: a thread may still be on its way into one that is no longer subscribed."""


class DriverCalls(collections.Counter[str]):
    """Number of calls by the function's name, without its version's suffix."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        """Names of the kernels launched singly or captured, in order; mangled."""
        self.moves: list[tuple[str, int | None]] = []
        """Copies and fills, in order: the function and its bytes, None where it is not read."""

    def __str__(self) -> str:
        kernels = dict(collections.Counter(self.kernels))
        return f"calls {dict(self)}; kernels {kernels}; copies and fills {self.moves}"

    @property
    def launches(self) -> int:
        """Kernels launched singly, or captured into a graph."""
        return sum(count for name, count in self.items() if _LAUNCH.match(name))

    @property
    def ours(self) -> int:
        """Those of the launches whose kernel is one of jax_hpc's."""
        return sum("jax_hpc" in name for name in self.kernels)

    @property
    def graphs(self) -> int:
        """Graphs launched."""
        return self["cuGraphLaunch"]

    @property
    def polls(self) -> int:
        """Polls of a stream: the runtime's come with time and not with work."""
        return self["cuStreamQuery"]

    def without_polls(self) -> collections.Counter[str]:
        polls = dict.fromkeys(_POLL, self.polls)
        return +collections.Counter({name: n - polls.get(name, 0) for name, n in self.items()})


@contextlib.contextmanager
def driver_calls() -> Iterator[DriverCalls]:
    """Count the driver calls of the whole process while the context is open; read them after."""
    calls, names = DriverCalls(), list[str]()

    def note(_user: object, _domain: int, _id: int, data: Any) -> None:
        # On whichever thread makes the call: nothing but appending is safe here.
        fields = data.contents
        if fields.site != _ENTER or fields.function_name is None:
            return
        name = re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", fields.function_name.decode())
        names.append(name)
        if _LAUNCH.match(name) and fields.symbol_name is not None:
            calls.kernels.append(fields.symbol_name.decode())
        if _MOVE.match(name):
            calls.moves.append((name, _bytes(name, fields.function_params)))

    cupti, subscriber = _library(), ctypes.c_void_p()
    _callbacks.append(_CALLBACK(note))
    _check(cupti, cupti.cuptiSubscribe(ctypes.byref(subscriber), _callbacks[-1], None))
    try:
        _check(cupti, cupti.cuptiEnableDomain(ctypes.c_uint32(1), subscriber, _DRIVER_API))
        yield calls
    finally:
        _check(cupti, cupti.cuptiUnsubscribe(subscriber))
        calls.update(names)


def _bytes(name: str, params: int) -> int | None:
    return (ctypes.c_uint64 * 3).from_address(params)[2] if _COUNTED.fullmatch(name) else None


def _check(cupti: ctypes.CDLL, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        cupti.cuptiGetResultString(status, ctypes.byref(text))
        raise RuntimeError(f"CUPTI: {(text.value or b'').decode()} ({status})")


def _library() -> ctypes.CDLL:
    """The CUPTI that JAX uses: loaded already, of its wheel, or of the toolkit."""
    with open("/proc/self/maps") as maps:
        places = [line.split()[-1] for line in maps if "libcupti.so" in line]
    spec = importlib.util.find_spec("nvidia")
    for package in spec.submodule_search_locations or () if spec else ():
        places += sorted(glob.glob(os.path.join(package, "*", "lib", "libcupti.so*")))
    places += sorted(glob.glob("/usr/local/cuda*/lib*/libcupti.so*"))
    assert places, "no libcupti.so: pip install nvidia-cuda-cupti"
    return ctypes.CDLL(places[0])
