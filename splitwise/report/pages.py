"""One self-contained HTML page for a search or a run: the answer first, then the pictures behind it."""

from __future__ import annotations

import io
from html import escape
from math import isfinite
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.provision.designs import Budget, total
from splitwise.provision.probe import Probe, run_probe
from splitwise.scheduling.arrays import POOL_PROMPT, POOL_TOKEN
from splitwise.sim.config import catalog_of, reference_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from matplotlib.figure import Figure

    from splitwise.provision.probe import Problem
    from splitwise.provision.search import Answer
    from splitwise.report.figures import Objectives
    from splitwise.sim.experiment import Estimate, Experiment
    from splitwise.sim.results import Result

UNITS = {Budget.COST: "$/h", Budget.POWER: "power units", Budget.MACHINES: "machines"}
SAME = {
    Budget.COST: "at equal cost",
    Budget.POWER: "at equal power",
    Budget.MACHINES: "with equally many machines",
}
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
    draw = _drawing()
    best = best_of(problem, answers, by, throughput=throughput)
    title = f"Most throughput of each design {SAME[by]}" if throughput else (
        f"Least {by.value} of each design at {answers[0].rate:g} requests/s"
    )  # fmt: skip
    values = [
        None if a.size is None
        else a.rate if throughput
        else total(a.design, a.size, problem.catalog, by)
        for a in answers
    ]  # fmt: skip
    labels = [f"{a.design.name}  {size_name(a)}" for a in answers]
    unit = "requests/s" if throughput else UNITS[by]
    place = next(index for index, answer in enumerate(answers) if answer is best)
    drawn = {"designs": draw.comparison(labels, values, place, title, unit)}
    for answer in answers:
        if answer.design.token is not None and answer.map:
            drawn[f"map-{answer.design.name}"] = draw.design_map(answer, throughput=throughput)
    result = run_probe(problem, Probe(best.design, best.tried, best.rate), problem.load.seeds[0])
    name = f"{best.design.name} {size_name(best)} at {best.rate:g} requests/s"
    load = problem.load
    return drawn | _of_run(result, draw.Objectives(load.reference, load.slo, load.warmup), name, [])


def _of_run(result: Result, objectives: Objectives, name: str, requests: Sequence[int]) -> dict[str, Figure]:
    """Return the pictures of one run; without chosen requests, of some from its middle."""
    from splitwise.report import figures as draw

    rows = list(requests) or draw.consecutive(result)
    return {
        "slowdowns": draw.slowdowns(result, objectives, name),
        "batches": draw.occupancy(result, name),
        "requests": draw.gantt(result, name, rows),
        "machines": draw.machines_over_time(result, name, rows),
    }


def best_of(problem: Problem, answers: Sequence[Answer], by: Budget, *, throughput: bool) -> Answer:
    """Return the best answer, unsplit of equals; or the nearest miss when nothing meets the SLOs."""
    able = [answer for answer in answers if answer.size is not None]
    if not able:
        return max(answers, key=lambda a: a.margin)
    if throughput:
        return max(able, key=lambda a: (a.rate, a.design.token is None))
    return min(
        able, key=lambda a: (total(a.design, a.tried, problem.catalog, by), a.design.token is not None)
    )


def size_name(answer: Answer) -> str:
    """Return `P+T`, or one number for a cluster that is not split."""
    size = answer.tried
    return f"{size.prompt}" if answer.design.token is None else f"{size.prompt}+{size.token}"


def _drawing() -> ModuleType:
    try:
        from splitwise.report import figures
    except ModuleNotFoundError as error:
        raise ConfigError(f"pictures need {error.name}: pip install 'splitwise[sim]'") from None
    return figures


def _write_pictures(path: Path, drawn: Mapping[str, Figure]) -> tuple[list[Path], str]:
    """Write every picture as PNG and SVG into a folder beside `path`; returns files, and them as HTML."""
    folder = path.with_suffix("")
    folder = folder.with_name(folder.name + "-pictures")
    folder.mkdir(parents=True, exist_ok=True)
    written, inline = [], []
    for name, figure in drawn.items():
        for kind in ("png", "svg"):
            written.append(folder / f"{name}.{kind}")
            figure.savefig(written[-1], dpi=110)
        text = io.StringIO()
        figure.savefig(text, format="svg")
        inline.append(f"<figure>{text.getvalue()[text.getvalue().index('<svg') :]}</figure>")
    return written, "".join(inline)


def write_report(
    path: Path, problem: Problem, answers: Sequence[Answer], by: Budget, advice: str, *, throughput: bool
) -> list[Path]:
    """Write the page of a search, and every picture beside it; returns the files."""
    written, inline = _write_pictures(path, figures(problem, answers, by, throughput=throughput))
    best = best_of(problem, answers, by, throughput=throughput)
    rows = "".join(_row(problem, answer, answer is best) for answer in answers)
    load = problem.load
    notes = "".join(f"<p>{escape(answer.note)}</p>" for answer in answers if answer.note)
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>Splitwise: which cluster</title><style>{STYLE}</style>"
        f"<h1>Which cluster serves {escape(load.source.name)}?</h1><p class=advice>{escape(advice)}</p>"
        f"<p>{escape(problem.config.model)}, {load.arrivals.value} arrivals, {load.duration:g} s of trace; "
        "optima confirmed on twice that with two more seeds. P+T: prompt + token machines.</p>"
        "<table><tr><th>design<th>size<th>SLOs<th>requests/s<th>$/h<th>power units<th>machines"
        f"<th>tightest SLO<th>margin</tr>{rows}</table>{notes}{inline}",
        encoding="utf-8",
    )
    return [path, *written]


def write_run_report(path: Path, experiment: Experiment, requests: Sequence[int] = ()) -> list[Path]:
    """Write the page of a simulation (its first seed's pictures); returns the files.

    `requests` are numbers in the trace, from 0, for the pictures over time. Raises
    ConfigError for one that is not in it or did not finish.
    """
    draw, result, config = _drawing(), experiment.results[0], experiment.config
    for request in requests:
        if not 0 <= request < len(result.trace) or not isfinite(result.last[request]):
            raise ConfigError(
                f"request {request}: not in the trace or not finished; it has 0 to {len(result.trace) - 1}"
            )
    objectives = draw.Objectives(reference_row(config, catalog_of(config)), config.slo, config.warmup_s)
    split = [sum(m.home == home for m in result.cluster.machines) for home in (POOL_PROMPT, POOL_TOKEN)]
    name = f"{split[0]}+{split[1]} machines" if split[1] else f"{split[0]} machines"
    written, inline = _write_pictures(path, _of_run(result, objectives, name, requests))
    verdict = "Every SLO is met" if experiment.slo_met else "SLOs are missed: " + ", ".join(
        f"{limit.metric.upper()} P{limit.percentile:g} is {limit.measured:.2f} of {limit.limit:g}"
        for limit in max(experiment.verdicts, key=lambda v: v.worst.use).limits
        if not limit.met
    )  # fmt: skip
    rows = "".join(
        f"<tr><td>{escape(metric)}" + "".join(f"<td>{_seconds(value)}" for value in row.values()) + "</tr>"
        for metric, row in experiment.latencies().items()
    )
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>Splitwise: simulation</title><style>{STYLE}</style>"
        f"<h1>{escape(name)} for {escape(result.trace.name)}</h1><p class=advice>{escape(verdict)}.</p>"
        f"<p>{escape(config.model)}, {config.mode.value}; {len(experiment.results)} seeds, "
        f"{len(result.trace)} requests in the first. Seconds, with the 95 % interval over seeds.</p>"
        "<table><tr><th>metric<th>mean<th>P50<th>P90<th>P99<th>largest</tr>"
        f"{rows}</table>{inline}",
        encoding="utf-8",
    )
    return [path, *written]


def _seconds(value: Estimate) -> str:
    return f"{value.mean:.4f}" + ("" if value.half_width is None else f" &plusmn; {value.half_width:.4f}")


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
