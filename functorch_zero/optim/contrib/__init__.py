"""Optimizers and transforms of the long tail: as exact as the others, and less often asked for."""

from ..optimizers.adafactor import scale_by_sm3
from ..optimizers.adam import scale_by_ademamix, scale_by_belief, scale_by_yogi
from ..optimizers.non_pointwise import fromage, full_matrix_adagrad, novograd, sm3
from ..optimizers.pointwise import adabelief, adamaxw, ademamix, nadamw, rprop, sign_sgd, yogi
from ..optimizers.rmsprop import scale_by_rprop, scale_by_stddev
from ..schedules import (
    cosine_onecycle_schedule,
    linear_onecycle_schedule,
    piecewise_interpolate_schedule,
    sgdr_schedule,
)
from ..transforms.norms import (
    clip_by_block_rms,
    scale_by_novograd,
    scale_by_param_block_norm,
    scale_by_param_block_rms,
)
from .full_matrix_adagrad import (
    scale_by_full_matrix_adagrad,
    scale_by_full_matrix_adagrad_tree,
)

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
