"""What a launch of a Hopper kernel hands to CUDA, seen without a GPU: a stand-in for the driver reads it back."""

import json
import os
import subprocess
import sys
from pathlib import Path

# In a process of its own: this one may have told Triton to interpret, which Gluon does not take.
PROGRAM = """
import ctypes, json
from types import SimpleNamespace as Namespace
import torch
from flashtrain.attention.hopper import driver

SIGNATURE = {
    "q_desc": "tensordesc<bf16[1,1,64,64],layout>", "a_ptr": "*fp32", "n": "i32", "one": "constexpr", "big": "i64",
    "b_ptr": "*i32", "scale": "fp32", "WIDTH": "constexpr",
}
DECLARED = [".align 64 .b8 k_param_0[128]"] + [".u32 k"] * 4 + [".u64 k"] * 4
POINTER = ".u64 .ptr .global .align 1 k"
DECLARED += [POINTER, ".u32 k", ".u64 k", POINTER, ".f32 k", ".u64 k", ".u64 k"]
PTX = ".visible .entry k(\\n" + ",\\n".join("    .param " + line for line in DECLARED) + "\\n) { ld.param.b32 }"

class Cuda:
    def __init__(self):
        self.launches, self.maps, self.contexts = [], 0, []
        self.codes = [201]  # the first thread has no context yet
    def cuTensorMapEncodeTiled(self, to, dtype, rank, address, sizes, steps, boxes, ones, *rest):
        ctypes.memmove(to.value, address.value.to_bytes(8, "little"), 8)
        self.maps += 1
        self.encoded = [dtype, rank, list(sizes), list(steps), list(boxes), list(rest), to.value % 64]
        return 0
    def cuDevicePrimaryCtxRetain(self, context, device):
        self.contexts.append(device)
        return 0
    def cuCtxSetCurrent(self, context):
        return 0
    def cuLaunchKernel(self, function, x, y, z, threads, _y, _z, shared, stream, slots, extra):
        if self.codes:
            return self.codes.pop()
        read = lambda at, kind: kind.from_address(slots[at]).value
        kinds = [ctypes.c_uint64, *[ctypes.c_int32] * 4, *[ctypes.c_int64] * 4, ctypes.c_uint64, ctypes.c_int32,
                 ctypes.c_int64, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64]
        values = [read(at, kind) for at, kind in enumerate(kinds)]
        self.launches.append([function.value, x, y, z, threads, shared, stream.value, values])
        return 0

cuda = Cuda()
driver._cuda = lambda: cuda
driver.driver = Namespace(active=Namespace(get_current_stream=lambda device: 1000 + device))
metadata = Namespace(global_scratch_size=0, profile_scratch_size=0, num_ctas=1, num_warps=12, shared=77,
                     tensordesc_meta=[{"swizzle": 3, "block_size": [1, 1, 64, 64]}])
compiled = Namespace(src=Namespace(signature=SIGNATURE), metadata=metadata, asm={"ptx": PTX}, function=42, name="k")
q = [torch.zeros(2, 5, 30, 3, 64, dtype=torch.bfloat16)[:, :, :, 1] for _ in range(2)]
a, b = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
launcher = driver.Launcher(compiled, 9, [q[0], a, -7, 1, 2**40, b, 0.5, 64])
for at in (0, 1, 0):
    launcher(3, (q[at],), (a, b))
broken = Namespace(**{**vars(compiled), "asm": {"ptx": PTX.replace(".f32", ".f64")}})
try:
    driver.Launcher(broken, 9, [q[0], a, -7, 1, 2**40, b, 0.5, 64])
    refused = False
except driver.UnknownLayout:
    refused = True
print(json.dumps({"launches": cuda.launches, "maps": cuda.maps, "encoded": cuda.encoded, "contexts": cuda.contexts,
                  "addresses": [q[0].data_ptr(), q[1].data_ptr(), a.data_ptr(), b.data_ptr()], "refused": refused}))
"""


def test_every_parameter_is_where_the_kernel_reads_it() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    said = json.loads(result.stdout.splitlines()[-1])
    q0, q1, a, b = said["addresses"]
    assert len(said["launches"]) == 3
    for launch, q in zip(said["launches"], (q0, q1, q0), strict=True):
        *head, values = launch
        assert head == [42, 9, 1, 1, 12 * 32, 77, 1003]
        assert values == [q, *[0] * 8, a, -7, 2**40, b, 0.5, 0, 0]
    # A descriptor is encoded once for each address: innermost sizes first, strides in bytes.
    assert said["maps"] == 2
    assert said["encoded"] == [9, 4, [64, 30, 5, 2], [384, 384 * 30, 384 * 150], [64, 64, 1, 1], [0, 3, 2, 0], 0]
    assert said["contexts"] == [3]
    assert said["refused"]
