"""Fit the performance models that the package ships, from the authors' profile.

    python tools/fit_performance.py perf_model.csv

The file is data/perf_model.csv of github.com/Mutinifni/splitwise-sim (MIT licence, kept
beside the result). Prints each fit's error on held-out points.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from splitwise.perf.fitting import fit, groups, report, with_compat
from splitwise.perf.profiles import read_csv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitwise.perf.profiles import ProfilePoint

SOURCE = (
    "fitted from github.com/Mutinifni/splitwise-sim data/perf_model.csv, commit 8f99e7d "
    "(MIT, Copyright (c) 2024 Pratyush Patel; see LICENSE.splitwise-sim.MIT)"
)
TARGET = Path(__file__).parent.parent / "splitwise" / "perf" / "data" / "fits.json"
DERIVED = "h100-80gb-pcap"  # no measurement: the catalogue scales h100-80gb by the same factors


def main(csv: Path) -> None:
    """Write `TARGET`."""
    as_published = groups(read_csv(csv, repeated_rows=True))
    fits, powers = [], {}
    for key, points in groups(read_csv(csv)).items():
        if key[1] == DERIVED:
            continue
        print("\n".join(report(points, splits=50).lines()))
        fits.append(with_compat(fit(points, source=SOURCE), as_published[key]).to_dict())
        if any(point.peak_power > 0.0 for point in points):
            powers[f"{key[0]}|tp{key[2]}"] = power(points)
    data = {"source": SOURCE, "fits": fits, "power": powers}
    TARGET.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def power(points: Sequence[ProfilePoint]) -> dict[str, Any]:
    """Power shares: peak of a run for its prompt phase, mean of a run for its token phase."""
    measured = [p for p in points if p.peak_power > 0.0]
    prompts = sorted({p.prompt_tokens for p in measured if p.batch == 1})
    batches = sorted({p.batch for p in measured if p.prompt_tokens == 512})

    def prompt_share(tokens: int) -> float:
        peaks = [p.peak_power for p in measured if p.batch == 1 and p.prompt_tokens == tokens]
        return min(median(peaks), 1.0)

    def token_share(batch: int) -> float:
        return median(p.mean_power for p in measured if p.batch == batch and p.prompt_tokens == 512)

    return {
        "prompt_tokens": prompts,
        "prompt_share": [prompt_share(tokens) for tokens in prompts],
        "sequences": batches,
        "token_share": [token_share(batch) for batch in batches],
        "measured_on": points[0].hardware,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
