# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""The public names of fedblend: type checkers and ``__init__.py`` read this table."""

import fedblend_adapters
from fedblend import (
    algorithms as algorithms,
)
from fedblend import (
    augment as augment,
)
from fedblend import (
    compress as compress,
)
from fedblend import (
    data as data,
)
from fedblend import (
    keys as keys,
)
from fedblend import (
    losses as losses,
)
from fedblend import (
    metrics as metrics,
)
from fedblend import (
    mixing as mixing,
)
from fedblend import (
    models as models,
)
from fedblend import (
    solvers as solvers,
)
from fedblend import (
    theory as theory,
)
from fedblend import (
    transforms as transforms,
)
from fedblend import (
    trees as trees,
)
from fedblend.algorithms.apfl import (
    apfl as apfl,
)
from fedblend.algorithms.ditto import (
    ditto as ditto,
)
from fedblend.algorithms.fedavg import (
    fedavg as fedavg,
)
from fedblend.algorithms.finetune import (
    finetune as finetune,
)
from fedblend.algorithms.flix import (
    flix as flix,
)
from fedblend.algorithms.local_only import (
    local_only as local_only,
)
from fedblend.algorithms.locodl import (
    locodl as locodl,
)
from fedblend.algorithms.partial import (
    partial as partial,
)
from fedblend.algorithms.scafflix import (
    scafflix as scafflix,
)
from fedblend.algorithms.scaffold import (
    scaffold as scaffold,
)
from fedblend.core import (
    Aggregate as Aggregate,
)
from fedblend.core import (
    Algorithm as Algorithm,
)
from fedblend.core import (
    Batch as Batch,
)
from fedblend.core import (
    Down as Down,
)
from fedblend.core import (
    Needs as Needs,
)
from fedblend.core import (
    Ragged as Ragged,
)
from fedblend.core import (
    Shard as Shard,
)
from fedblend.core import (
    Up as Up,
)
from fedblend.data import (
    datasets as datasets,
)
from fedblend.data import (
    partition as partition,
)
from fedblend.data.federated import (
    FederatedData as FederatedData,
)
from fedblend.data.federated import (
    federate as federate,
)
from fedblend.data.federated import (
    shard_of as shard_of,
)
from fedblend.data.variants import (
    concatenate as concatenate,
)
from fedblend.local import (
    Epochs as Epochs,
)
from fedblend.local import (
    Scheduled as Scheduled,
)
from fedblend.local import (
    Work as Work,
)
from fedblend.local import (
    descend as descend,
)
from fedblend.metrics import (
    Metric as Metric,
)
from fedblend.mixing import (
    Blend as Blend,
)
from fedblend.mixing import (
    predict as predict,
)
from fedblend.models import (
    Model as Model,
)
from fedblend.runs.auto import (
    AutoResult as AutoResult,
)
from fedblend.runs.auto import (
    auto as auto,
)
from fedblend.runs.compare import (
    compare as compare,
)
from fedblend.runs.compare import (
    sweep as sweep,
)
from fedblend.runs.judge_scores import (
    judge as judge,
)
from fedblend.runs.personalize import (
    personalize_from as personalize_from,
)
from fedblend.runs.plan import (
    PlanResult as PlanResult,
)
from fedblend.runs.plan import (
    plan as plan,
)
from fedblend.runs.saved_run import (
    SavedRun as SavedRun,
)
from fedblend.runs.saved_run import (
    load as load,
)
from fedblend.runs.tune_alike import (
    tune_alike as tune_alike,
)
from fedblend.selection.choose import (
    choose as choose,
)
from fedblend.selection.one_letter import (
    OneLetter as OneLetter,
)
from fedblend.selection.one_letter import (
    one_letter as one_letter,
)
from fedblend.simulation import checkpoint as checkpoint
from fedblend.simulation.aggregators import (
    trimmed_mean as trimmed_mean,
)
from fedblend.simulation.compile import (
    compile_cache as compile_cache,
)
from fedblend.simulation.debug import (
    debug as debug,
)
from fedblend.simulation.personalize import (
    NewClients as NewClients,
)
from fedblend.simulation.personalize import (
    personalize as personalize,
)
from fedblend.simulation.result import (
    Record as Record,
)
from fedblend.simulation.run import (
    Run as Run,
)
from fedblend.simulation.sampling import (
    Cohort as Cohort,
)
from fedblend.simulation.sampling import (
    Strata as Strata,
)
from fedblend.simulation.simulate import (
    simulate as simulate,
)
from fedblend.simulation.stores.client_store import (
    Storage as Storage,
)
from fedblend.simulation.train_alone import (
    train_alone as train_alone,
)
from fedblend_interop import trackers as trackers
from fedblend_interop.estimators import (
    FederatedClassifier as FederatedClassifier,
)
from fedblend_interop.estimators import (
    FederatedRegressor as FederatedRegressor,
)
from fedblend_interop.estimators import (
    client_scorer as client_scorer,
)

adapt = fedblend_adapters
__version__: str
__all__: list[str]
