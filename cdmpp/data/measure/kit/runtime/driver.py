"""CUDA's driver API by ctypes: memory, modules, launches, events and graphs on the first GPU.

It needs the driver's ``libcuda.so.1`` only, no toolkit, CuPy or torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

_LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
#: Values of CUdevice_attribute and CUfunction_attribute.
_MAJOR, _MINOR, _L2_BYTES, _MAX_SHARED_OPTIN = 75, 76, 38, 97
_FUNCTION_MAX_DYNAMIC_SHARED = 8
_STREAM_NON_BLOCKING, _CAPTURE_RELAXED = 1, 2
_DEFAULT_SHARED_BYTES = 48 * 1024
_SCALARS: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


class CudaError(Exception):
    """An error of the driver. After most of them the process cannot use the GPU any more."""


class OutOfMemoryError(CudaError):
    """The GPU has too little free memory; the process can go on."""


class Launch:
    """A kernel with its launch geometry and arguments, ready to be launched many times."""

    def __init__(
        self, function: Any, grid: Sequence[int], block: Sequence[int], shared: int, values: Sequence[tuple[str, Any]]
    ) -> None:
        # The driver reads the values through pointers, so they must live as long as this object.
        self._values = [c_uint64(value) if kind == "pointer" else _SCALARS[kind](value) for kind, value in values]
        pointers = (c_void_p * len(self._values))()
        for i, value in enumerate(self._values):
            pointers[i] = ctypes.addressof(value)
        self.arguments = (function, *(c_uint(n) for n in (*grid, *block)), c_uint(shared))
        self.pointers = pointers


class Cuda:
    """The first GPU. All work goes to one stream.

    Attributes
    ----------
    name : str
        As the driver calls the GPU.
    capability : tuple of int
    driver : int
        CUDA version of the driver, such as 13000.
    l2_bytes : int
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaError(f"{_LIBRARY} cannot be loaded ({error}): this machine has no NVIDIA driver") from None
        self._call("cuInit", c_uint(0))
        device = c_int()
        self._call("cuDeviceGet", byref(device), c_int(0))
        self._device = device
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, c_int(256), device)
        self.name = name.value.decode()
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        self.driver = version.value
        self.capability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        self.l2_bytes = self._attribute(_L2_BYTES)
        self._max_shared = self._attribute(_MAX_SHARED_OPTIN)
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._stream = c_void_p()
        self._call("cuStreamCreate", byref(self._stream), c_uint(_STREAM_NON_BLOCKING))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(text))
            kind = OutOfMemoryError if code == _OUT_OF_MEMORY else CudaError
            raise kind(f"{name}: {text.value.decode() if text.value else code}")

    def _attribute(self, number: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(number), self._device)
        return value.value

    def allocate(self, size: int) -> int:
        """Return the address of new device memory."""
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", byref(pointer), c_size_t(max(1, size)))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Free device memory."""
        self._call("cuMemFree_v2", c_uint64(pointer))

    def upload(self, pointer: int, content: bytes) -> None:
        """Copy bytes to the device."""
        self._call("cuMemcpyHtoD_v2", c_uint64(pointer), content, c_size_t(len(content)))

    def download(self, pointer: int, size: int) -> bytes:
        """Copy bytes from the device."""
        buffer = ctypes.create_string_buffer(max(1, size))
        self._call("cuMemcpyDtoH_v2", buffer, c_uint64(pointer), c_size_t(size))
        return buffer.raw[:size]

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Set bytes, in the stream."""
        self._call("cuMemsetD8Async", c_uint64(pointer), ctypes.c_ubyte(byte), c_size_t(size), self._stream)

    def load(self, code: bytes) -> Any:
        """Load machine code."""
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), code)
        return module

    def unload(self, module: Any) -> None:
        """Unload machine code."""
        self._call("cuModuleUnload", module)

    def prepare(
        self,
        module: Any,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        shared: int,
        values: Sequence[tuple[str, Any]],
    ) -> Launch:
        """Return a launch of a kernel; ``values`` are (type, value), with "pointer" for memory."""
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), module, name.encode())
        if shared > _DEFAULT_SHARED_BYTES:
            if shared > self._max_shared:
                raise CudaError(f"{name} needs {shared} bytes of shared memory; the GPU has {self._max_shared}")
            self._call("cuFuncSetAttribute", function, c_int(_FUNCTION_MAX_DYNAMIC_SHARED), c_int(shared))
        return Launch(function, grid, block, shared, values)

    def launch(self, launch: Launch) -> None:
        """Launch a kernel in the stream."""
        self._call("cuLaunchKernel", *launch.arguments, self._stream, launch.pointers, None)

    def synchronize(self) -> None:
        """Wait for the stream; errors of kernels are raised here."""
        self._call("cuStreamSynchronize", self._stream)

    def event(self) -> Any:
        """Return a new event."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), c_uint(0))
        return event

    def record(self, event: Any) -> None:
        """Record an event in the stream."""
        self._call("cuEventRecord", event, self._stream)

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two events, after waiting for the second."""
        self._call("cuEventSynchronize", end)
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), start, end)
        return milliseconds.value * 1e-3

    def graph(self, launches: Sequence[Launch]) -> Any:
        """Return an executable graph of launches, one after the other."""
        graph, executable = c_void_p(), c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, c_int(_CAPTURE_RELAXED))
        for launch in launches:
            self.launch(launch)
        self._call("cuStreamEndCapture", self._stream, byref(graph))
        self._call("cuGraphInstantiateWithFlags", byref(executable), graph, ctypes.c_ulonglong(0))
        self._call("cuGraphDestroy", graph)
        return executable

    def launch_graph(self, graph: Any) -> None:
        """Launch a graph in the stream."""
        self._call("cuGraphLaunch", graph, self._stream)

    def free_graph(self, graph: Any) -> None:
        """Free a graph."""
        self._call("cuGraphExecDestroy", graph)
