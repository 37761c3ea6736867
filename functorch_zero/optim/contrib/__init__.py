"""Optimizers and transforms of the long tail: as exact as the others, and less often asked for."""

from ..optimizers.adamax import adamaxw
from ..optimizers.nadam import nadamw
from ..optimizers.rmsprop import scale_by_stddev
from ..schedules import (
    cosine_onecycle_schedule,
    linear_onecycle_schedule,
    piecewise_interpolate_schedule,
    sgdr_schedule,
)
from .adabelief import adabelief, scale_by_belief
from .ademamix import ademamix, scale_by_ademamix
from .block_norms import clip_by_block_rms, scale_by_param_block_norm, scale_by_param_block_rms
from .fromage import fromage
from .full_matrix_adagrad import (
    full_matrix_adagrad,
    scale_by_full_matrix_adagrad,
    scale_by_full_matrix_adagrad_tree,
)
from .novograd import novograd, scale_by_novograd
from .rprop import rprop, scale_by_rprop
from .sign_sgd import sign_sgd
from .sm3 import scale_by_sm3, sm3
from .yogi import scale_by_yogi, yogi

__all__ = [
    "adabelief",
    "adamaxw",
    "ademamix",
    "clip_by_block_rms",
    "cosine_onecycle_schedule",
    "fromage",
    "full_matrix_adagrad",
    "linear_onecycle_schedule",
    "nadamw",
    "novograd",
    "piecewise_interpolate_schedule",
    "rprop",
    "scale_by_ademamix",
    "scale_by_belief",
    "scale_by_full_matrix_adagrad",
    "scale_by_full_matrix_adagrad_tree",
    "scale_by_novograd",
    "scale_by_param_block_norm",
    "scale_by_param_block_rms",
    "scale_by_rprop",
    "scale_by_sm3",
    "scale_by_stddev",
    "scale_by_yogi",
    "sgdr_schedule",
    "sign_sgd",
    "sm3",
    "yogi",
]
