"""Count what a compile generated: kernels, the loop nests in them, and the launches.

Inductor hands out the wrapper it wrote for each graph; the kernels are the definitions in it
(``async_compile.cpp_pybinding``, ``async_compile.triton``) and the launches the calls of them. One
C++ kernel may hold several loop nests after one another, each a pass over memory of its own; a
Triton kernel counts as one nest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFINITION = re.compile(r"^(\w+) = async_compile\.(\w+)\(.*?'''(.*?)'''", re.MULTILINE | re.DOTALL)
EXTERN = re.compile(r"extern_kernels\.(\w+)\(|torch\.ops\.[\w.]+\(|aten\.[\w.]+\(")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one compile generated, over all of its graphs."""

    graphs: int
    kernels: int  # generated kernels
    loops: int  # outermost loops in them: what the scheduler calls a kernel
    launches: int  # calls of generated kernels in one run of each graph
    extern: int  # library calls, such as convolutions


def count(sources: list[str]) -> Counts:
    r"""Count over the wrappers that inductor wrote.

    >>> count(["k0 = async_compile.triton('k0', '''x''')\nk0.run(a, stream=s)\n"]).launches
    1
    """
    kernels = loops = launches = extern = 0
    for source in sources:
        found = DEFINITION.findall(source)
        kernels += len(found)
        loops += sum(len(loop_nests(body)) if "cpp" in kind else 1 for _, kind, body in found)
        names = "|".join(re.escape(name) for name, _, _ in found)
        launches += len(re.findall(rf"\b(?:{names})(?:\.run)?\(", source)) if found else 0
        extern += len(EXTERN.findall(DEFINITION.sub("", source)))
    return Counts(len(sources), kernels, loops, launches, extern)


def loop_nests(body: str) -> list[str]:
    """The text of each outermost ``for`` of a C++ kernel, in order."""
    found: list[str] = []
    depth = opened_at = 0
    inside = False
    for line in body.splitlines():
        if not inside and line.lstrip().startswith("for("):
            inside, opened_at = True, depth
            found.append("")
        depth += line.count("{") - line.count("}")
        if inside:
            found[-1] += line + "\n"
            inside = depth > opened_at or "{" not in found[-1]
    return found
