"""Kernels built beforehand: makes a folder of sources, cubins and `manifest.json` from a request, and checks it.

`build` needs NVRTC and no GPU, or nothing at all with `sources_only`. A folder that it wrote is used by naming it in
FLASHGEN_RELEASE: kernels are then looked up there first, on machines without NVRTC too. Programs that are not Python
find in its manifest how each kernel is launched, and beside each cubin a C++ header that says the same.
"""

from flashgen.release.check import Finding, check, stale
from flashgen.release.folder import Progress, build
from flashgen.release.request import Request, Step, read_requests

__all__ = ["Finding", "Progress", "Request", "Step", "build", "check", "read_requests", "stale"]
