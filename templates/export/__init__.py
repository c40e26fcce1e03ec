"""Attention kernels for NVIDIA GPUs that need torch only, exported by flashgen. README.md describes their use."""

from .operators import attention
from .specs import SPECS, Spec

__all__ = ["SPECS", "Spec", "attention"]
