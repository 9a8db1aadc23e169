"""Show what the benchmarks of a part found: ``python benchmarks/report.py dcp``.

Reads ``results/<part>_*.json`` and writes a table, ``results/<part>-<machine>.md``, and the ratios
as bars, ``.png``, for each machine. Times are of one day; the ratios are what lasts.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import RESULTS

Row = dict[str, Any]


def results_of(part: str) -> dict[str, list[dict[str, Any]]]:
    """Machine -> what each benchmark of ``part`` has written there."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(RESULTS.glob(f"{part}_*.json")):
        result = json.loads(path.read_text())
        found[result["machine"]["name"]].append(result)
    return dict(found)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown; a ratio above 1 means that we are better."""
    versions = sorted({result["versions"]["torch"] for result in results})
    cpus = results[0]["machine"]["cpus"]
    lines = [
        f"torch {', '.join(versions)}, {cpus} CPUs. Medians; ratio is the other over ours.",
        "",
        "| case | ours | beside | its | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in (row for result in results for row in result["rows"]):
        ours, name = f"{row['ours']:.4g} {row['unit']}", row["rival_name"]
        rival, ratio = row.get("absent", ""), ""
        if row["ratio"] is not None:
            rival, ratio = f"{row['rival']:.4g}", f"{row['ratio']:.2f}"
        lines.append(f"| {row['case']} | {ours} | {name} | {rival} | {ratio} |")
    return "\n".join(lines) + "\n"


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Ratios as bars on a logarithmic axis; the line is where both are equal."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for result in results for row in result["rows"] if row["ratio"] is not None][::-1]
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(rows) + 1), layout="constrained")
    names = [f"{row['case']}, beside {row['rival_name']}" for row in rows]
    colors = ["tab:green" if row["ratio"] >= 1 else "tab:orange" for row in rows]
    axes.barh(range(len(rows)), [row["ratio"] for row in rows], color=colors)
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ratio: above 1 we are better")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Write tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", help="dcp, elastic, inductor...")
    part = parser.parse_args().part
    for machine, results in results_of(part).items():
        path = RESULTS / f"{part}-{machine}.md"
        path.write_text(table(results))
        draw(results, path.with_suffix(".png"))
        print(path)


if __name__ == "__main__":
    main()
