"""The ZeRO paper's own account of a rank's memory, for any precision: bytes a parameter, and no more."""

from __future__ import annotations


def zero_bytes(
    num_params: float, ranks: int, *, level: int, params: float = 2, gradients: float = 2, state: float = 12
) -> float:
    """The bytes of params, gradients and optimizer state that a rank holds.

    Args:
        num_params: elements.
        ranks: how many share them.
        level: 0 to 3; the paper's stages.
        params, gradients, state: bytes an element. The defaults are mixed-precision Adam's: half-precision params and
            gradients, and a float32 copy and two moments (the paper's K = 12).

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), figure 1.

    >>> [round(zero_bytes(7.5e9, 64, level=level) / 1e9, 1) for level in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    if ranks < 1 or level not in range(4):
        raise ValueError(f"expected ranks of at least 1 and a level from 0 to 3, got {ranks} and {level}")
    cut = (state, gradients, params)[:level]
    whole = (state, gradients, params)[level:]
    return num_params * (sum(whole) + sum(cut) / ranks)
