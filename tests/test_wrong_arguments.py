"""Wrong arguments of the public functions, crossed with kinds of wrongness.

Each is refused before anything is traced, in one line that has the argument's name, the
value and what is allowed. ``CASES`` has for every function good arguments, and for each
of them the kind that it is of; ``WRONG`` has what is wrong with a kind.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import example_arguments as examples
import fedblend as fb
from fedblend import algorithms, checks, transforms
from fedblend.checks import fits
from fedblend.errors import UserError
from fedblend.registry import ALGORITHMS
from fedblend.transforms import central_loss
from fedblend_federation.client.executor import ClientSetup, Executor
from fedblend_reproductions.apfl.averaged import apfl_averaged

CLIENTS = 4
KEY = jax.random.key(0)
LOSS = fb.datasets.quadratic_loss
FEDERATION, _ = fb.datasets.quadratics(clients=CLIENTS, dim=2)
PLAIN = fb.fedavg(LOSS, fb.Work(0.1, steps=1, batch_size=None))
TOP = fb.compress.rand_k(1)
KNOWN = fb.theory.constants.quadratics(FEDERATION)
LABELS = np.arange(40) % 4
ROWS = (np.zeros((40, 2)), LABELS)

NOT_A_NUMBER = (math.nan, "0.5", None, True, 1j, [[0.5]], jnp.asarray(math.nan))
WRONG: dict[str, tuple] = {
    "rate": (*NOT_A_NUMBER, math.inf, -0.1, np.float32(-2.0), [0.1], optax.sgd),
    "rate or None": (math.nan, "0.1", True, math.inf, -0.1, jnp.asarray(-2.0)),
    "positive": (*NOT_A_NUMBER, math.inf, -0.1, 0.0, np.float32(-2.0), [0.1]),
    "not negative": (*NOT_A_NUMBER, math.inf, -0.1, jnp.asarray(-2.0), [0.1]),
    "fraction": (*NOT_A_NUMBER, -0.1, np.float32(2.0), jnp.asarray(2.0), [0.1]),
    "fraction or None": (math.nan, "0.1", True, np.float32(2.0), jnp.asarray(-0.1)),
    "part": (*NOT_A_NUMBER, -0.1, 1.0, np.float32(2.0), jnp.asarray(2.0)),
    "count": (0, -1, 2.5, math.nan, True, "3", None, [1, 2], jnp.asarray(0), 3.0),
    "count or None": (0, -1, 2.5, math.nan, True, "3", [1, 2], np.int64(0)),
    "whole": (-1, 2.5, math.nan, True, "3", None, jnp.asarray(-1)),
    "steps": (-1, 0, 2.5, "3", None, True, [1, 0], [1.5, 2], [], np.int64(-1),
              fb.Epochs(0), fb.Epochs(1.5), np.ones((2, 2), int)),  # pyright: ignore
    "alpha": (2.0, -0.1, math.nan, "0.5", None, True, np.float32(2.0), [],
              jnp.asarray(2.0), [0.1, 2.0], [[0.1]], np.array([0.1, math.nan])),
    "by client": (-0.5, math.nan, math.inf, "0.5", None, True, np.float32(-2.0), [],
                  jnp.asarray(-2.0), [0.1, -2.0], [[0.1]], np.array([0.1, math.inf])),
    "counts by client": (0, 2.5, "3", None, True, [1, 0], [1.5], jnp.asarray(-1)),
    "word": ("frob", None, 3, ["step"]),
    "word or None": ("frob", 3, ["step"]),
    "function": (None, "loss", 3),
    "algorithm": (None, "fedavg", fb.fedavg),
    "compressor": (None, "rand_k", fb.compress.rand_k),
    "flag": (None, "yes", 2),
}  # fmt: skip
WORK = {"optimizer": "rate", "steps": "steps", "batch_size": "count or None"}
LOCAL = {"loss": "function", **WORK}
GOOD = {"loss": LOSS, "optimizer": 0.1, "steps": 2, "batch_size": None}


class Case(NamedTuple):
    """A function, good arguments, and of which kind some of them are."""

    call: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, str]


def _case(call: Callable, good: dict[str, Any], **kinds: str) -> Case:
    return Case(call, good, kinds)


def _local(call: Callable, more: dict[str, Any] | None = None, **kinds: str) -> Case:
    def with_work(*, optimizer, steps, batch_size, **others: Any) -> Any:
        return call(work=fb.Work(optimizer, steps, batch_size), **others)

    return Case(with_work, {**GOOD, **(more or {})}, {**LOCAL, **kinds})


def _simulated(**given: Any) -> Any:
    return fb.simulate(PLAIN, jnp.zeros(2), FEDERATION, KEY, **{"rounds": 1, **given})


def _cohort(**given: Any) -> Any:
    return _simulated(cohort=fb.Cohort(**given))


def _shared(**given: Any) -> Any:
    return fb.choose(
        lambda alpha: PLAIN,
        jnp.zeros(2),
        FEDERATION,
        KEY,
        rounds=1,
        measure={"loss": fb.metrics.mean_loss(LOSS)},
        **given,
    )


LEARNED = {"alpha": "alpha", "learn": "word", "alpha_rate": "rate or None"}
CLIMBED = {"clients": "count", "q_rate": "not negative"}
STOPPED = {"loss": "function", "tolerance": "not negative", "most": "count"}
OF_MIXTURES = {"alpha": "alpha", "omega": "by client"}
CASES = {
    "fedavg": _local(fb.fedavg),
    "fedopt": _local(algorithms.fedopt, {"server_optimizer": 1.0},
                     server_optimizer="rate"),
    "fedprox": _local(algorithms.fedprox, {"mu": 0.1}, mu="not negative"),
    "scaffold": _local(fb.scaffold, {"server_rate": 1.0}, server_rate="positive"),
    "svrg": _local(algorithms.svrg, {"refresh": 0.5}, refresh="fraction"),
    "local_only": _local(fb.local_only),
    "finetune": _local(fb.finetune, {"algorithm": PLAIN}, algorithm="algorithm"),
    "reptile": _local(algorithms.reptile, {"server_optimizer": 1.0},
                      server_optimizer="rate"),
    "fomaml": _local(algorithms.fomaml, {"server_optimizer": 1.0},
                     server_optimizer="rate"),
    "ditto": _local(fb.ditto, {"algorithm": PLAIN, "lam": 1.0},
                    algorithm="algorithm", lam="by client"),
    "perfedavg": _local(algorithms.perfedavg, {"inner_rate": 0.1},
                        inner_rate="not negative",
                        delta="positive", adapt_steps="whole", hessian="word"),
    "pfedme": _local(algorithms.pfedme, {"lam": 1.0, "inner_rate": 0.1,
                     "inner_steps": 2},
                     lam="positive", inner_rate="positive", inner_steps="count",
                     server_rate="positive"),
    "fedrep": _local(algorithms.fedrep, {"head": bool, "head_steps": 1},
                     head="function",
                     head_steps="steps"),
    "fedem": _local(algorithms.fedem),
    "l2gd": _case(algorithms.l2gd, {"loss": LOSS, "rate": 0.1, "lam": 1.0, "p": 0.5,
                            "batch_size": None},
                  loss="function", lam="not negative", p="part",
                  batch_size="count or None"),
    "agnostic": _local(algorithms.agnostic, {"clients": 4, "q_rate": 0.1}, **CLIMBED),
    "apfl": _local(fb.apfl, {"alpha": 0.5}, **LEARNED, held_out="part",
                   fresh="flag", aggregated="flag", mix="function"),
    "apfl_agnostic": _local(algorithms.apfl_agnostic,
                            {"alpha": 0.5, "clients": 4, "q_rate": 0.1},
                            **LEARNED, **CLIMBED),
    "apfl_averaged": _local(apfl_averaged, {"alpha": 0.5, "shift": 1.0},
                            alpha="alpha", shift="positive"),
    "flix": _case(fb.flix, {"loss": LOSS, "method": lambda loss: PLAIN, "alpha": 0.5,
                            "local": fb.solvers.newton(LOSS)},
                  loss="function", method="function", alpha="alpha", local="function",
                  smooth="by client", average="word", mix="function"),
    "clip": _case(transforms.clip, {"algorithm": PLAIN, "norm": 1.0},
                     algorithm="algorithm", norm="positive"),
    "adaptive_clip": _case(transforms.adaptive_clip,
                                 {"algorithm": PLAIN, "norm": 1.0},
                                 norm="positive", quantile="fraction", rate="positive"),
    "compressed": _case(transforms.compressed, {"algorithm": PLAIN, "compressor": TOP},
                        algorithm="algorithm", compressor="compressor"),
    "ef21": _case(transforms.ef21, {"algorithm": PLAIN,
                  "compressor": fb.compress.top_k(1)},
                  algorithm="algorithm", compressor="compressor"),
    "diana": _case(transforms.diana, {"algorithm": PLAIN, "compressor": TOP},
                   algorithm="algorithm", compressor="compressor",
                   rate="fraction or None", start="word"),
    "transforms.common_mask": _case(
        transforms.common_mask,
        {"algorithm": PLAIN, "compressor": fb.compress.rand_k(1)},
                      algorithm="algorithm", compressor="compressor", how="function"),
    "transforms.perm_k": _case(
        transforms.perm_k,
        {"algorithm": PLAIN, "clients": 4},
                      algorithm="algorithm", clients="count"),
    "dp_fedavg": _case(transforms.dp_fedavg, {"algorithm": PLAIN, "clip": 1.0,
                       "noise": 1.0,
                                  "cohort": 2},
                     algorithm="algorithm", clip="positive", noise="not negative",
                     cohort="count", quantile="fraction or None"),
    "dp_blt": _case(transforms.dp_blt, {"algorithm": PLAIN, "clip": 1.0, "noise": 1.0,
                                "cohort": 2, "strategy": fb.theory.blt.Blt()},
                    clip="positive", noise="not negative", cohort="count"),
    "mixed": _case(transforms.mixed_fl, {"algorithm": PLAIN, "central": lambda *all: 0,
                              "how": "parallel"},
                   algorithm="algorithm", central="function", steps="count",
                   merge_optimizer="rate", upload="flag", how="word"),
    "row_loss": _case(central_loss.row_loss, {"loss": LOSS},
                      batch_size="count or None"),
    "rand_k": _case(fb.compress.rand_k, {"k": 2}, k="counts by client", places="word"),
    "top_k": _case(fb.compress.top_k, {"k": 2}, k="counts by client"),
    "perm_k": _case(fb.compress.perm_k, {"clients": 2}, clients="count"),
    "dithering": _case(fb.compress.dithering, {"levels": 2}, levels="count"),
    "gradient_descent": _case(fb.solvers.gradient_descent,
                              {"loss": LOSS, "smooth": 1.0},
                              **STOPPED, smooth="by client"),
    "lbfgs": _case(fb.solvers.lbfgs, {"loss": LOSS}, **STOPPED),
    "newton": _case(fb.solvers.newton, {"loss": LOSS}, **STOPPED),
    "patient_sgd": _local(fb.solvers.patient_sgd, validation="part", patience="count",
                          turns="count"),
    "l2": _case(fb.losses.l2, {"loss": LOSS, "strength": 0.1}, loss="function",
                strength="not negative"),
    "recall_at": _case(fb.metrics.recall_at, {"apply": LOSS, "k": 1}, apply="function",
                       k="count"),
    "client_spread": _case(fb.metrics.client_spread, {"values": np.ones(2),
                                                    "counts": np.ones(2),
                                                    "higher_is_better": True},
                          higher_is_better="flag"),
    "standard": _case(fb.metrics.standard, {"kind": "binary", "loss": LOSS,
                                            "apply": LOSS}, kind="word"),
    "mlp": _case(fb.models.mlp, {"inputs": 2, "outputs": 2}, inputs="count",
                 outputs="count", activation="word"),
    "softmax": _case(fb.models.softmax, {"inputs": 2, "classes": 2}, inputs="count",
                     classes="count"),
    "char_rnn": _case(fb.models.char_rnn, {"vocabulary": 9}, vocabulary="count",
                      hidden="count", layers="count", cell="word"),
    "transformer": _case(fb.models.transformer, {"vocabulary": 9}, vocabulary="count",
                         length="count", width="count", layers="count",
                         heads="count", kind="word"),
    "text_classifier": _case(fb.models.text_classifier, {"classes": 3},
                             classes="count", vocabulary="count"),
    "iid": _case(fb.partition.iid, {"rows": 40, "clients": 4}, clients="count",
                 seed="whole"),
    "contiguous": _case(fb.partition.contiguous, {"rows": 40, "clients": 4},
                        clients="count"),
    "dirichlet": _case(fb.partition.dirichlet, {"labels": LABELS, "clients": 4,
                                                "concentration": 1.0},
                       clients="count", concentration="positive", minimum="whole"),
    "shards": _case(fb.partition.shards, {"labels": LABELS, "clients": 4},
                    clients="count", per_client="count"),
    "classes_per_client": _case(fb.partition.classes_per_client,
                                {"labels": LABELS, "clients": 4, "classes": 2},
                                clients="count", classes="count"),
    "by_key": _case(fb.partition.by_key, {"keys": LABELS}, minimum="whole"),
    "federate": _case(fb.federate, {"rows": ROWS, "partition": [np.arange(40)]},
                      validation="part", test="part", seed="whole", split="whole"),
    "split_clients": _case(fb.data.split_clients,
                       {"federated_data": FEDERATION, "fraction": 0.5},
                       fraction="part", seed="whole"),
    "quadratics": _case(fb.datasets.quadratics, {"clients": 2, "dim": 2},
                        clients="count", dim="count"),
    "simulate": _case(_simulated, {}, rounds="whole", cohort="count or None",
                      weights="word or None",
                      chunk="count or None", devices="count or None",
                      every="count or None", store="word", reduction="word"),
    "Cohort": _case(_cohort, {}, epoch="count or None", separation="count or None",
                    sampling="word", dropout="part"),
    "trimmed_mean": _case(fb.trimmed_mean, {}, trim="part"),
    "personalize": _case(fb.personalize, {"algorithm": PLAIN, "down": None,
                                          "new_clients": FEDERATION, "key": KEY},
                         visits="whole"),
    "choose": _case(_shared, {"folds": 2}, alphas="alpha"),
    "dgd": _case(fb.theory.steps.dgd, {"alpha": 0.5, "smoothness": KNOWN},
                 alpha="alpha"),
    "dcgd": _case(fb.theory.steps.dcgd, {"alpha": 0.5, "smoothness": KNOWN,
                                         "omega": 1.0}, **OF_MIXTURES),
    "steps.diana": _case(fb.theory.steps.diana, {"alpha": 0.5, "smoothness": KNOWN,
                                                 "omega": 1.0}, **OF_MIXTURES),
    "cohort_cost": _case(fb.theory.privacy.cohort_cost,
                         {"noise": 1.0, "cohort": 2, "clients": 4, "rounds": 0,
                          "delta": 1e-5},
                         noise="not negative", rounds="whole", delta="part",
                         adjacency="word"),
}  # fmt: skip
KINDS: dict[Any, str] = {
    checks.ALGORITHM: "algorithm",
    checks.ALPHA: "alpha",
    checks.CHANCE: "part",
    checks.COUNT: "count",
    checks.FUNCTION: "function",
    checks.NOT_NEGATIVE: "not negative",
    checks.PART: "part",
    checks.PATHS: "function",
    checks.POSITIVE: "positive",
    checks.WHOLE: "whole",
    checks.each_client(checks.NOT_NEGATIVE): "by client",
    checks.Number(least=2, whole=True): "count",
    checks.Number(above=0, most=1): "fraction",
}
"""What is wrong with an argument, by its rule."""


def _registered(name: str) -> Case:
    """An algorithm with example arguments, and what its rules say of them."""
    entry = ALGORITHMS[name]
    work = fb.Work(0.1, steps=2, batch_size=None)
    good = examples.arguments(name, LOSS, work, CLIENTS)
    kinds = {one: KINDS[rule] for one, rule in entry.rules.items() if rule in KINDS}
    if good.pop("work", None):
        return _local(entry.build, good, **kinds)
    return Case(entry.build, good, kinds)


CASES |= {name: _registered(name) for name in ALGORITHMS if name not in CASES}
ALLOWED = {
    ("finetune", "steps", "0"),
    ("finetune", "steps", "[1, 0]"),
    ("fomaml", "steps", "0"),
    ("fomaml", "steps", "[1, 0]"),
    *(
        (name, "optimizer", "[0.1]")
        for name, one in ALGORITHMS.items()
        if one.own_rates
    ),
}
"""What is wrong elsewhere and has a meaning here."""


def _wrong(name: str) -> Iterator[tuple[str, Any]]:
    """The arguments of a function, each with all that is wrong with its kind."""
    for argument, kind in CASES[name].kinds.items():
        for value in WRONG[kind]:
            if (name, argument, repr(value)) not in ALLOWED:
                yield argument, value


def _seen(value: Any, line: str) -> bool:
    """Whether a line shows a value, or an entry of it."""
    if isinstance(value, str) or value is None:
        return repr(value) in line
    if callable(value):
        return "function" in line
    if isinstance(value, fb.Epochs):
        value = value.number
    entries = np.ravel(np.asarray(value, object))
    return "[]" in line or any(f"{entry}" in line for entry in entries)


def verdict(call: Callable, argument: str, value: Any) -> str:
    """What is wrong with how a call ends; nothing if it is refused as it should be."""
    try:
        call()
    except ValueError as error:
        line = str(error)
        if "\n" in line or argument not in line or not _seen(value, line):
            return f"says: {line[:200]}"
        return "" if " is not " in line else f"does not say what is allowed: {line}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return "is accepted"


def faults(name: str) -> list[str]:
    """What a function does with wrong arguments that it should not."""
    case = CASES[name]
    found = {
        f"{name}({argument}={value!r})": verdict(
            lambda argument=argument, value=value: case.call(
                **{**case.good, argument: value}
            ),
            argument,
            value,
        )
        for argument, value in _wrong(name)
    }
    return [f"{call} {what}" for call, what in found.items() if what]


@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments_are_refused_in_one_line(name):
    assert not faults(name)


def test_there_are_enough_of_them():
    assert sum(len(list(_wrong(name))) for name in CASES) >= 200


def _arrays(values: Any) -> dict[str, fb.Algorithm]:
    """Algorithms with an argument over clients each, by the argument."""
    whole = np.ones(len(values), int)
    quick = {"steps": 1, "batch_size": None}
    return {
        "fedavg: work: steps": fb.fedavg(
            LOSS, fb.Work(0.1, steps=whole, batch_size=None)
        ),
        "fedprox: work: steps": algorithms.fedprox(
            LOSS, fb.Work(0.1, steps=whole, batch_size=None), mu=1.0
        ),
        "scaffold: work: steps": fb.scaffold(
            LOSS, fb.Work(0.1, steps=whole, batch_size=None)
        ),
        "finetune: work: steps": fb.finetune(
            PLAIN, LOSS, fb.Work(0.1, steps=whole, batch_size=None)
        ),
        "ditto: lam": fb.ditto(PLAIN, LOSS, fb.Work(0.1, **quick), lam=values),
        "apfl: alpha": fb.apfl(LOSS, fb.Work(0.1, **quick), alpha=values),
        "apfl_agnostic: alpha": algorithms.apfl_agnostic(
            LOSS, fb.Work(0.1, **quick), alpha=values, clients=CLIENTS, q_rate=0.1
        ),
        "mapper: alpha": algorithms.mapper(LOSS, fb.Work(0.1, **quick), alpha=values),
        "flix: alpha": _flix(alpha=values),
        "flix: smooth": _flix(smooth=values),
        "gradient_descent: smooth": _flix(
            local=fb.solvers.gradient_descent(LOSS, values)
        ),
        "given: models": _flix(local=fb.solvers.given(jnp.zeros((len(values), 2)))),
        "rand_k: k": transforms.compressed(PLAIN, fb.compress.rand_k(whole)),
        "diana: rate": transforms.clip(transforms.diana(PLAIN, TOP, rate=values), 1.0),
    }


def _flix(**given: Any) -> fb.Algorithm:
    newton = fb.solvers.newton(LOSS)
    return fb.flix(LOSS, lambda loss: PLAIN, **{"alpha": 0.5, "local": newton, **given})


def _run(algorithm: Any, **given: Any) -> fb.Run:
    start = (jnp.zeros(2), FEDERATION, KEY)
    return fb.simulate(algorithm, *start, **{"rounds": 1, **given})


@pytest.mark.parametrize("length", [1, 3, 5])
def test_an_array_over_other_clients_is_refused_before_anything_is_traced(length):
    for key, algorithm in _arrays([0.5] * length).items():
        line = f"^{key}: an array of {length} is not one value, .* the 4 clients$"
        with pytest.raises(UserError, match=line):
            _run(algorithm)
        with pytest.raises(UserError, match=line):  # a node that knows how many
            Executor(_own(algorithm))
        with pytest.raises(UserError, match=line):
            fb.personalize(algorithm, None, FEDERATION, KEY)  # pyright: ignore


def _own(algorithm: fb.Algorithm) -> ClientSetup:
    return ClientSetup(0, algorithm, (), KEY, {}, {}, {}, clients=CLIENTS)


def test_arrays_over_the_clients_pass_as_lists_too():
    for values in ([0.5] * 4, (0.5,) * 4, np.full(4, 0.5), jnp.full(4, 0.5)):
        for algorithm in _arrays(values).values():
            fits(algorithm.needs, CLIENTS)
    work = {"steps": [1, 2, 3, 1], "batch_size": None}
    _run(fb.apfl(LOSS, fb.Work(0.1, **work), alpha=[0.1, 0.5, 0, 1]))


@pytest.mark.parametrize("clients", [3, 5])
@pytest.mark.parametrize("name", ["agnostic", "apfl_agnostic"])
def test_agnostic_fl_for_another_number_of_clients_is_refused(name, clients):
    more = {"alpha": 0.5} if name == "apfl_agnostic" else {}
    build = getattr(algorithms, name)
    work = fb.Work(0.1, steps=2, batch_size=None)
    algorithm = build(LOSS, work, **more, clients=clients, q_rate=0.1)
    line = f"^clients: {clients} is not 4, the number of clients there are$"
    for start in (_run, lambda wrong: Executor(_own(wrong))):
        with pytest.raises(UserError, match=line):
            start(algorithm)


def test_numbers_of_other_libraries_and_optimizers_are_accepted():
    rates: Any = (
        np.float32(0.5),
        np.float64(0.5),
        jnp.asarray(0.5),
        jnp.float32(0.5),
        1,
    )
    whole: Any = (np.int64(3), jnp.asarray(2))
    rules = (optax.adam(0.1), fb.Scheduled(lambda round: 0.1, "round"))
    for rate in (*rates, *rules):
        fb.fedavg(LOSS, fb.Work(rate, steps=whole[0], batch_size=whole[1]))
    for alpha in (*rates, 0, 1.0, np.asarray(0.5)):
        fb.apfl(LOSS, fb.Work(0.1, steps=fb.Epochs(2), batch_size=None), alpha=alpha)
    few: Any = np.int32(2), None, None, "fixed", np.float32(0.5)
    _run(PLAIN, rounds=np.int64(3), cohort=fb.Cohort(*few))
    fb.partition.iid(40, *whole)


def test_a_sweep_is_checked_by_value_and_traced_values_pass():
    def build(alpha):
        return fb.apfl(LOSS, fb.Work(0.1, steps=1, batch_size=None), alpha=alpha)

    _run(build, over=jnp.asarray([0.0, 0.5, 1.0]))
    jax.eval_shape(lambda alpha: (build(alpha), alpha)[1], 2.0)
    with pytest.raises(UserError, match=r"^apfl: alpha: 2.0 is not in \[0, 1\]"):
        _run(build, over=jnp.asarray([0.5, 2.0]))


def test_an_unknown_argument_is_for_python_to_refuse():
    with pytest.raises(TypeError, match=r"fedavg\(\).* 'batches'"):
        fb.fedavg(LOSS, fb.Work(0.1, 1, None), batches=3)  # pyright: ignore


def test_arrays_of_different_clients_are_not_compared():
    with pytest.raises(UserError, match=r"an array of 3 is not one for each of the 2"):
        fb.metrics.client_spread(np.ones(2), np.ones(3), True)
