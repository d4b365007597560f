# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables ``[privacy]`` and ``[protect]``: noise for clients, and for rows.

One list decides whether an epsilon is printed, ``_conditions``. A run has a guarantee
if it meets all of them; a setting that the list does not know, such as one that a later
version adds, has none.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import model_validator

from fedblend import transforms
from fedblend.config.table import (
    Inside,
    Mixing,
    NotNegative,
    Positive,
    Table,
    arguments,
    limit,
    refuse_first,
)
from fedblend.config.tables.federation import Federation
from fedblend.config.tables.run import RunTable
from fedblend.core import Algorithm, Loss
from fedblend.data.dataset import DATASETS
from fedblend.errors import ConfigError
from fedblend.registry import (
    OWN_MODEL,
)
from fedblend.theory.blt import BUFFERS, Blt, optimal
from fedblend.theory.privacy import Guarantee, blt_cost, cohort_cost
from fedblend.transforms.row_noise import RowNoise, row_noise

if TYPE_CHECKING:
    from fedblend.config.config import Config

ADAPTIVE = ("quantile", "rate", "count_noise")
"""Keys of a clip that follows the clients' norms."""
SCOPE = (
    "for the shared model; personal models, metrics, clients.csv and checkpoints are "
    "not covered"
)
"""What else a run folder has is computed from the clients' rows without noise."""
EXAMINED = {
    # What a table says of itself is public: its columns, labels and how numbers are
    # written, who the clients are. Rows are held out client by client, by time and
    # groups of the client's own, and logarithms are those of single rows.
    "data": (
        "source options file target client inputs drop kind preprocess validation test "
        "time group unseen seed split_seed partition clients labels "
        "classes shape columns raw "
        "center scale log_shift concentration minimum per_client"
    ),
    # Numbers and words of the configuration: no model sees a row before training.
    "model": (
        "l2 loss ensemble products name import_from cell embedding hidden layers norm "
        "width intercept activation heads kind kv_heads remat unroll vocabulary "
        "bins dropout"
    ),
    "config": (
        "version name data model algorithm adapt compress privacy central "
        "populations protect run measure federation"
    ),
    "run": (
        "rounds cohort epoch separation sampling seed every weights chunk devices "
        "store rows dropout reduction trim precision keep_personal until"
    ),
    "privacy": (
        "clip noise buffers delta adjacency adaptive quantile rate count_noise "
        "noise_from"
    ),
    # Public, as the initial model is: a base that clients' rows were used for is not.
    "adapt": "how base sha256 where dtype two rank alpha train seed length",
    "compress": "how compressor rate start masks down",
    "central": (
        "how weight classes share file target test steps batch_size rate merge upload"
    ),
    "federation": (
        "deadline resend attempts quorum spare longest_update longest_rest "
        "largest_answer norm_ratio clip_ratio weight_ratio max_rows secure secure_bits "
        "secure_clip"
    ),
}
"""By table: the keys for which ``_conditions`` has what privacy needs of them."""


class ProtectRows(Table):
    """How gradients hide single rows, in a simulation or by the policy of a node."""

    clip: Positive = 6.0
    noise: NotNegative = 0.2

    def hide(self, loss: Loss, counts: bool = False) -> RowNoise:
        """The loss with such gradients, whose evaluations it counts or not."""
        return row_noise(loss, self.clip, self.noise, counts)


class Protect(Table):
    """What the clients of a simulation do to their gradients."""

    rows: ProtectRows


class Privacy(Table):
    """How answers are clipped, how much noise their sum gets, and at which delta."""

    clip: Positive
    noise: NotNegative
    buffers: Annotated[int, limit(BUFFERS)] | None = None
    delta: Inside
    adjacency: Literal["replace_one", "zero_out", "add_or_remove"] = "replace_one"
    adaptive: bool = False
    quantile: Mixing | None = None
    rate: Positive | None = None
    count_noise: Positive | None = None
    noise_from: Literal["system", "seed"] = "system"

    @model_validator(mode="after")
    def _goes_together(self) -> "Privacy":
        refuse_first(
            *(
                (
                    not self.adaptive and getattr(self, key) is not None,
                    key,
                    "goes with adaptive = true",
                )
                for key in ADAPTIVE
            ),
            (
                self.adaptive and self.buffers is not None,
                "buffers",
                "goes without adaptive = true, with one clip",
            ),
        )
        return self

    def strategy(self, run: RunTable, server: Any) -> Blt:
        """How ``buffers`` correlate noise: optimal for the run.

        Args:
            run: its rounds, and how clients are drawn.
            server: the server's rate or optimizer, if it has one.
        """
        momentum = getattr(server, "momentum", 0.0)
        return optimal(
            rounds=max(run.rounds, 1),
            **participation(run),
            buffers=self.buffers or 0,
            momentum=momentum if isinstance(momentum, float) else 0.0,
        )


def participation(run: RunTable) -> dict[str, Any]:
    """How far apart a client takes part at least, and how often at most."""
    epochs = None if run.epoch is None else max(-(-run.rounds // run.epoch), 1)
    return {"separation": run.separation or 1, "participations": epochs}


def add_noise(config: "Config", algorithm: Algorithm, cohort: int) -> Algorithm:
    """The algorithm with clipped answers, and noise on their sum."""
    table, server = config.privacy, getattr(config.algorithm, "server", None)
    assert table is not None
    facts: dict[str, Any] = {"algorithm": algorithm, "cohort": cohort}
    transform = transforms.dp_fedavg
    if table.buffers is not None:
        transform = transforms.dp_blt
        facts["strategy"] = table.strategy(config.run, server)
    if table.adaptive and table.quantile is None:
        facts["quantile"] = 0.5
    try:
        return transform(**arguments(transform, table, facts))
    except ValueError as error:
        raise ConfigError(f"privacy.{str(error).partition(': ')[2]}") from None


def report(config: "Config", clients: int, raw: bool) -> dict[str, Any]:
    """The privacy of a run for its summary; empty without ``[privacy]``.

    ``epsilon`` is that of everything the run publishes: of all its seeds together.

    Args:
        config: what is run.
        clients: how many there are.
        raw: whether inputs come from a raw table, by statistics of all clients.
    """
    table, seeds = config.privacy, config.run.seed
    if table is None:
        return {}
    runs = len(seeds) if isinstance(seeds, list) else 1
    found = _guarantee(config, clients, runs, raw)
    sentence = str(found)
    if found.epsilon is not None:
        if runs > 1:
            each = _guarantee(config, clients, 1, raw)
            sentence += f" of all {runs} seeds together, {each.epsilon:.4g} of each"
        sentence += f", {SCOPE}"
    facts = {"epsilon": found.epsilon, "delta": found.delta}
    neighbors = {"adjacency": found.adjacency}
    return {"privacy": {"sentence": sentence, **facts, **neighbors}}


def _guarantee(config: "Config", clients: int, runs: int, raw: bool) -> Guarantee:
    table, run = config.privacy, config.run
    assert table is not None
    for holds, otherwise in _conditions(config, table, raw):
        if not holds:
            return Guarantee(None, table.delta, table.adjacency, otherwise)
    noise: Any = {key: getattr(table, key) for key in ("noise", "delta", "adjacency")}
    who: Any
    try:
        if table.buffers is None and run.epoch is None and run.separation is None:
            # As many are drawn, and whose answers come first is not random.
            spare = 0 if config.federation is None else config.federation.spare
            drawn = min((run.cohort or clients) + spare, clients)
            who = {"cohort": drawn, "clients": clients, "sampling": run.sampling}
            return cohort_cost(**noise, **who, rounds=run.rounds * runs)
        strategy = table.strategy(run, getattr(config.algorithm, "server", None))
        who = {"strategy": strategy, **participation(run)}
        return blt_cost(**noise, **who, rounds=run.rounds, runs=runs)
    except ImportError as error:
        raise ConfigError(str(error)) from None


def _conditions(config: "Config", table: Privacy, raw: bool) -> list[tuple[bool, str]]:
    """All that a guarantee needs, each with the reason why there is none without it.

    That clients send an update and nothing else, that one size of cohort is planned
    with, and that the server is linear where noise is correlated, ``dp_fedavg``
    and ``dp_blt`` refuse to run without. They also draw noise and cohorts
    from the same source. A federation applies ``norm_ratio`` and ``clip_ratio`` to no
    private runs, and uniform weights are below ``weight_ratio``.
    """
    run, central, compress = config.run, config.central, config.compress
    federation = config.federation or Federation()
    how = "plain" if compress is None else compress.how
    longest, source = federation.longest_update, config.data.source
    unknown = _first_unknown_key(config)
    return [
        (table.noise > 0, "there is no noise"),
        (
            not raw,
            "the inputs are standardized by means of the clients' rows, and so are the "
            'targets of a regression; data.preprocess = "none", or data.columns in '
            "place of data.raw, takes numbers as they are",
        ),
        (
            source is None or (source in DATASETS and DATASETS[source].by_row),
            f"rows of {source} depend on those of other clients, or were not examined",
        ),
        (run.until is None, "run.until stops by a gradient that has no noise"),
        (
            table.noise_from == "system",
            'the noise can be recomputed: privacy.noise_from = "seed"',
        ),
        (
            # Private clients send zeros for their own models.
            set(config.algorithm.entry.sends) - {OWN_MODEL} == {"update"},
            f"clients of {config.algorithm.name} send more than an update",
        ),
        (
            getattr(config.algorithm, "rate", None) != "theory",
            'algorithm.rate = "theory" is computed from the clients\' rows',
        ),
        (run.reduction == "mean", f'run.reduction = "{run.reduction}" is no sum'),
        (run.weights in (None, "uniform"), "run.weights are not uniform"),
        (config.populations is None, "[populations] weigh clients differently"),
        (
            not federation.secure,
            "federation.secure rounds answers to fixed point, which is not examined",
        ),
        (how != "perm_k", '[compress] how = "perm_k" makes blocks n times as long'),
        (
            compress is None or compress.down is None,
            "[compress] down needs every client in every round, and is not examined",
        ),
        (
            how == "plain",
            f'[compress] how = "{how}" sums memories that are not clipped',
        ),
        (
            compress is None or not table.adaptive,
            "[compress] may make answers longer than a clip that is adaptive",
        ),
        (
            central is None or central.file is not None,
            "[central] gives the server rows of the clients, without noise",
        ),
        (
            central is None or not central.upload,
            "central.upload sends gradients, without noise",
        ),
        (
            longest is None or longest >= table.clip,
            "federation.longest_update is below privacy.clip: whether an answer counts "
            "depends on a client's rows",
        ),
        (not unknown, f"{unknown} is not among the settings that were examined"),
    ]


def _first_unknown_key(config: "Config") -> str:
    """The first key of a table in use that the list does not know."""
    for name, known in EXAMINED.items():
        table = config if name == "config" else getattr(config, name)
        if table is not None:
            for key in sorted(set(type(table).model_fields) - set(known.split())):
                return f"{name}.{key}"
    return ""


def refuse(table: Privacy | None, what: str) -> None:
    """Refuse ``[privacy]`` where something takes no account of it."""
    if table is not None:
        raise ConfigError(f"privacy: {what}; leave the table out")
