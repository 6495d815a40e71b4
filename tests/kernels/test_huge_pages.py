"""Tests that large new outputs request huge pages, by the flags of their memory in /proc/self/smaps."""

import shutil
import subprocess
from pathlib import Path

import pytest
from other_process import printed

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps on this system")

MIB = 2**20
PROGRAM = """
import sys, torch, normops

def mapping(tensor):
    inside = False
    values = {}
    for line in open("/proc/self/smaps"):
        name, *words = line.split()
        if "-" in name and not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= tensor.data_ptr() + tensor.nbytes // 2 < end
        elif inside:
            values[name] = " ".join(words)
    return values

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

rows = int(sys.argv[1]) // 4096
x, w = torch.ones(rows, 1024), torch.ones(1024)
normops.rms_norm(x[:1], 1024, w)
before = resident()
y = normops.rms_norm(x, 1024, w)
grown = resident() - before
print("hg" in mapping(y)["VmFlags:"].split(), grown - y.nbytes)
dx = torch.ops.normops.rms_norm_backward(x, x, [1024], w, output_mask=[True, False, False])[0]
print("hg" in mapping(dx)["VmFlags:"].split())
"""


def run(size: int, setting: str = "") -> tuple[list[str], int]:
    forward, beyond, backward = printed(PROGRAM, str(size), NORMOPS_HUGE_PAGES=setting).split()
    return [forward, backward], int(beyond)


def test_large_outputs_request_huge_pages_without_extra_memory() -> None:
    advised, beyond = run(33 * MIB)
    assert advised == ["True", "True"]
    assert beyond < MIB  # half a huge page


ALLOCATOR = """
#include <errno.h>
#include <stddef.h>
extern "C" void* memalign(size_t, size_t);
extern "C" int posix_memalign(void** memory, size_t alignment, size_t size) {
  *memory = memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_memory_of_another_allocator_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "allocator.cpp", tmp_path / "allocator.so"
    source.write_text(ALLOCATOR)
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    assert run(33 * MIB)[0] == ["False", "False"]


@pytest.mark.parametrize(("size", "setting"), [(16 * MIB, ""), (33 * MIB, "0")], ids=["smaller", "turned off"])
def test_small_outputs_or_disabled_setting_request_no_huge_pages(size: int, setting: str) -> None:
    assert run(size, setting)[0] == ["False", "False"]
