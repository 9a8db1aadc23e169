"""Count what a compile generated: kernels, their loop nests, and the launches that run them once.

Inductor hands out the wrapper it wrote for each graph; the kernels are the definitions in it
(``async_compile.cpp_pybinding``, ``async_compile.triton``) and the launches the calls of them. On
the CPU one C++ function may hold several kernels of the scheduler, each a loop nest of its own; a
Triton kernel is one loop nest over its grid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\(", re.MULTILINE)
CPP_LOOP = re.compile(r"\bfor\(int64_t x0=")  # inductor's name for the outermost index
EXTERN = re.compile(r"extern_kernels\.(\w+)\(|torch\.ops\.[\w.]+\(|aten\.[\w.]+\(")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one compile generated, over all of its graphs."""

    graphs: int
    kernels: int  # generated kernels
    loops: int  # loop nests in them: what stock's scheduler calls a kernel
    launches: int  # calls of generated kernels in one run of each graph
    extern: int  # library calls, such as convolutions


def count(sources: list[str]) -> Counts:
    r"""Count over the wrappers that inductor wrote.

    >>> count(["k0 = async_compile.triton('k0', x)\nk0.run(a, stream=s)\n"]).launches
    1
    """
    kernels = loops = launches = extern = 0
    for source in sources:
        names = DEFINITION.findall(source)
        kernels += len(names)
        loops += len(CPP_LOOP.findall(source)) or len(names)
        calls = rf"\b(?:{'|'.join(map(re.escape, names))})(?:\.run)?\("
        launches += len(re.findall(calls, source)) if names else 0
        body = source.split("def call(", 1)[-1]
        extern += len(EXTERN.findall(body))
    return Counts(len(sources), kernels, loops, launches, extern)
