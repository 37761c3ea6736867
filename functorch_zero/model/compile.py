"""A unit's forward as a compiled region.

Entering and leaving a unit, its collectives and the hooks that remember gathered storage stay
outside of the region; inside are whole leaves and torch operators. Blocks of one class and shape
share their code: it is compiled once.

Note [random numbers]: inductor's own random numbers depend on how a kernel was compiled, and so on
the shapes that came first. Ranks and the unsharded step needn't have those alike. Inductor is told
to draw as torch does, unless asked otherwise.

Note [CUDA graphs]: a graph replays kernels at the addresses at which it was recorded, and a unit's
weights lie at other addresses in each pass: at level 3 they are gathered anew, elsewhere a step may
return new ones. torch would copy them all into tensors of the graph's own before each replay, which
then hold a second copy of the model. So regions are compiled without graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._torch_private import options_of_mode, transforms_active

OPTIONS = ("backend", "mode", "options", "dynamic", "fullgraph")


def compiled(forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """A forward, compiled at its first call. Inside torch.func transforms it runs as it
    is: torch doesn't compile under them."""
    # Nothing is compiled yet: torch waits for the first call's shapes
    region = torch.compile(forward, **options)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (forward if transforms_active() else region)(*args, **kwargs)

    return run


def options_for_torch(options: Mapping[str, Any] | None, compiles: bool) -> dict[str, Any]:
    """The options for torch.compile, checked. For inductor `fallback_random` is on, unless they say
    otherwise, and CUDA graphs are off.

    Raises:
        ValueError: an option is unknown, nothing is compiled, or CUDA graphs are asked for.
    """
    # Options without a region would be silently without effect
    if options and not compiles:
        raise ValueError(
            "compile_options are for compile=..., which was not given. Remedy: compile=True"
        )
    unknown = sorted(set(options or {}) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"no such compile_options: {unknown}. Remedy: choose among {', '.join(OPTIONS)}"
        )
    made = dict(options or {})
    given, mode, backend = made.get("options") or {}, made.get("mode"), made.get("backend")
    by_inductor = compiles and backend in (None, "inductor")
    # Torch takes a mode or options, and refuses both: a mode alone is written out
    if by_inductor and mode and not given:
        given = options_of_mode(made.pop("mode"), made.get("dynamic"))
    if backend == "cudagraphs" or (by_inductor and given.get("triton.cudagraphs")):
        raise ValueError(  # see Note [CUDA graphs]
            f"compile_options={options} records CUDA graphs. A graph reads weights where they lay "
            "when it was recorded, and a step's weights lie elsewhere each time. Remedy: leave "
            "that out; or the mode 'max-autotune-no-cudagraphs'"
        )
    # Other backends draw random numbers in their own way: see Note [random numbers]
    if by_inductor:
        # Off by name, since a process may have switched graphs on for all that inductor compiles
        made["options"] = {"fallback_random": True, "triton.cudagraphs": False, **given}
    return made
