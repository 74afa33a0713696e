"""A tiny CUDA client, run as its own process, that tests whether MPS serves it and whether a memory limit holds.

`python -m carpool.gpu.probe BYTES` asks the driver for BYTES in one piece and then for a small piece, prints the
results as one line of JSON, and waits for its standard input to close, so that its parent can look for it among the MPS
clients. It calls the driver's library directly and needs no framework.
"""

import ctypes
import json
import sys

OUT_OF_MEMORY = 2
LITTLE = 16 * 2**20


def main() -> None:
    """Print the driver's codes for `much` and `little`: 0 for success, 2 for out of memory."""
    try:
        answer: dict[str, int | str] = {**_allocate(int(sys.argv[1]))}
    except (OSError, RuntimeError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    sys.stdin.read()


def _allocate(much: int) -> dict[str, int]:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _must(cuda.cuInit(0), "cuInit")
    _must(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _must(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    place = ctypes.c_void_p()
    return {
        name: int(cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size)))
        for name, size in (("much", much), ("little", LITTLE))
    }


def _must(code: int, call: str) -> None:
    if code != 0:
        raise RuntimeError(f"{call} gave {code}")


if __name__ == "__main__":
    main()
