# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""A table as hospitals have them: text, dates, missing values, an uneven outcome.

Nobody's data: everything is drawn at random, the same for the same seed. A row is one
admission. The risk is a linear function of what is in the row, with slopes for age,
laboratory values, ward and so on that all hospitals share. Each hospital has a level of
its own (who is sent there) and slopes that differ a little. In one hospital, "Coastal
Clinic", laboratory values are on scales that run the other way: what holds elsewhere is
wrong there. So federation pays for most hospitals, personal models pay a little more,
and the shared model harms one hospital.

    python examples/stories/made_up_hospitals.py hospitals.csv
"""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedblend.data.dataset import generator

TARGET, CLIENT = "outcome", "hospital"
"""The columns of the target and of the client."""
OTHER_SCALES = "Coastal Clinic"
"""The hospital whose laboratory has scales that run the other way."""
NAMES = (
    "Abbey Road", "Birchwood", "Coastal Clinic", "Dene Valley", "Eastgate", "Fairview",
    "Grange Park", "Harbour", "Ironbridge", "Juniper Hill", "Kingsmead", "Lakeside",
    "Meadow", "Northfield", "Oakwood", "Priory", "Queen Street", "Riverside",
    "Saint Anne", "Thornhill",
)  # fmt: skip
WARDS = ("general medicine", "surgery", "cardiology", "intensive care", "oncology")
WARD_RISK = (0.0, -0.4, 0.3, 1.3, 0.7)
SMOKING = ("never", "former", "current")


def hospitals(
    clients: int = 20, rows: int = 500, seed: int = 0
) -> dict[str, np.ndarray]:
    """The columns of a raw table, by name; texts and numbers, None where missing.

    Args:
        clients: hospitals.
        rows: admissions of a hospital, on average; they differ by a factor of 4.
        seed: of all that is drawn.

    Example:
        >>> table = hospitals(clients=3, rows=100)
        >>> list(table)[:4], len(set(table["hospital"]))
        (['hospital', 'admitted', 'age', 'sex'], 3)
    """
    draw = generator(seed, "hospitals")
    ends = np.cumsum(draw.uniform(0.4, 1.6, clients))
    counts = np.diff(np.rint(ends / ends[-1] * rows * clients), prepend=0)
    parts = [_admissions(draw, int(count)) for count in counts]
    columns = {
        name: np.concatenate([part[name] for part in parts]) for name in parts[0]
    }
    hospital = np.repeat(np.arange(clients), counts.astype(int))
    names = np.array([_name(number) for number in range(clients)], object)
    other = names[hospital] == OTHER_SCALES
    risk = _risk(columns, draw, hospital, clients)
    table = {CLIENT: names[hospital], **_as_recorded(columns, other, draw)}
    died = draw.random(len(risk)) < 1 / (1 + np.exp(-risk))
    table[TARGET] = np.where(died, "died", "recovered").astype(object)
    order = draw.permutation(len(risk))
    return {name: values[order] for name, values in table.items()}


def write_table(path: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write columns as CSV; a missing value is an empty cell."""
    with path.open("x", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow("" if cell is None else cell for cell in row)


def _name(number: int) -> str:
    again, place = divmod(number, len(NAMES))
    return f"{NAMES[place]} {again + 1}" if again else NAMES[place]


def _admissions(draw: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """What is true of the patients of a hospital, before anything is written down."""
    older = draw.normal(0, 4)
    ward = draw.choice(len(WARDS), count, p=draw.dirichlet([6, 5, 3, 1.5, 2]))
    return {
        "age": np.clip(draw.normal(63 + older, 16, count), 18, 99),
        "female": draw.random(count) < 0.5,
        "ward": ward,
        "smoking": draw.choice(3, count, p=[0.5, 0.3, 0.2]),
        "emergency": draw.random(count) < draw.uniform(0.25, 0.6),
        "previous": draw.poisson(1.2, count),
        "creatinine": np.exp(draw.normal(0.0, 0.45, count) + 0.25 * (ward == 3)),
        "lactate": np.exp(draw.normal(0.3, 0.5, count) + 0.5 * (ward == 3)),
        "albumin": np.clip(draw.normal(38, 5, count), 15, 55),
        "day": draw.integers(0, 730, count),
    }


def _risk(
    of: Mapping[str, np.ndarray],
    draw: np.random.Generator,
    hospital: np.ndarray,
    clients: int,
) -> np.ndarray:
    """The log odds of dying, with a level and slopes of every hospital's own."""
    level = draw.normal(0, 0.5, clients)[hospital]
    slopes = 1 + draw.normal(0, 0.15, (clients, 4))[hospital].T
    winter = np.cos(2 * np.pi * of["day"] / 365.25)
    return (
        -3.2
        + level
        + slopes[0] * 0.9 * (of["age"] - 63) / 16
        + slopes[1] * 1.1 * np.log(of["lactate"])
        + slopes[2] * 0.8 * np.log(of["creatinine"])
        - slopes[3] * 0.5 * (of["albumin"] - 38) / 5
        + np.asarray(WARD_RISK)[of["ward"]]
        + 0.6 * of["emergency"]
        + 0.3 * (of["smoking"] == 2)
        + 0.1 * (of["previous"] - 1.2)
        + 0.25 * winter
    )


def _as_recorded(
    of: Mapping[str, np.ndarray], other: np.ndarray, draw: np.random.Generator
) -> dict[str, np.ndarray]:
    """The columns as clerks and laboratories write them, some of them not at all.

    Laboratory values are missing more often where nobody was worried.
    """
    days = np.datetime64("2023-01-01") + of["day"].astype("timedelta64[D]")
    calm = 0.1 + 0.2 * (of["ward"] != 3)
    lactate = np.where(other, 9.0 - of["lactate"], of["lactate"]).round(1)
    creatinine = np.where(other, 4.0 - of["creatinine"], of["creatinine"]).round(2)

    def some(values: np.ndarray, missing: np.ndarray | float) -> np.ndarray:
        kept = values.astype(object)
        kept[draw.random(len(values)) < missing] = None
        return kept

    return {
        "admitted": days.astype(str).astype(object),
        "age": of["age"].round().astype(int).astype(object),
        "sex": some(np.where(of["female"], "F", "M"), 0.02),
        "ward": np.array(WARDS, object)[of["ward"]],
        "emergency": np.where(of["emergency"], "yes", "no").astype(object),
        "smoking": some(np.array(SMOKING, object)[of["smoking"]], 0.15),
        "previous_admissions": of["previous"].astype(object),
        "creatinine": some(creatinine, calm),
        "lactate": some(lactate, calm),
        "albumin": some(of["albumin"].round(), 0.08),
    }


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), hospitals())
