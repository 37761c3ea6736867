"""Optimizers as pure transforms that declare the part of a tensor that they must see."""

from typing import TYPE_CHECKING, Any

from . import contrib, rows
from .base import (
    Needs,
    Schedule,
    Transform,
    chain,
    pointwise,
    step_count,
    with_statistics,
    with_whole_leaves,
    with_whole_rows,
    with_whole_tree,
)
from .interop.frameworks import from_optax, from_torch, from_torchopt
from .interop.torch_state_dicts import export_torch_state, import_torch_state
from .kernels.compiled import compiled
from .naming import named
from .optimizers.adadelta import adadelta, scale_by_adadelta
from .optimizers.adafactor import adafactor, scale_by_adafactor, scale_by_factored_rms
from .optimizers.adagrad import adagrad, scale_by_rss
from .optimizers.adam import adam, adamw, scale_by_adam
from .optimizers.adamax import adamax, scale_by_adamax
from .optimizers.amsgrad import amsgrad, scale_by_amsgrad
from .optimizers.lamb import lamb
from .optimizers.lars import lars
from .optimizers.lbfgs import lbfgs, scale_by_lbfgs
from .optimizers.lion import lion, scale_by_lion
from .optimizers.muon import muon, orthogonalize
from .optimizers.nadam import nadam, scale_by_nadam
from .optimizers.prodigy import prodigy
from .optimizers.radam import radam, scale_by_radam
from .optimizers.rmsprop import rmsprop, scale_by_rms
from .optimizers.schedule_free import (
    schedule_free,
    schedule_free_adamw,
    schedule_free_eval_params,
    schedule_free_sgd,
)
from .optimizers.sgd import sgd
from .optimizers.shampoo import scale_by_shampoo, shampoo
from .optimizers.soap import scale_by_soap, soap
from .schedules import (
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_constant_schedule,
    warmup_cosine_decay_schedule,
    warmup_exponential_decay_schedule,
    warmup_stable_decay_schedule,
)
from .states import find_states, replace_states, state_metrics
from .transforms.clipping import adaptive_grad_clip, clip, clip_by_global_norm
from .transforms.momentum import ema, trace
from .transforms.noise import add_noise
from .transforms.scaling import (
    identity,
    nan_to_num,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    scale_by_sign,
    set_to_zero,
    zero_nans,
)
from .transforms.trust_ratio import scale_by_trust_ratio
from .transforms.weight_decay import add_decayed_weights
from .tree_norms import Norms, norms
from .wrappers.hyperparams import (
    hyperparams,
    inject_hyperparams,
    observe,
    reduce_on_plateau,
    with_hyperparams,
)
from .wrappers.masking import apply_if_nonzero, freeze, masked, partition, scale_by_label
from .wrappers.wrappers import (
    apply_if_finite,
    ema_params,
    lookahead,
    maybe_update,
    multi_steps,
    named_chain,
    params_ema,
    sam,
)

if TYPE_CHECKING:
    from ..sharded.to_torch import to_torch as to_torch

# Transforms: the words of an author, and their plain data
__all__ = [
    "Needs",
    "Schedule",
    "Transform",
    "chain",
    "named",
    "named_chain",
    "pointwise",
    "step_count",
    "with_statistics",
    "with_whole_leaves",
    "with_whole_rows",
    "with_whole_tree",
]
# Optimizers, a file each in optimizers/; the long tail is in contrib, those of rows in rows
__all__ += [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "amsgrad",
    "contrib",
    "lamb",
    "lars",
    "lbfgs",
    "lion",
    "muon",
    "nadam",
    "prodigy",
    "radam",
    "rmsprop",
    "rows",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_eval_params",
    "schedule_free_sgd",
    "sgd",
    "shampoo",
    "soap",
]
# Their parts, beside them or in transforms/
__all__ += [
    "adaptive_grad_clip",
    "add_decayed_weights",
    "add_noise",
    "clip",
    "clip_by_global_norm",
    "ema",
    "identity",
    "nan_to_num",
    "orthogonalize",
    "scale",
    "scale_by_adadelta",
    "scale_by_adafactor",
    "scale_by_adam",
    "scale_by_adamax",
    "scale_by_amsgrad",
    "scale_by_factored_rms",
    "scale_by_lbfgs",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_nadam",
    "scale_by_radam",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "scale_by_shampoo",
    "scale_by_sign",
    "scale_by_soap",
    "scale_by_trust_ratio",
    "set_to_zero",
    "trace",
    "zero_nans",
]
# Schedules of the learning rate and other hyperparameters
__all__ += [
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "join_schedules",
    "linear_schedule",
    "piecewise_constant_schedule",
    "polynomial_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
    "warmup_stable_decay_schedule",
]
# Wrappers: for some leaves, for some steps, with hyperparameters in the state
__all__ += [
    "apply_if_finite",
    "apply_if_nonzero",
    "ema_params",
    "freeze",
    "hyperparams",
    "inject_hyperparams",
    "lookahead",
    "masked",
    "maybe_update",
    "multi_steps",
    "observe",
    "params_ema",
    "partition",
    "reduce_on_plateau",
    "sam",
    "scale_by_label",
    "with_hyperparams",
]
# States, kernels and other frameworks
__all__ += [
    "Norms",
    "compiled",
    "export_torch_state",
    "find_states",
    "from_optax",
    "from_torch",
    "from_torchopt",
    "import_torch_state",
    "norms",
    "replace_states",
    "state_metrics",
    "to_torch",
]


def __getattr__(name: str) -> Any:
    """Import `to_torch`, which lies above this folder, when it is first used; and say where a name
    of the long tail is."""
    if name == "to_torch":
        from importlib import import_module

        return import_module("..sharded.to_torch", __name__).to_torch
    where = f": it is optim.contrib.{name}" if name in contrib.__all__ else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
