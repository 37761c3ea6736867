"""What the C library does with memory that a step frees."""

from __future__ import annotations

import functools

import torch

_LARGEST = 2**25 - 2**13  # bytes of the largest block that glibc learns from


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of what is freed, for the whole process.

    It gives memory at the heap's end back to the kernel when there is twice as much as the largest block that was ever
    mapped and freed, and takes it again page by page. A step frees gradients and activations at its end, so a model
    with small layers has a thousand page faults a step and more. One block of the largest size that counts, freed
    without having been touched, does what freeing a large layer would do. Other allocators don't care. After glibc's
    mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
    """
    torch.UntypedStorage(_LARGEST)
