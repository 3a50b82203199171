"""Reading what processes say in Prometheus' text format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    import aiohttp

PREFIX = "splitwise_"


@dataclass
class Scrape:
    """One answer of a metrics endpoint. `kinds` is by the name that queries use."""

    kinds: dict[str, str] = field(default_factory=dict)
    labels: dict[str, set[str]] = field(default_factory=dict)
    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """Keep our own metrics; a histogram's samples are under their own names (``..._count``)."""
        scrape = cls()
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(PREFIX):
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            scrape.kinds[name] = family.type
            scrape.labels[name] = {label for s in family.samples for label in s.labels} - {"le"}
            for sample in family.samples:
                scrape.samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return scrape

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have these labels."""
        found = self.samples.get(name, [])
        return sum(value for given, value in found if labels.items() <= given.items())


async def scrape(http: aiohttp.ClientSession, address: str) -> Scrape:
    """Ask one process."""
    async with http.get(f"http://{address}/metrics") as response:
        assert response.status == 200
        return Scrape.parse(await response.text())
