"""Reads what a server's ``/metrics`` says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Sample = tuple[dict[str, str], float]


def samples(text: str) -> dict[str, list[Sample]]:
    """Labels and value of each sample, by its name."""
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def by_label(found: list[Sample], label: str) -> dict[str, float]:
    """Values by one label."""
    return {labels[label]: value for labels, value in found}
