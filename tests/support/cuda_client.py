"""A CUDA client for tests: `healthy` works until its input closes or the driver refuses; `faulty` crashes.

Prints one number a line: the driver's code of each round (0: all is well). As jobs of a service: `worker` works for
some seconds, and fails if the driver refuses; `culprit` crashes after a while, and ends well when it is started again.
"""

import ctypes
import os
import select
import sys
import time

CRASH = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry crash()
{
    .reg .b64 %rd1;
    .reg .b32 %r1;
    mov.u64 %rd1, 16;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""

cuda = ctypes.CDLL("libcuda.so.1")
device, context, place = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(2**20)) == 0


def healthy():
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        code = cuda.cuMemsetD32_v2(place, 7, ctypes.c_size_t(2**18)) or cuda.cuCtxSynchronize()
        print(code, flush=True)
        if code:
            return


def faulty():
    print(cuda.cuCtxSynchronize(), flush=True)
    sys.stdin.readline()
    crash()
    sys.stdin.read()


def worker():
    until = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until:
        code = cuda.cuMemsetD32_v2(place, 7, ctypes.c_size_t(2**18)) or cuda.cuCtxSynchronize()
        if code:
            sys.exit(f"the driver refused: {code}")
        time.sleep(0.02)


def culprit():
    if os.environ["CARPOOL_ATTEMPT"] == "1":
        time.sleep(float(sys.argv[2]))
        crash()
        sys.exit("crashed")


def crash():
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuModuleLoadData(ctypes.byref(module), CRASH) == 0
    assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"crash") == 0
    cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    print(cuda.cuCtxSynchronize(), flush=True)


globals()[sys.argv[1]]()
