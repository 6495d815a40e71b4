"""Checks the operators' calls of the CUDA runtime, of torch's devices and of its allocator: cases of fake_gpus.py.

    python tests/gpu/fake_gpu_cases.py FOLDER NAME...

runs each case in a process that is forked before any call, and writes the case's exception to FOLDER/NAME.
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fake_gpus import CASES, Gpus, case
from torch import Tensor

from reference.cases import Case
from reference.operators import OPERATORS, Operator, Variant

ops = torch.ops.normops
EPS = 1e-5
WIDEST = 262144  # float32 columns that sixteen blocks of a cluster hold


def equal(actual: object, expected: object) -> None:
    assert actual == expected, f"expected {expected}, but got {actual}"


def forward(gpus: Gpus, device: int = 0, cols: int = 4096) -> list[str]:
    """Returns the calls that rms_norm makes."""
    x, w = gpus.tensor(8, cols, device=device), gpus.tensor(cols, device=device)
    gpus.calls()
    ops.rms_norm(x, [cols], w, EPS)
    return gpus.calls()


def arguments_of(gpus: Gpus, operator: Operator, device: int = 0, rows: int = 8, cols: int = 4096) -> dict[str, Any]:
    case = Variant(operator, operator.flags[0]).at(Case((rows, cols), torch.float32, weight_dtype=torch.float32))
    return {n: gpus.put(v, device) if isinstance(v, Tensor) else v for n, v in case.arguments().items()}


def every_operator(gpus: Gpus, device: int = 0, cols: int = 4096) -> None:
    for operator in OPERATORS:
        given = arguments_of(gpus, operator, device, cols=cols)
        operator.default(**given)
        if operator.inplace:
            operator.inplace(**given)


LAUNCH = "launch rms_norm_kernel<float, 4, Plain> on device {} stream {} cluster 1 shared 0 early"


@case
def only_the_current_device_is_asked(gpus: Gpus) -> None:
    first = forward(gpus)
    equal({line.split()[-1] for line in first if line.startswith("cudaDeviceGetAttribute")}, {"0"})
    equal(first[-1], "release 131072")
    equal(first[-2], LAUNCH.format(0, 0))
    equal(gpus.contexts(), [0])


@case
def the_second_call_launches_and_nothing_else(gpus: Gpus) -> None:
    forward(gpus)
    equal(forward(gpus), ["allocate 131072 on device 0 stream 0", LAUNCH.format(0, 0), "release 131072"])


@case
def each_device_is_asked_once_when_it_is_used(gpus: Gpus) -> None:
    gpus[1].multiprocessors = 8
    for _ in range(2):
        every_operator(gpus, 0)
    gpus.calls()
    every_operator(gpus, 1)
    asked = gpus.calls("cudaDeviceGetAttribute", "cudaFuncGetAttributes any_kernel")
    equal({line.split()[-1] for line in asked if "Device" in line}, {"1"})
    assert "cudaFuncGetAttributes any_kernel" in asked
    for _ in range(2):
        for device in (0, 1):
            every_operator(gpus, device)
    equal(gpus.calls("cuda", "load", "occupancy"), [])
    equal(gpus.contexts(), [0, 1])
    equal(gpus.current(), 0)


@case
def a_busy_device_is_in_nobodys_way(gpus: Gpus) -> None:
    gpus[1].is_busy = gpus[2].is_busy = 1
    every_operator(gpus)
    equal(gpus.contexts(), [0])


@case
def a_device_is_asked_again_if_it_was_busy(gpus: Gpus) -> None:
    x = gpus.tensor(8, 4096, device=1)
    gpus[1].is_busy = 1
    for _ in range(2):
        try:
            ops.rms_norm(x, [4096], None, EPS)
        except RuntimeError as error:
            equal(str(error).splitlines()[0], "normops: CUDA: CUDA-capable device(s) is/are busy or unavailable")
        else:
            raise AssertionError("expected an error")
        equal(gpus.current(), 0)
    gpus[1].is_busy = 0
    equal(forward(gpus, 1)[-2], LAUNCH.format(1, 0))


@case
def threads_that_begin_together_ask_once(gpus: Gpus) -> None:
    barrier = threading.Barrier(8)
    inputs = [gpus.tensor(8, 4096, device=device) for device in (0, 1)]
    weights = [gpus.tensor(4096, device=device) for device in (0, 1)]
    gpus.calls()

    def run(number: int) -> None:
        x, w = inputs[number % 2], weights[number % 2]
        barrier.wait()
        ops.rms_norm(x, [4096], w, EPS)
        ops.rms_norm_backward(x, x, [4096], w, EPS)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = gpus.calls()
    equal(len([line for line in calls if line.startswith("launch")]), 8 * 3)
    asked = [line for line in calls if line.startswith("cudaDeviceGetAttribute")]
    equal(len(asked), len(set(asked)))
    for kind in ("load", "cudaFunc", "occupancy"):
        of_kind = [line for line in calls if line.startswith(kind) and "any_kernel" not in line]
        equal(len(of_kind), 2 * len(set(of_kind)))  # on each of two devices


@case
def a_device_that_is_slow_to_answer_delays_no_other(gpus: Gpus) -> None:
    """Cached properties of a device and its kernels are read without a lock."""

    def run(device: int) -> None:
        x, w = inputs[device]
        ops.rms_norm(x, [4096], w, EPS)
        ops.rms_norm_backward(x, x, [4096], w, EPS)

    inputs = [(gpus.tensor(8, 4096, device=device), gpus.tensor(4096, device=device)) for device in (0, 1, 2)]
    run(0)
    forward(gpus, 2)
    for device in (1, 2):  # of device 2, only the backward's kernels are not cached
        gpus[device].is_slow = 1
        thread = threading.Thread(target=run, args=(device,))
        thread.start()
        while gpus[device].is_slow == 1:
            time.sleep(0.001)
        gpus.calls()
        run(0)
        equal(len(gpus.calls("launch")), 3)
        gpus[device].is_slow = 0
        thread.join()


@case
def a_backward_finds_its_launch_shape_once(gpus: Gpus) -> None:
    """The weight's gradient adds one lookup, for the kernel that sums it."""
    x, w = gpus.tensor(8, 4096), gpus.tensor(4096)
    counts = []
    for mask in ([True, True, False], [True, True, False], [True, False, False]):
        before = gpus.lookups_of_device()
        ops.rms_norm_backward(x, x, [4096], w, EPS, output_mask=mask)
        counts.append(gpus.lookups_of_device() - before)
    equal(counts[1] - counts[2], 1)


@case
def a_first_call_can_be_captured(gpus: Gpus) -> None:
    for cols in (128, 4096, WIDEST):
        x = gpus.tensor(8, cols)
        gpus.begin_capture()
        every_operator(gpus, cols=cols)
        ops.rms_norm_backward(x, x, [cols], None, EPS)
        assert gpus.end_capture()


@case
def a_first_call_leaves_the_capture_of_another_thread_alone(gpus: Gpus) -> None:
    gpus.begin_capture()
    thread = threading.Thread(target=every_operator, args=(gpus,))
    thread.start()
    thread.join()
    assert gpus.end_capture()
    assert gpus.calls("launch")


@case
def what_a_kernel_asks_for_it_asks_once(gpus: Gpus) -> None:
    forward(gpus, cols=WIDEST // 2)  # a cluster of 8 needs no attribute
    asked = [line for line in forward(gpus, cols=WIDEST) if line.startswith("cudaFuncSet")]
    equal(asked, ["cudaFuncSetAttribute rms_norm_kernel<float, 16, Plain> cluster"])
    every_operator(gpus, cols=WIDEST)
    backward = "cudaFuncSetAttribute rms_norm_backward_kernel<float, float, 16, Plain>"
    equal(
        [line for line in gpus.calls() if line.startswith(backward)],
        [f"{backward} cluster", f"{backward} shared 65536"],
    )
    every_operator(gpus, cols=WIDEST)
    equal(gpus.calls("cuda", "load", "occupancy"), [])


@case
def early_starts_are_for_sm_90_and_sm_100(gpus: Gpus) -> None:
    gpus[1].major = 10
    gpus[2].major = 12
    equal([forward(gpus, device)[-2].endswith(" early") for device in range(3)], [True, True, False])


@case
def an_early_start_needs_code_that_waits(gpus: Gpus) -> None:
    gpus[0].code = 80
    gpus[1].major = 8
    equal([forward(gpus, device)[-2].endswith(" early") for device in range(2)], [False, False])


@case
def early_starts_can_be_turned_off(gpus: Gpus) -> None:
    os.environ["NORMOPS_EARLY_START"] = "0"
    equal(forward(gpus)[-2].endswith(" early"), False)
    del os.environ["NORMOPS_EARLY_START"]
    equal(forward(gpus, 1)[-2].endswith(" early"), False)  # read once


@case
def clusters_are_as_large_as_the_device_runs(gpus: Gpus) -> None:
    gpus[0].largest_cluster = 8
    assert " cluster 8 " in forward(gpus, cols=WIDEST // 2)[-2]
    assert "any_width" in forward(gpus, cols=WIDEST)[-2]


@case
def the_stream_is_the_current_one_of_the_tensors_device(gpus: Gpus) -> None:
    gpus.set_stream(0, 5)
    gpus.set_stream(1, 9)
    for device, stream in ((1, 9), (0, 5)):
        gpus.calls()
        every_operator(gpus, device)
        places = {
            re.sub(r"^(launch|allocate) .*?on (device \d stream \d+).*", r"\2", line)
            for line in gpus.calls("launch", "allocate")
        }
        equal(places, {f"device {device} stream {stream}"})
        equal(gpus.current(), 0)


@case
def partial_sums_live_until_they_are_summed(gpus: Gpus) -> None:
    gpus[0].multiprocessors = 3
    for operator in (each for each in OPERATORS if "grad_weight" in each.outputs):
        mask = [name == "grad_weight" for name in operator.outputs]
        given = arguments_of(gpus, operator) | {"output_mask": mask}
        gpus.calls()
        result = operator.default(**given)
        calls = [re.sub(" on .*", "", line) for line in gpus.calls("allocate", "launch", "release")]
        equal(calls[:2], ["allocate 16384", "allocate 49152"])  # grad_weight; one row per block
        kernel = operator.name.removesuffix("_from_stats")  # given sums are arguments of the same kernel
        assert calls[2].startswith(f"launch {kernel}")
        equal(calls[3:], ["launch grad_weight_kernel<float, float>", "release 49152"])
        del result


@case
def copies_live_until_the_kernel_is_launched(gpus: Gpus) -> None:
    x, w = gpus.put(torch.ones(4096, 8).t()), gpus.put(torch.ones(4096, 2)[:, 0])
    gpus.calls()
    y = ops.rms_norm(x, [4096], w, EPS)
    kinds = [line.split()[0] for line in gpus.calls("copy", "launch", "release")]
    equal(kinds, ["copy", "copy", "launch", "release", "release"])
    out = gpus.put(torch.ones(4096, 8).t())
    gpus.calls()
    ops.rms_norm(y, [4096], None, EPS, out=out)
    equal([line.split()[0] for line in gpus.calls("copy", "launch", "release")][-3:], ["launch", "copy", "release"])


@case
def tensors_without_elements_ask_nothing(gpus: Gpus) -> None:
    """Calls only fill sums with zeros: over no rows if there are columns, and over no columns if there are rows."""
    for (rows, cols), operator in product(((0, 64), (3, 0)), OPERATORS):
        if not operator.takes(Case((rows, cols), torch.float32)):
            continue
        given = arguments_of(gpus, operator, rows=rows, cols=cols)
        gpus.calls()
        operator.default(**given)
        sums = ("grad_weight",) if cols else operator.sums
        equal(gpus.calls("cuda", "load", "launch", "zero"), ["zero"] * len({*sums} & {*operator.outputs}))


@case
def only_wanted_gradients_are_made(gpus: Gpus) -> None:
    x, w = gpus.tensor(8, 4096), gpus.tensor(4096)
    gpus.calls()
    ops.rms_norm_backward(x, x, [4096], w, EPS, output_mask=[True, False, False])
    equal(gpus.calls("allocate"), ["allocate 131072 on device 0 stream 0"])
    ops.rms_norm_backward(x, x, [4096], w, EPS, output_mask=[False, False, False])
    equal(gpus.calls(), [])


def main(folder: Path, names: list[str]) -> None:
    gpus = Gpus(folder)
    for name in names:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            error = "did not end"
            try:
                CASES[name](gpus)
                error = ""
            except BaseException:
                error = traceback.format_exc()
            finally:
                (folder / name).write_text(error)
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            (folder / name).write_text(f"ended by signal {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
