"""One self-contained HTML page for a search: the answer first, then the pictures behind it."""

from __future__ import annotations

import io
from html import escape
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.provision.designs import Budget, total
from splitwise.provision.probe import Probe, run_probe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from splitwise.provision.probe import Problem
    from splitwise.provision.search import Answer

UNITS = {Budget.COST: "$/h", Budget.POWER: "power units", Budget.MACHINES: "machines"}
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%}
td,th{padding:.35em .7em;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}.best{background:#fff6d6;font-weight:600}.missed{color:#b03a48}
.advice{font-size:1.25em;background:#eef5fb;padding:.7em 1em;border-radius:6px}
svg{max-width:100%;height:auto}"""


def figures(
    problem: Problem, answers: Sequence[Answer], by: Budget, *, throughput: bool
) -> dict[str, Figure]:
    """Return all pictures by file name. Raises ConfigError without matplotlib."""
    try:
        from splitwise.report import figures as draw
    except ModuleNotFoundError as error:
        raise ConfigError(f"pictures need {error.name}: pip install 'splitwise[sim]'") from None

    best = best_of(problem, answers, by, throughput=throughput)
    title = f"Most throughput of each design within the same {by.value}" if throughput else (
        f"Least {by.value} of each design at {answers[0].rate:g} requests/s"
    )  # fmt: skip
    values = [
        None if a.size is None
        else a.rate if throughput
        else total(a.design, a.size, problem.catalog, by)
        for a in answers
    ]  # fmt: skip
    labels = [f"{a.design.name}  {size_name(a)}" for a in answers]
    drawn = {"designs": draw.comparison(labels, values, title, "requests/s" if throughput else UNITS[by])}
    for answer in answers:
        if answer.design.token is not None and answer.map:
            drawn[f"map-{answer.design.name}"] = draw.design_map(answer)
    result = run_probe(problem, Probe(best.design, best.tried, best.rate), problem.load.seeds[0])
    name = f"{best.design.name} {size_name(best)} at {best.rate:g} requests/s"
    drawn["slowdowns"] = draw.slowdowns(result, problem, name)
    drawn["batches"] = draw.occupancy(result, name)
    drawn["requests"] = draw.gantt(result, name)
    return drawn


def best_of(problem: Problem, answers: Sequence[Answer], by: Budget, *, throughput: bool) -> Answer:
    """Return the best answer, or the nearest miss when nothing meets the SLOs."""
    able = [answer for answer in answers if answer.size is not None]
    if not able:
        return max(answers, key=lambda a: a.margin)
    if throughput:
        return max(able, key=lambda a: a.rate)
    return min(able, key=lambda a: total(a.design, a.tried, problem.catalog, by))


def size_name(answer: Answer) -> str:
    """Return `P+T`, or one number for a cluster that is not split."""
    size = answer.tried
    return f"{size.prompt}" if answer.design.token is None else f"{size.prompt}+{size.token}"


def write_report(
    path: Path, problem: Problem, answers: Sequence[Answer], by: Budget, advice: str, *, throughput: bool
) -> list[Path]:
    """Write the page, and every picture as PNG and SVG into a folder beside it; returns the files."""
    folder = path.with_suffix("")
    folder = folder.with_name(folder.name + "-pictures")
    folder.mkdir(parents=True, exist_ok=True)
    written, inline = [path], []
    for name, figure in figures(problem, answers, by, throughput=throughput).items():
        for kind in ("png", "svg"):
            written.append(folder / f"{name}.{kind}")
            figure.savefig(written[-1], dpi=110)
        text = io.StringIO()
        figure.savefig(text, format="svg")
        inline.append(text.getvalue()[text.getvalue().index("<svg") :])
    best = best_of(problem, answers, by, throughput=throughput)
    rows = "".join(_row(problem, answer, answer is best) for answer in answers)
    load = problem.load
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>Splitwise: which cluster</title><style>{STYLE}</style>"
        f"<h1>Which cluster serves {escape(load.source.name)}?</h1><p class=advice>{escape(advice)}</p>"
        f"<p>{escape(problem.config.model)}, Poisson arrivals, {load.duration:g} s of trace; optima "
        "confirmed on twice that with two more seeds. P+T: prompt + token machines.</p>"
        "<table><tr><th>design<th>size<th>SLOs<th>requests/s<th>$/h<th>power units<th>machines"
        "<th>tightest SLO<th>margin</tr>"
        f"{rows}</table>" + "".join(f"<figure>{svg}</figure>" for svg in inline),
        encoding="utf-8",
    )
    return written


def _row(problem: Problem, answer: Answer, best: bool) -> str:
    costs = [total(answer.design, answer.tried, problem.catalog, b) for b in (Budget.COST, Budget.POWER)]
    tight = answer.tightest
    told = (
        ""
        if tight is None
        else f"{tight.metric.upper()} P{tight.percentile:g}: {tight.measured:.2f} of {tight.limit:g}"
    )
    cells = [
        answer.design.name, size_name(answer), "met" if answer.size else "missed", f"{answer.rate:g}",
        f"{costs[0]:.0f}", f"{costs[1]:.0f}", f"{answer.tried.machines}", told,
        f"{answer.margin:.0%}" if answer.size else "-",
    ]  # fmt: skip
    kind = "missed" if answer.size is None else "best" if best else ""
    return f"<tr class='{kind}'>" + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"
