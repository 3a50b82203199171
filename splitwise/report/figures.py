"""The pictures of a provisioning report, drawn with matplotlib (extra ``sim``).

Each function returns a figure that says by itself what it shows: a title that is the
question, axes with units, limits and optimum marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from splitwise.sim.slo import reference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray

    from splitwise.provision.designs import Size
    from splitwise.provision.search import Answer
    from splitwise.sim.results import Result

GOOD, BAD, BEST, PROMPT, TOKEN = "#2a9d5c", "#d1495b", "#f2b705", "#2f6db5", "#e08a1e"
NAMES = {"ttft": "TTFT", "tbt": "TBT (mean of a request)", "e2e": "E2E"}


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def design_map(answer: Answer, *, throughput: bool) -> Figure:
    """Prompt x token machines: what was simulated, what it implies, and the optimum.

    A size that breaks its SLOs at a lower rate does at this one, and the other way round.
    At a given rate, areas follow: more machines serve what fewer do. With `throughput`
    only sizes of one budget were asked about, and only they are coloured.
    """
    figure, axes = _figure(7, 5)
    seen = {
        size: met for size, rate, met in answer.map if (rate >= answer.rate if met else rate <= answer.rate)
    }
    area = _known_area(answer, seen, throughput=throughput)
    high, wide = area.shape
    edges = (np.arange(wide + 1) + 0.5, np.arange(high + 1) + 0.5)
    axes.pcolormesh(*edges, area == 1, cmap=_shade(GOOD), vmin=0, vmax=1)
    axes.pcolormesh(*edges, area == 0, cmap=_shade(BAD), vmin=0, vmax=1)
    for met, colour, mark, label in (
        (True, GOOD, "o", "simulated: meets the SLOs"),
        (False, BAD, "x", "simulated: does not"),
    ):
        points = [size for size, found in seen.items() if found is met]
        axes.scatter(
            [s.prompt for s in points], [s.token for s in points], c=colour, marker=mark, s=28, label=label
        )
    if answer.size is not None:
        axes.scatter(
            answer.size.prompt,
            answer.size.token,
            marker="*",
            s=380,
            c=BEST,
            edgecolors="k",
            label=f"optimum {answer.size.prompt}+{answer.size.token}, confirmed",
            zorder=5,
        )
    which = "sizes within the budget" if throughput else "sizes"
    axes.set(
        title=f"{answer.design.name}: which {which} serve {answer.rate:g} requests/s?",
        xlabel=f"prompt machines ({answer.design.prompt})",
        ylabel=f"token machines ({answer.design.token})",
        xlim=(0.5, wide + 0.5),
        ylim=(0.5, high + 0.5),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    handles = axes.get_legend_handles_labels()[0]
    if np.isnan(area).any():
        told = "not asked about" if throughput else "not known"
        handles.append(Patch(facecolor="white", edgecolor="#999999", label=told))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _known_area(answer: Answer, seen: Mapping[Size, bool], *, throughput: bool) -> NDArray[np.float64]:
    """Return by token and prompt machines: 1 meets the SLOs, 0 does not, NaN is not known."""
    wide = max([answer.tried.prompt, *(size.prompt for size in seen)])
    high = max([answer.tried.token, *(size.token for size in seen)])
    area = np.full((high, wide), np.nan)
    for size, met in seen.items():
        if throughput:
            area[size.token - 1, size.prompt - 1] = met
        elif met:
            area[size.token - 1 :, size.prompt - 1 :] = 1
        else:
            area[: size.token, : size.prompt] = 0
    return area


def _shade(colour: str) -> Colormap:
    return LinearSegmentedColormap.from_list("shade", [(1, 1, 1, 0), (*to_rgb(colour), 0.22)])


@dataclass(frozen=True)
class Objectives:
    """What slowdowns are against, their limits, and the seconds at the start that do not count."""

    reference: NDArray[np.float64]
    slo: Mapping[str, Mapping[int, float]]
    warmup: float


def slowdowns(result: Result, objectives: Objectives, name: str) -> Figure:
    """Distribution of the slowdowns, with a marker at each SLO: the line must pass left of it."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    alone = reference(result, objectives.reference)
    measured = {"ttft": result.ttft, "tbt": result.tbt_mean, "e2e": result.e2e}
    chosen = result.counted(objectives.warmup)
    table = objectives.slo
    for axes, metric in zip(np.atleast_1d(figure.subplots(1, len(table), sharey=True)), table, strict=True):
        values = np.sort((measured[metric] / alone[metric])[chosen])
        values = values[np.isfinite(values)]
        axes.plot(values, 100 * np.arange(1, len(values) + 1) / max(len(values), 1), c=PROMPT)
        for percentile, limit in table[metric].items():
            met = len(values) and np.percentile(values, percentile) <= limit
            colour = GOOD if met else BAD
            axes.plot([limit, limit], [0, percentile], c=colour, ls="--", lw=1)
            axes.scatter(limit, percentile, c=colour, marker="<", s=60, zorder=5)
            axes.annotate(
                f"P{percentile} \N{LESS-THAN OR EQUAL TO} {limit:g}",
                (limit, percentile),
                (7, -12),
                textcoords="offset points",
                color=colour,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )
        right = 1.35 * max([*table[metric].values(), *(values[-1:] if len(values) else [])])
        axes.set(
            title=NAMES[metric],
            xlabel="slowdown against alone on the reference",
            xscale="log",
            xlim=(min(0.4, values[0]) if len(values) else 0.4, right * 1.8),
            ylim=(0, 101),
        )
        axes.set_xticks([t for t in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if t < right])
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("% of requests at most this slow")
    figure.suptitle(f"{name}: are the SLOs met? (curve above a green marker: met; below a red one: missed)")
    return figure


def comparison(
    labels: Sequence[str], values: Sequence[float | None], best: int, title: str, unit: str
) -> Figure:
    """One bar per design, the best in another colour; designs that miss the SLOs have none."""
    figure, axes = _figure(8, 0.6 + 0.5 * len(labels) + 0.6)
    lengths = [value or 0.0 for value in values]
    colours = [BEST if place == best else PROMPT for place in range(len(labels))]
    bars = axes.barh(range(len(labels)), lengths, color=colours)
    for bar, value in zip(bars, values, strict=True):
        told = "SLOs not met" if value is None else f"{value:g} {unit}"
        axes.annotate(
            told,
            (bar.get_width(), bar.get_y() + bar.get_height() / 2),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=BAD if value is None else "k",
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.set(title=title, xlabel=unit)
    return figure


def occupancy(result: Result, name: str) -> Figure:
    """Share of busy time by number of sequences in the batch, prompt and token machines apart."""
    figure, axes = _figure(8, 3.6)
    loads = result.machine_loads()
    for home, colour in (("prompt", PROMPT), ("token", TOKEN)):
        group = [load for load in loads if load.home == home]
        sizes = sorted({size for load in group for size in load.occupancy})
        if not sizes:
            continue
        busy = np.array([load.prompt_seconds + load.mixed_seconds + load.token_seconds for load in group])
        share = [
            float(np.dot([load.occupancy.get(s, 0.0) for load in group], busy)) / busy.sum() for s in sizes
        ]
        used = np.mean([load.utilisation for load in group])
        label = f"{len(group)} {home} machine{'s' * (len(group) > 1)}, busy {used:.0%} of the time"
        axes.step(sizes, 100 * np.cumsum(share), where="post", c=colour, lw=2, label=label)
    axes.set(
        title=f"{name}: how full are the batches?",
        xlabel="sequences in the batch, at most",
        ylabel="% of busy time",
        ylim=(0, 102),
    )
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="lower right")
    return figure


def consecutive(result: Result, number: int = 18) -> list[int]:
    """Return some finished requests that follow one another in the middle of the run."""
    first = max(0, len(result.trace) // 2 - number // 2)
    some = range(first, min(len(result.trace), first + number))
    return [request for request in some if np.isfinite(result.last[request])]


def gantt(result: Result, name: str, rows: Sequence[int]) -> Figure:
    """Chosen requests over time: queue, prompt, handing over, tokens, and on which machines."""
    figure, axes = _figure(11, 1.6 + 0.3 * len(rows))
    zero = min((float(result.trace.arrival[r]) for r in rows), default=0.0)
    names = [machine.name for machine in result.cluster.machines]
    ends = [float(result.last[r]) - zero for r in rows]
    right = min(max(ends, default=1.0), 3 * float(np.median(ends)) if ends else 1.0)  # long ones are cut
    for line, r in enumerate(rows):
        _request_bars(axes, result, r, line, zero)
        p, t = names[result.prompt_machine[r]], names[result.token_machine[r]]
        where = p if p == t else f"{p} then {t}"
        if ends[line] > right:
            where += f" (until {ends[line]:.0f} s)"
        axes.annotate(
            where, (min(ends[line], right), line), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(
        range(len(rows)),
        [f"#{r} ({result.trace.prompt_tokens[r]} in, {result.trace.output_tokens[r]} out)" for r in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.set_xlim(0, right)
    axes.set(
        title=f"{name}: where the time of {len(rows)} requests goes",
        xlabel=f"seconds after {zero:.1f} s of the trace",
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _request_bars(axes: Axes, result: Result, request: int, line: int, zero: float) -> None:
    start, first, second, last = (
        float(times[request]) for times in (result.start, result.first, result.second, result.last)
    )
    times = [float(result.trace.arrival[request]), start, first, second, last]
    if not np.isfinite(second):  # one token
        times[3] = first
    parts = (
        ("#c9c9c9", "queued"),
        (PROMPT, "prompt phase"),
        ("#8c6bb1", "to second token (KV transfer)"),
        (TOKEN, "token phase"),
    )
    for (colour, label), begin, end in zip(parts, times, times[1:], strict=False):
        axes.barh(line, end - begin, left=begin - zero, color=colour, label=None if line else label)


@dataclass(frozen=True)
class _Span:
    request: int
    begin: float
    end: float
    colour: str


def machines_over_time(result: Result, name: str, rows: Sequence[int]) -> Figure:
    """The same requests on the machines that ran them: a group of lanes per machine."""
    zero = min((float(result.trace.arrival[r]) for r in rows), default=0.0)
    ends = [float(result.last[r]) - zero for r in rows]
    right = min(max(ends, default=1.0), 3 * float(np.median(ends)) if ends else 1.0)
    spans: dict[int, list[_Span]] = {}
    for r in rows:
        second = result.second[r] if np.isfinite(result.second[r]) else result.first[r]
        prompt = _Span(r, float(result.start[r]) - zero, float(result.first[r]) - zero, PROMPT)
        tokens = _Span(r, float(second) - zero, float(result.last[r]) - zero, TOKEN)
        spans.setdefault(int(result.prompt_machine[r]), []).append(prompt)
        spans.setdefault(int(result.token_machine[r]), []).append(tokens)
    lanes = {machine: _lanes(spans[machine], 0.045 * right) for machine in sorted(spans)}
    figure, axes = _figure(11, 1.4 + 0.22 * sum(map(len, lanes.values())) + 0.1 * len(lanes))
    top, ticks = 0.0, []
    for group in lanes.values():
        ticks.append(top + (len(group) - 1) / 2)
        for place, lane in enumerate(group):
            for span in lane:
                _span_bar(axes, span, top + place, right)
        top += len(group)
        axes.axhline(top - 0.25, c="#dddddd", lw=0.8)
        top += 0.5
    machines = result.cluster.machines
    axes.set_yticks(ticks, [f"{machines[m].name} ({machines[m].kind})" for m in lanes], fontsize=8)
    axes.set(
        title=f"{name}: which machine works on which of these requests",
        xlabel=f"seconds after {zero:.1f} s of the trace",
        xlim=(0, 1.05 * right),
        ylim=(top - 0.2, -0.8),
    )
    handles = [Patch(color=PROMPT, label="prompt phase"), Patch(color=TOKEN, label="token phase")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _span_bar(axes: Axes, span: _Span, y: float, right: float) -> None:
    axes.barh(y, span.end - span.begin, 0.8, left=span.begin, color=span.colour)
    inside = min(span.end, right) - span.begin > 0.045 * right
    axes.annotate(
        f"#{span.request}",
        (span.begin if inside else span.end, y),
        (3, 0),
        textcoords="offset points",
        va="center",
        fontsize=7,
        color="white" if inside else "k",
    )


def _lanes(spans: Sequence[_Span], label: float) -> list[list[_Span]]:
    """Spread spans over as few lanes as keep them, with `label` seconds for a name, from touching."""
    lanes: list[list[_Span]] = []
    for span in sorted(spans, key=lambda one: (one.begin, one.request)):
        free = (lane for lane in lanes if span.begin >= lane[-1].end + label)
        lane = next(free, None)
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes
